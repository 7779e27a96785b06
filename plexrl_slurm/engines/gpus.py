"""Whether torch sees the GPUs that Slurm gave: a rank without them would quietly use the CPU."""

import os
from collections.abc import Mapping
from pathlib import Path

from plexrl_slurm.core.errors import BadInput

#: There if the node has an NVIDIA driver at work.
DRIVER = Path("/dev/nvidiactl")


def check_gpus(
    *,
    environment: Mapping[str, str] = os.environ,
    cuda: str | None,
    seen: int,
    driver: Path = DRIVER,
) -> None:
    """Raise ``BadInput`` if torch, built for ``cuda`` (``None``: for the CPU), sees fewer GPUs
    than Slurm gave. Without Slurm, or without a driver and CUDA (a test's GPUs), all is well."""
    given = [each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    if "SLURM_JOB_ID" not in environment or not given or seen >= len(given):
        return
    where = environment.get("SLURMD_NODENAME", "this node")
    if cuda is not None:
        raise BadInput(
            f"Slurm gave {len(given)} GPUs on {where} and torch (CUDA {cuda}) sees {seen}: compare "
            f"nvidia-smi with File= in Slurm's gres.conf there, and the driver with torch's CUDA"
        )
    if driver.exists():
        raise BadInput(
            f"Slurm gave {len(given)} GPUs on {where} and torch is built for the CPU only: install "
            f"a torch with CUDA into the service's environment"
        )


def check_torch() -> None:
    """:func:`check_gpus` with the torch that is installed."""
    import torch

    cuda: str | None = torch.version.cuda
    check_gpus(cuda=cuda, seen=torch.cuda.device_count() if cuda is not None else 0)


def has_gpus() -> bool:
    """Whether engines of this process compute on GPUs."""
    import torch

    return torch.version.cuda is not None and torch.cuda.device_count() > 0


def accelerator() -> str:
    """What DeepSpeed computes on here, as it spells it."""
    return "cuda" if has_gpus() else "cpu"

"""A training rank takes its device, and joins the process group of its gang.

Where torch sees GPUs, DeepSpeed computes on them: tensors there go through NCCL, those in host
memory (offloaded shares, what ranks agree on) through Gloo. ``DS_ACCELERATOR=cpu`` in the
environment of the daemon keeps it on the CPU.
"""

import os
from collections.abc import MutableMapping
from datetime import timedelta
from typing import Final

import torch

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines import jit, meeting
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.gpus import accelerator
from plexrl_slurm.engines.skeleton import quiet

#: A rank that hears nothing from another for so long gives up.
_TIMEOUT: Final = timedelta(minutes=5)
#: Process groups by what DeepSpeed computes on.
BACKENDS: Final = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def join(spec: RankSpec) -> torch.device:
    """Bring up this process's group, once; a second engine in the process shares it.

    Answers with the device that DeepSpeed computes on.
    """
    torch.set_num_threads(max(1, len(spec.cores) // spec.world))
    # With several threads PyTorch otherwise adds some gradients in the order they are ready.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    device = take_device(spec, os.environ)
    if torch.distributed.is_initialized():
        here = torch.distributed.get_world_size()
        if here != spec.world:
            raise RuntimeError(f"this process is in a gang of {here}, not {spec.world}")
        return device
    os.environ.update(
        RANK=str(spec.rank),
        LOCAL_RANK=str(spec.rank - spec.first),
        WORLD_SIZE=str(spec.world),
        MASTER_ADDR=spec.master_address,
        MASTER_PORT=str(spec.master_port),
        HF_HUB_OFFLINE="1",
    )
    os.environ.setdefault("DEEPSPEED_TIMEOUT", str(int(_TIMEOUT.total_seconds() // 60)))
    jit.clear_stale_locks(jit.extensions_dir())
    backend = BACKENDS[device.type]
    with quiet():
        import deepspeed

        if spec.meeting:  # DeepSpeed takes the group that is there
            meeting.join(spec, timeout=_TIMEOUT, backend=backend)
        deepspeed.init_distributed(backend, timeout=_TIMEOUT, verbose=False)
    return device


def take_device(spec: RankSpec, environment: MutableMapping[str, str]) -> torch.device:
    """The GPU of this rank, or the CPU; what libraries must know of it is in ``environment`` then.

    Raises ``BadInput`` if there are fewer GPUs than ranks of this node.
    """
    chosen = environment.setdefault("DS_ACCELERATOR", accelerator())
    if chosen != "cuda":
        return torch.device("cpu")
    number, seen = spec.rank - spec.first, torch.cuda.device_count()
    if number >= seen:
        raise BadInput(
            f"rank {spec.rank} of WPG {spec.wpg} is number {number + 1} on its node and torch sees "
            f"{seen} GPUs there: lower gpus of the WPG, or set DS_ACCELERATOR=cpu in the daemon's "
            f"environment to train on the CPU"
        )
    # cuBLAS is deterministic only with this, and reads it when it starts.
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Before anything is made there: streams, and the context of a library.
    torch.cuda.set_device(number)
    return torch.device("cuda", number)

"""A hold's Slurm job: its script, its files, its submission."""

import json
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.daemons.agent_config import AgentConfig
from plexrl_slurm.daemons.layout import LOCALHOST, local_nodes
from plexrl_slurm.memory.files import storage_errors
from plexrl_slurm.settings import Settings
from plexrl_slurm.slurm.port import BatchJob, JobStatus, SlurmPort, SlurmState
from plexrl_slurm.slurm.templates import fill, render
from plexrl_slurm.slurm_settings import ComponentSettings

#: Variables of engines and their libraries.
_KEPT = ("VLLM_", "DS_", "DEEPSPEED_", "TORCH_", "CUDA_", "NCCL_", "GLOO_", "OPENBLAS_")


def submit_hold(
    port: SlurmPort, settings: Settings, hold: str, *, endpoint: str, exclude: Iterable[str]
) -> SlurmId:
    """Write the files of ``hold`` and submit it. Blocks; raises what the port raises."""
    folder = settings.state_dir / "holds"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if settings.backend == "local":
        nodes = local_nodes(settings)
        loops = [_loop(settings, hold, endpoint, folder, node) for node in nodes]
        script = loops[0].read_text(encoding="utf-8") if len(loops) == 1 else _together(loops)
    else:
        file = _loop(settings, hold, endpoint, folder, "")
        script = fill(
            "hold.sbatch.j2",
            {
                "components": _components(settings, hold, tuple(exclude)),
                "hold": hold,
                "partition": settings.partition,
                "script": str(file),
                # Not through srun: it may be lost with its node, and the agents live on.
                "log": str(folder / hold),
            },
        )
    return port.submit(
        BatchJob(
            name=hold_name(settings),
            script=script,
            workdir=settings.state_dir,
            environment=agent_environment(),
            output=str(folder / f"{hold}.log"),
        ),
        hold=False,
    )


def _loop(settings: Settings, hold: str, endpoint: str, folder: Path, node: str) -> Path:
    """A script that keeps one agent running; ``node`` "": the one that it finds itself on."""
    name = hold if node in ("", LOCALHOST) else f"{hold}.{node}"
    config, script = folder / f"{name}.json", folder / f"{name}.sh"
    _write(config, json.dumps(asdict(_config(settings, hold, endpoint, node))))
    _write(
        script,
        render(
            "agent.sh.j2",
            hold=hold,
            partition=settings.partition,
            python=sys.executable,
            config=str(config),
        ),
    )
    script.chmod(0o700)
    return script


def _together(loops: Sequence[Path]) -> str:
    """Several agents on this machine. Signals reach the whole process group."""
    each = "".join(f"{shlex.quote(str(loop))} &\n" for loop in loops)
    return f'#!/bin/bash\ntrap : TERM\n{each}while [ -n "$(jobs -pr)" ]; do wait; done\n'


def _write(path: Path, text: str) -> None:
    with storage_errors(path.parent, len(text)):
        path.write_text(text, encoding="utf-8")


def hold_name(settings: Settings) -> str:
    """Name of every hold's Slurm job."""
    return f"plexrl-hold-{settings.partition}"


def comment_of(settings: Settings, hold: str) -> str:
    """The Slurm comment of a hold, by which it is found again."""
    own = f" {settings.hold.comment}" if settings.hold.comment else ""
    return f"plexrl hold {hold}{_of_partition(settings)} in {settings.state_dir}{own}"


def is_hold(settings: Settings, status: JobStatus) -> bool:
    """Whether a Slurm job of ours is a live hold of a partition with this name."""
    return (
        status.name == hold_name(settings)
        and status.uid == os.getuid()
        and status.leader is None
        and status.state in (SlurmState.PENDING, SlurmState.RUNNING)
        and status.comment.startswith("plexrl hold ")
        and f"{_of_partition(settings)} " in f"{status.comment} "
    )


def is_of_another(settings: Settings, status: JobStatus) -> bool:
    """Whether a hold is of a daemon with another ``state_dir``; older ones do not say."""
    said, where = f"{status.comment} ", f"{_of_partition(settings)} in "
    return where in said and f"{where}{settings.state_dir} " not in said


def _of_partition(settings: Settings) -> str:
    return f" of partition {settings.partition}"


def _config(settings: Settings, hold: str, endpoint: str, node: str) -> AgentConfig:
    own = settings.partition if node in ("", LOCALHOST) else f"{settings.partition}.{node}"
    host = settings.host_dir / own
    nvme = settings.nvme_dir / own if settings.nvme_dir is not None else ""
    if settings.backend == "local":
        return AgentConfig(
            agent=f"{hold}.0.{node}",
            hold=hold,
            node=node,
            endpoint=endpoint,
            state_dir=str(settings.state_dir),
            host_dir=str(host),
            host_bytes=settings.host_bytes,
            nvme_dir=str(nvme),
            nvme_bytes=settings.nvme_bytes,
        )
    return AgentConfig(
        agent="",
        hold=hold,
        node="",
        endpoint=endpoint,
        state_dir=str(settings.state_dir),
        host_dir=str(host),
        host_bytes=settings.host_bytes,
        nvme_dir=str(nvme),
        nvme_bytes=settings.nvme_bytes,
        snapshots_dir=str(settings.snapshots_dir),
    )


def _components(
    settings: Settings, hold: str, exclude: Sequence[str]
) -> list[dict[str, list[str]]]:
    """``#SBATCH`` options of every component; what later ones inherit is said once."""
    rules = settings.hold
    minutes = rules.time_limit_us // 60_000_000
    common = [
        f"--time={minutes}",
        f"--comment={comment_of(settings, hold)}",
        "--requeue",
        "--open-mode=append",
    ]
    if rules.account:
        common.append(f"--account={rules.account}")
    if rules.qos:
        common.append(f"--qos={rules.qos}")
    found = []
    for index, component in enumerate(rules.components):
        options = [*common, *_options(component)] if index == 0 else _options(component)
        if exclude:
            options.append(f"--exclude={','.join(exclude)}")
        found.append({"options": options})
    return found


def _options(component: ComponentSettings) -> list[str]:
    kind = f"{component.gpu_type}:" if component.gpu_type else ""
    options = [
        f"--partition={component.partition}",
        f"--nodes={component.nodes}",
        "--ntasks-per-node=1",
        f"--gres=gpu:{kind}{component.gpus_per_node}",
        "--no-kill",
    ]
    if component.constraint:
        options.append(f"--constraint={component.constraint}")
    return [*options, *component.options]


def agent_environment() -> dict[str, str]:
    """What an agent and its ranks need of the daemon's environment."""
    keep = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR", "LD_LIBRARY_PATH")
    chosen = {name: os.environ[name] for name in keep if name in os.environ}
    for name, value in os.environ.items():
        if name.startswith(
            ("VLLM_", "DS_", "DEEPSPEED_", "TORCH_", "CUDA_", "NCCL_", "GLOO_", "OPENBLAS_")
        ):
            chosen[name] = value
    chosen["PATH"] = f"{Path(sys.executable).parent}:{chosen.get('PATH', '/usr/bin:/bin')}"
    return chosen

"""The cluster's configuration files, from the templates in ``conf/``, and its ports."""

import random
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from string import Template

CONF = Path(__file__).parent / "conf"
#: Below what the kernel gives to outgoing connections.
PORTS = range(20_000, 32_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the cluster pretends to be."""

    nodes: tuple[str, ...]
    #: Names without a GPU, among the nodes.
    gpuless: tuple[str, ...]
    gpus: int
    cpus: int
    memory_mb: int
    gpu_type: str = "h200"


def render(file: str, values: Mapping[str, object]) -> str:
    """Template ``conf/<file>`` with every ``$name`` filled in."""
    return Template((CONF / file).read_text(encoding="utf-8")).substitute(values)


def node_lines(shape: Shape, host: str, ports: Sequence[int]) -> str:
    """One NodeName line for each node: all of them are this machine, on ports of their own."""
    lines = []
    for name, port in zip(shape.nodes, ports, strict=True):
        words = {
            "NodeName": name,
            "NodeHostname": host,
            "NodeAddr": "127.0.0.1",
            "Port": port,
            "CPUs": shape.cpus,
            "Boards": 1,
            "SocketsPerBoard": 1,
            "CoresPerSocket": shape.cpus,
            "ThreadsPerCore": 1,
            "RealMemory": shape.memory_mb,
        }
        if name not in shape.gpuless:
            words["Gres"] = f"gpu:{shape.gpu_type}:{shape.gpus}"
        lines.append(" ".join(f"{key}={value}" for key, value in words.items()))
    return "\n".join(lines)


def gres_lines(shape: Shape, devices: Path) -> str:
    """The GPUs of each node, as files that :func:`make_devices` makes."""
    return "\n".join(
        f"NodeName={name} Name=gpu Type={shape.gpu_type} File={devices}/{name}/gpu{index}"
        for name in shape.nodes
        if name not in shape.gpuless
        for index in range(shape.gpus)
    )


def make_devices(shape: Shape, devices: Path) -> None:
    """Links to /dev/null: character devices, as Slurm wants, without any privilege."""
    for name in shape.nodes:
        (devices / name).mkdir(parents=True, exist_ok=True)
        for index in range(shape.gpus):
            link = devices / name / f"gpu{index}"
            if not link.is_symlink():
                link.symlink_to("/dev/null")


def slurm_version() -> tuple[int, int]:
    """Year and month of the Slurm that is installed."""
    told = subprocess.run(["slurmd", "-V"], capture_output=True, text=True, check=True, timeout=10)
    year, month, *_ = told.stdout.split()[-1].split(".")
    return int(year), int(month)


def cgroup_line() -> str:
    """Newer ones refuse to start where no cgroup tree is mounted; older ones do not look."""
    return "CgroupPlugin=disabled" if slurm_version() >= (23, 11) else "# nothing"


def free_ports(count: int) -> int:
    """The first of as many neighbouring TCP ports that nobody listens on now."""
    while True:
        first = random.choice(PORTS[: -count - 1])
        if _all_free(range(first, first + count)):
            return first


def listens(address: tuple[str, int]) -> bool:
    """Whether somebody takes connections there."""
    with socket.socket() as caller:
        return caller.connect_ex(address) == 0


def _all_free(ports: Iterable[int]) -> bool:
    with ExitStack() as stack:
        for port in ports:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind(("0.0.0.0", port))
            except OSError:
                return False
    return True

"""Which adapter a partition on Slurm uses."""

from importlib.util import find_spec
from pathlib import Path

from plexrl_slurm.core.errors import BadConfig, SlurmUnavailable
from plexrl_slurm.slurm.commands import CommandsSlurm
from plexrl_slurm.slurm.port import ClusterPort
from plexrl_slurm.slurm.pyslurm_port import PyslurmSlurm

ADAPTERS = ("auto", "commands", "pyslurm")


def make_cluster_port(
    adapter: str = "auto",
    conf: Path | None = None,
    timeout_s: float = 20.0,
    *,
    module: str = "pyslurm",
) -> ClusterPort:
    """``auto``: pyslurm where it can be imported (tried in a child), else Slurm's programs."""
    if adapter not in ADAPTERS:
        raise BadConfig("[slurm] adapter", (f"{adapter!r} is none of {', '.join(ADAPTERS)}",))
    commands = CommandsSlurm(conf, timeout_s)
    if adapter == "commands" or (adapter == "auto" and find_spec(module) is None):
        return commands
    port = PyslurmSlurm(commands, timeout_s, module=module)
    try:
        port.version()
    except SlurmUnavailable as error:
        if adapter == "auto":
            return commands
        raise BadConfig(
            "[slurm] adapter",
            (
                f"pyslurm cannot be used here: {error.sentence}; install the pyslurm of your "
                f'Slurm\'s version, or say adapter = "commands"',
            ),
        ) from error
    return port

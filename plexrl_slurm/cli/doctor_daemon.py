"""Check of ``plexrl doctor``: what the daemon says of itself."""

from collections.abc import Iterator, Sequence

from plexrl_slurm import __version__
from plexrl_slurm.cli import show
from plexrl_slurm.cli.doctor import FAIL, OK, WARN, Check, Said
from plexrl_slurm.cli.doctor_facts import Facts
from plexrl_slurm.core.errors import DaemonUnavailable, PlexError


def daemon(facts: Facts) -> Iterator[Said]:
    """Alive, of this version, with holds and WPGs; its troubles."""
    found = facts.daemon
    name = facts.sure.partition
    if isinstance(found, DaemonUnavailable):
        unit = f"systemctl start plexrl-partitiond@{facts.path.stem}"
        words = f"{found} (where its unit is installed: {unit})" if facts.slurm else str(found)
        yield WARN, words
        return
    if isinstance(found, PlexError):
        yield FAIL, str(found)
        return
    version = found.get("version", "")
    if version and version != __version__:
        yield (
            WARN,
            f"the daemon is plexrl-slurm {version} and this is {__version__}: restart the daemon "
            f"(jobs go on meanwhile)",
        )
    yield OK, f"the daemon of partition {name} answers{', and drains' if found['draining'] else ''}"
    for sentence in found["trouble"]:
        yield FAIL, f"the daemon says: {sentence}"
    if not found["holds"]:
        yield WARN, f"there is no hold now; see the daemon's log in {facts.sure.state_dir}"
    for hold in found["holds"]:
        yield from _hold(hold)
    for wpg in found["wpgs"]:
        # A GPU that Slurm gave and that the engine does not see is such a reason.
        if wpg["state"] == "down" or (wpg["state"] == "starting" and wpg.get("reason")):
            where = f" on {wpg['node']}" if wpg.get("node") else ""
            yield (
                WARN,
                f"WPG {wpg['id']}{where} is {wpg['state']}: {wpg['reason'] or 'no reason given'} "
                f"(logs in {facts.sure.state_dir}/ranks)",
            )
    for node in found["excluded_nodes"]:
        yield (
            WARN,
            f"node {node['node']} is left out of holds until {show.iso(node['until_us'])} "
            f"({node['reason']}): repair it, or drain it in Slurm",
        )


def _hold(hold: dict[str, object]) -> Iterator[Said]:
    where = f"hold {hold['id']} (Slurm job {hold['slurm_id']})"
    state, reason = hold["state"], hold["reason"]
    if state == "up":
        nodes = hold["nodes"]
        assert isinstance(nodes, list)
        yield OK, f"{where} is up on {', '.join(nodes)}"
    elif state == "pending":
        yield (
            WARN,
            f"{where} waits in Slurm ({reason or 'no reason yet'}): squeue --start -j "
            f"{hold['slurm_id']} says for how long",
        )
    else:
        yield WARN, f"{where} is {state}{f': {reason}' if reason else ''}"
    if hold.get("lost_nodes"):
        yield WARN, f"{where} has lost {hold['lost_nodes']} node(s): see sinfo -R"


CHECKS: Sequence[Check] = (
    Check(name="daemon", look=daemon, hangs="look at its log and, if it is stuck, restart it"),
)

"""What Slurm 22.05 gets wrong now and then, and tests that say nothing about it go on after.

On a busy machine a message to a slurmd gets lost, and slurmctld says it again after a minute at the
earliest. After a slurmctld that was killed, or a node that was lost, GPUs of an ended job may stay
taken for ever: later jobs wait for them, or get nodes whose steps are refused ("Invalid generic
resource (gres) specification").
"""

import re
from contextlib import suppress

from tests.slurm_live import processes
from tests.slurm_live.cluster import Cluster, ClusterError, wait_for

_USED = re.compile(r"GresUsed=gpu:[^:\s]+:(\d+)")


def unstick(cluster: Cluster) -> str:
    """KILL every step, free the nodes and their GPUs again, and tell what there was to do."""
    stuck = cluster.steps()
    found = "; ".join(sorted(processes.describe(process) for process in stuck))
    queue = cluster.run("root", ["squeue", "-h", "-o", "%i %T %r %N"], check=False).stdout
    nodes = cluster.run("root", ["sinfo", "-h", "-p", "cpu", "-N", "-o", "%N %T %E"]).stdout
    processes.kill(processes.below(stuck))
    for name in cluster.nodes:
        words = ["scontrol", "update", f"NodeName={name}", "State=RESUME"]
        cluster.run("root", words, check=False)  # refused if there is nothing to resume
    return f"processes: {found or 'none'}; jobs: {queue.split()}; nodes: {nodes.split()}"


def free_gpus(cluster: Cluster) -> str:
    """When no job runs any more: have slurmctld count its GPUs anew if some are still taken.

    Tells what there was to do; "" if nothing.
    """
    with suppress(ClusterError):
        wait_for(lambda: not taken_gpus(cluster), "free GPUs", seconds=10)
        return ""
    taken = taken_gpus(cluster)
    cluster.stop_slurmctld()
    cluster.start_slurmctld()
    wait_for(
        lambda: not taken_gpus(cluster),
        lambda: f"GPUs are taken, though no job runs: {taken_gpus(cluster)}",
        seconds=30,
    )
    return f"GPUs stayed taken without a job: {taken}"


def taken_gpus(cluster: Cluster) -> dict[str, int]:
    """How many GPUs of each node slurmctld counts as used, where it is not none."""
    asked = cluster.run("root", ["scontrol", "-d", "-o", "show", "nodes"], check=False).stdout
    found = {}
    for line in asked.splitlines():
        used = _USED.search(line)
        if used is not None and int(used[1]):
            found[line.partition(" ")[0].removeprefix("NodeName=")] = int(used[1])
    return found

"""Record what this machine's Slurm answers, for the parsers' tests (tests/slurm/recorded/).

``python -m tests.slurm_live.record FOLDER`` takes two minutes: a time limit is at least one.
Only the standard library, so that it also runs in a bare folder tree of another Debian.
"""

import argparse
import json
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.slurm_live.cluster import Cluster, CommandFailed, wait_for
from tests.slurm_live.configuration import slurm_version

#: Of a job or node in JSON, what no parser of ours will ever want.
DROPPED = re.compile(
    r"billing|burst_buffer|cron|profile|power|mcs|federation|cluster_features|contiguous|core_spec"
    r"|thread_spec|delay_boot|deadline|licenses|memory_per|minimum|maximum_switch|network|nice"
    r"|oversubscribe|tasks_per|tres_bind|tres_freq|tres_per_task|threads_per|sockets_per|shared"
    r"|wckey|resv_|reservation|cpu_frequency|gres_detail|flags|bios|boot_time|energy|sensors"
    r"|cpu_load|free_mem|operating_system|architecture|boards|owner|extra|instance|last_busy"
    r"|temporary|slurmd_start|weight|priority_by|mail|qos_|segment|selinux|container|version"
    r"|association|required_|qosreq|mcs|planned|hash|script|time_minimum|accrue|eligible"
    r"|job_size_str|pre_sus|resize|standard_input|stdin_exp|system_comment_|steps|kill_request"
    r"|block|topology|cores|sockets|real_memory|specialized|effective_cpus|external_sensors"
    r"|job_resources|last_sched|billable|scheduled_nodes|preemptable_time|standard_|stdout|stderr"
    r"|tmp|comment_|next_state|group_name|show_flags|high|cpus_per_tres|memory_per_tres"
)
KEPT = frozenset({"admin_comment", "system_comment", "flags", "state_flags", "eligible_time"})
SACCT = (
    "JobID,JobIDRaw,JobName,User,Account,Partition,State,ExitCode,DerivedExitCode,Submit,Start,End,"
    "ElapsedRaw,AllocTRES,ReqTRES,NodeList,Comment,AdminComment,SystemComment"
)
#: Characters of output that are worth keeping where a complaint is expected.
LONG = 2000
ROOT = "root"
ALICE = "plxalice"
BOB = "plxbob"


class Recorder:
    """Writes one folder of answers."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        #: What was asked of Slurm to be in which state: name of the case, job's id.
        self.cases: dict[str, str] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def queue(self, case: str, *options: str, script: str = "sleep 900", user: str = ALICE) -> str:
        """Submit the job of a case."""
        words = ["-J", case, "-o", "/dev/null", *options]
        self.cases[case] = job = self.cluster.sbatch(user, *words, script=script)
        return job

    def root(self, *argv: str) -> None:
        self.cluster.run(ROOT, argv)

    def clean(self, text: str) -> str:
        """Without the names of this machine."""
        host = socket.gethostname().partition(".")[0]
        for old, new in (
            (str(self.cluster.folder), "/cluster"),
            (str(self.cluster.host_dir), "/dev/shm/cluster"),
        ):
            text = text.replace(old, new)
        text = re.sub(rf"\b{re.escape(host)}\b", "login", text)
        text = re.sub(r'Linux \S+ [^\n"]*', "Linux", text)
        return text

    def text(self, name: str, *argv: str, env: Mapping[str, str] | None = None) -> None:
        """Keep what a command prints."""
        done = self.cluster.run(ROOT, argv, env=env)
        (self.folder / name).write_text(self.clean(done.stdout), encoding="utf-8")

    def json(self, name: str, *argv: str) -> None:
        """Keep the JSON that a command prints, one job or node a line."""
        answer: dict[str, Any] = json.loads(self.cluster.run(ROOT, argv).stdout)
        lines = []
        for key, value in answer.items():
            if isinstance(value, list) and key not in ("errors", "warnings"):
                items = ",\n".join(json.dumps(trimmed(one)) for one in value)
                lines.append(f"{json.dumps(key)}: [\n{items}\n]")
            else:
                lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
        text = self.clean("{" + ",\n".join(lines) + "}\n")
        json.loads(text)
        (self.folder / name).write_text(text, encoding="utf-8")

    def said(self, failures: dict[str, Any], case: str, user: str, *argv: str) -> None:
        """Keep how a command ends: status (``None``: not within 20 s), output, complaint."""
        status: int | None
        try:
            done = self.cluster.run(user, argv, check=False, seconds=20)
            status, stdout, stderr = done.returncode, done.stdout, done.stderr
        except CommandFailed as slow:
            status, stdout, stderr = slow.status, slow.stdout, slow.stderr
        failures[case] = {
            "argv": [self.clean(word) for word in argv],
            "status": status,
            "stdout": self.clean(stdout if len(stdout) < LONG else f"{stdout[:LONG]} ..."),
            "stderr": self.clean(stderr),
        }


def trimmed(one: Any) -> Any:
    """Without what no parser of ours will ever want."""
    if not isinstance(one, dict):
        return one
    return {key: one[key] for key in one if key in KEPT or not DROPPED.search(key)}


def waiting_and_running(recorder: Recorder) -> None:
    """Jobs of every kind that have not ended; what has to end is begun."""
    queue, cases = recorder.queue, recorder.cases
    gpu = ("-p", "gpu", "-A", "research")

    def runs(case: str) -> bool:
        return "RUNNING" in recorder.cluster.state(cases[case])

    queue("timeout", "-t", "1")
    queue("node-fail", *gpu, "-w", "n4", "--gres=gpu:1", "--no-requeue")
    queue("requeued", *gpu, "-w", "n4", "--gres=gpu:1", "--requeue")
    shrinking = ("-w", "n[3-4]", "-N2", "--gres=gpu:h200:1", "--no-kill", "-t", "60")
    queue("shrunk", *gpu, *shrinking, script="srun --no-kill sleep 900")
    queue("running", *gpu, "-w", "n1", "--gres=gpu:h200:2", "--comment=a b=c;d", "-t", "1-00:00")
    queue("running-no-limit", "-t", "UNLIMITED", "-n1", user=BOB)
    lead = ("-w", "n1", "-n1", "--gres=gpu:1", "-t", "30")
    rest = (":", *gpu, "-w", "n[2-3]", "-N2", "--gres=gpu:1", "-t", "20", "--comment=rollout")
    queue("het-running", *gpu, *lead, *rest)
    queue("array", "--array=0-7:2%1")
    queue("preempted", "-p", "preemptable", "-w", "n5", "--exclusive", "--no-requeue")
    queue("preempted-requeued", "-p", "preemptable", "-w", "n6", "--exclusive")
    stubborn = "trap '' TERM; while :; do sleep 1; done"
    queue("completing", "-w", "n2", script=stubborn)
    queue("suspended", "-w", "n2")
    queue("cancelled-running")
    started = ("running", "het-running", "array", "preempted", "completing", "suspended", "shrunk")
    for case in (*started, "preempted-requeued", "cancelled-running", "node-fail", "requeued"):
        wait_for(partial(runs, case), f"{case} runs", seconds=60)
    queue("preemptor", *gpu, "-w", "n5", "--gres=gpu:4")
    queue("preemptor-2", *gpu, "-w", "n6", "--gres=gpu:4")
    for case in ("preemptor", "preemptor-2"):
        wait_for(partial(runs, case), f"{case} runs", seconds=60)
    queue("held-user", "--hold", "--comment=mine")
    recorder.root("scontrol", "hold", queue("held-admin"))
    marked = queue("marked", "--hold", *gpu, "--gres=gpu:2", user=BOB)
    note = "AdminComment=plexrl:1:rlvr:model=tiny;seed=7"
    recorder.root("scontrol", "update", f"JobId={marked}", note)
    queue("begin", "--begin=now+1hour")
    queue("resources", *gpu, "-N6", "--gres=gpu:4")
    queue("het-pending", *gpu, "-N1", "--gres=gpu:4", ":", *gpu, "-N5", "--gres=gpu:4")
    queue("het-held", "--hold", *gpu, "-N1", "--gres=gpu:1", ":", *gpu, "-N2", "--gres=gpu:2")
    queue("array-held", "--hold", "--array=1,3,5-9")
    queue("dependency", f"--dependency=afterok:{cases['running']}")
    recorder.root("scancel", queue("cancelled-pending", "--hold"))
    recorder.root("scontrol", "suspend", cases["suspended"])
    recorder.root("scancel", cases["cancelled-running"])
    completed = queue("completed", "--hold", "--comment=mine", script="true")
    note = "AdminComment=plexrl: 12.5 GPU-seconds"
    recorder.root("scontrol", "update", f"JobId={completed}", note)
    recorder.root("scontrol", "release", completed)
    queue("failed", script="exit 3")
    queue("killed", script="kill -9 $$")


def completing(recorder: Recorder) -> None:
    """The moment in which one job's processes refuse to end."""
    job = recorder.cases["completing"]
    recorder.root("scancel", job)
    wait_for(lambda: recorder.cluster.state(job) == "COMPLETING", "completing")
    recorder.json("squeue-live.json", "squeue", "--json")


def losses(recorder: Recorder) -> None:
    """A node that dies, one that is drained, a limit that is reached."""
    cluster, cases = recorder.cluster, recorder.cases
    cluster.set_node("n6", "DRAIN", "cable [2] is loose")
    cluster.lose_node("n4")
    cluster.wait_job(cases["node-fail"], "NODE_FAIL", seconds=90)
    wait_for(lambda: cluster.node_state("n4").endswith("*"), "n4 does not respond")
    cluster.wait_job(cases["timeout"], "TIMEOUT", seconds=150)


def failures(recorder: Recorder) -> None:
    """What the commands say when they do not do what was asked."""
    found: dict[str, Any] = {}
    cases, said = recorder.cases, recorder.said
    one = "99998"
    said(found, "scontrol unknown", ROOT, "scontrol", "show", "job", one)
    said(found, "scancel unknown", ROOT, "scancel", one)
    said(found, "scancel ended", ROOT, "scancel", cases["completed"])
    said(found, "scancel foreign", BOB, "scancel", cases["running"])
    said(found, "release unknown", ROOT, "scontrol", "release", one)
    said(found, "release ended", ROOT, "scontrol", "release", cases["completed"])
    said(found, "release running", ROOT, "scontrol", "release", cases["running"])
    said(found, "hold running", ROOT, "scontrol", "hold", cases["running"])
    said(found, "update foreign", BOB, "scontrol", "update", f"JobId={cases['running']}", "Nice=1")
    admin = f"JobId={cases['running']}", "AdminComment=x"
    said(found, "admin comment by an operator", "plxsvc", "scontrol", "update", *admin)
    owner = f"JobId={cases['running']}", "TimeLimit=2-00:00:00"
    said(found, "raise the limit as the owner", ALICE, "scontrol", "update", *owner)
    het = f"JobId={cases['het-running']}", "TimeLimit=+60"
    said(found, "relative limit of a het job", ROOT, "scontrol", "update", *het)
    part = f"{cases['het-pending']}+1"
    said(found, "cancel a pending component", ALICE, "scancel", part)
    wrap = "--wrap=true"
    said(found, "sbatch bad account", ALICE, "sbatch", "-A", "nosuch", wrap)
    said(found, "sbatch bad partition", ALICE, "sbatch", "-p", "nosuch", wrap)
    said(found, "sbatch bad qos", ALICE, "sbatch", "--qos=nosuch", wrap)
    said(found, "sbatch too many gpus", ALICE, "sbatch", "-p", "gpu", "--gres=gpu:9", wrap)
    said(found, "sbatch bad constraint", ALICE, "sbatch", "-C", "nosuch", wrap)
    said(found, "sbatch bad option", ALICE, "sbatch", "--nosuch", wrap)
    recorder.cluster.kill_slurmctld()
    for name, argv in {
        "squeue": ("squeue", "--json"),
        "scontrol": ("scontrol", "show", "config"),
        "sbatch": ("sbatch", wrap),
        "scancel": ("scancel", one),
    }.items():
        said(found, f"{name} without slurmctld", ALICE, *argv)
    recorder.cluster.start_slurmctld()
    (recorder.folder / "said.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def record(cluster: Cluster, folder: Path) -> None:
    """All of it."""
    recorder = Recorder(cluster, folder)
    cases = recorder.cases
    waiting_and_running(recorder)
    completing(recorder)
    recorder.json("sinfo-up.json", "sinfo", "--json")
    losses(recorder)
    recorder.json("squeue.json", "squeue", "--json", "-t", "all")
    recorder.json("sinfo.json", "sinfo", "--json")
    recorder.text("scontrol-show-config.txt", "scontrol", "show", "config")
    recorder.text("scontrol-show-jobs.txt", "scontrol", "show", "job", "-o")
    if slurm_version() >= (23, 2):
        # sinfo's own JSON groups nodes that are alike and does not tell which GPUs are used.
        recorder.json("scontrol-show-nodes.json", "scontrol", "show", "node", "--json")
    time.sleep(2)  # slurmctld tells slurmdbd in its own time
    seconds = {"SLURM_TIME_FORMAT": "%s"}
    every = ["-a", "-D", "-S", "now-1day", "-P", "-o", SACCT]
    recorder.text("sacct.txt", "sacct", *every, "-X", env=seconds)
    recorder.text("sacct-steps.txt", "sacct", *every, "-j", cases["het-running"], env=seconds)
    recorder.json("sacct.json", "sacct", "-a", "-D", "-S", "now-1day", "--json", "-X")
    failures(recorder)
    text = json.dumps(cases, indent=1) + "\n"
    (folder / "cases.json").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Record into a folder."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm_live.record", description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args(arguments).folder
    with Cluster.temporary(nodes=6) as cluster:
        record(cluster, folder.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())

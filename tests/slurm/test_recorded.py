"""Every kind of job and node, as each version of Slurm says it (see slurm_live/record.py)."""

import json
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm import invoke, parse
from plexrl_slurm.slurm.port import JobStatus, NodeStatus, SlurmState

VERSIONS = sorted(path.parent for path in (Path(__file__).parent / "recorded").glob("*/cases.json"))
#: What became of each case that is one job.
STATES = {
    "timeout": SlurmState.TIMEOUT,
    "node-fail": SlurmState.FAILED,
    "requeued": SlurmState.PENDING,
    "shrunk": SlurmState.RUNNING,
    "running": SlurmState.RUNNING,
    "running-no-limit": SlurmState.RUNNING,
    "het-running": SlurmState.RUNNING,
    "suspended": SlurmState.RUNNING,
    "cancelled-running": SlurmState.CANCELLED,
    "cancelled-pending": SlurmState.CANCELLED,
    "held-user": SlurmState.PENDING,
    "held-admin": SlurmState.PENDING,
    "marked": SlurmState.PENDING,
    "begin": SlurmState.PENDING,
    "dependency": SlurmState.PENDING,
    "het-pending": SlurmState.PENDING,
    "het-held": SlurmState.PENDING,
    "completed": SlurmState.COMPLETED,
    "failed": SlurmState.FAILED,
    "killed": SlurmState.FAILED,
}


class Recording:
    """One version's answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cases: dict[str, SlurmId] = json.loads((folder / "cases.json").read_bytes())
        self.jobs = parse.jobs((folder / "squeue.json").read_bytes())

    def __getitem__(self, case: str) -> JobStatus:
        return self.jobs[self.cases[case]]

    def nodes(self) -> dict[str, NodeStatus]:
        for name in ("sinfo.json", "scontrol-show-nodes.json"):
            nodes = parse.nodes((self.folder / name).read_bytes())
            if nodes is not None:
                return nodes
        raise AssertionError("no nodes were recorded")


@pytest.fixture(params=VERSIONS, ids=lambda folder: str(folder.name))
def recording(request: pytest.FixtureRequest) -> Recording:
    return Recording(request.param)


def test_there_is_a_recording_of_the_base_version() -> None:
    assert "22.05" in {folder.name for folder in VERSIONS}


def test_every_case_has_its_state(recording: Recording) -> None:
    assert {case: recording[case].state for case in STATES} == STATES


def test_nodes_have_the_address_that_others_reach_them_by(recording: Recording) -> None:
    assert {node.address for node in recording.nodes().values()} == {"127.0.0.1"}


def test_held_are_those_that_were_held(recording: Recording) -> None:
    held = {case for case in STATES if recording[case].held}
    assert held == {"held-user", "held-admin", "marked", "het-held"}
    assert recording["held-admin"].reason == "JobHeldAdmin"
    assert recording["held-user"].reason == "JobHeldUser"


def test_ends_say_how(recording: Recording) -> None:
    assert recording["failed"].exit_code == 3
    assert recording["killed"].exit_code == 137
    assert recording["completed"].exit_code == 0
    assert recording["node-fail"].word == "NODE_FAIL"
    assert recording["suspended"].word == "SUSPENDED"


def test_limits_and_times(recording: Recording) -> None:
    running, endless = recording["running"], recording["running-no-limit"]
    assert running.start_us is not None
    assert running.end_us == running.start_us + 86_400_000_000
    assert endless.start_us is not None
    assert endless.end_us is None
    assert recording["begin"].start_us is None
    assert recording["requeued"].restarts == 1


def test_heterogeneous_jobs_are_their_leaders(recording: Recording) -> None:
    leader = recording["het-running"]
    first, second = leader.components
    assert first == recording.cases["het-running"]
    assert (leader.nodes, leader.gpus) == (("n1",), 1)
    component = recording.jobs[second]
    assert (component.nodes, component.gpus, component.leader) == (("n2", "n3"), 2, first)
    assert len(recording["het-held"].components) == 2


def test_arrays_are_their_tasks(recording: Recording) -> None:
    array, held = recording.cases["array"], recording.cases["array-held"]
    tasks = {job.array_task: job for job in recording.jobs.values() if job.array_id == array}
    assert sorted(task for task in tasks if task is not None) == [0, 2, 4, 6]
    assert tasks[6].state is SlurmState.PENDING
    waiting = {job.array_task for job in recording.jobs.values() if job.array_id == held}
    assert waiting == {1, 3, 5, 6, 7, 8, 9}


def test_comments_and_owners(recording: Recording) -> None:
    assert recording["running"].comment == "a b=c;d"
    assert recording["marked"].admin_comment == "plexrl:1:rlvr:model=tiny;seed=7"
    assert (recording["running"].user, recording["running"].account) == ("plxalice", "research")
    assert recording["marked"].gpus == 2


def test_a_hold_that_lost_a_node_has_the_rest(recording: Recording) -> None:
    assert (recording["shrunk"].nodes, recording["shrunk"].gpus) == (("n3",), 1)


def test_nodes(recording: Recording) -> None:
    nodes = recording.nodes()
    assert not nodes["n4"].usable
    assert not nodes["n6"].usable
    assert nodes["n6"].reason == "cable [2] is loose"
    assert nodes["n1"].usable
    assert {node.gpus for node in nodes.values()} == {4}
    assert {node.gpu_type for node in nodes.values()} == {"h200"}
    assert nodes["n1"].gpus_used == 3
    assert "gpu" in nodes["n1"].partitions


def test_failures_are_refusals_or_no_answers(recording: Recording) -> None:
    said = json.loads((recording.folder / "said.json").read_bytes())
    kinds: dict[str, type[Exception] | None] = {}
    for case, how in said.items():
        if how["status"] is None:
            continue
        answer = invoke.Answer(
            argv=tuple(how["argv"]),
            code=how["status"],
            out=how["stdout"].encode(),
            err=how["stderr"],
        )
        try:
            invoke.checked(answer)
            if answer.argv[0] == "squeue":
                parse.jobs(answer.out)
        except (SlurmRejected, SlurmUnavailable) as error:
            kinds[case] = type(error)
        else:
            kinds[case] = None
    down = {case for case in kinds if case.endswith("without slurmctld")}
    assert {kinds[case] for case in down} <= {SlurmUnavailable}
    refused = {case for case, kind in kinds.items() if kind is SlurmRejected}
    assert {case for case in kinds if case.startswith("sbatch bad")} <= refused
    assert {"release unknown", "scancel foreign", "admin comment by an operator"} <= refused
    assert kinds["release running"] is None
    assert SlurmUnavailable not in {kinds[case] for case in set(kinds) - down}


def test_the_configuration(recording: Recording) -> None:
    found = parse.configuration((recording.folder / "scontrol-show-config.txt").read_bytes())
    assert found["SlurmUser"].startswith("slurm")
    assert found["ClusterName"]

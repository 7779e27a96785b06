"""What Slurm would not start if it were released."""

import dataclasses
import json

import pytest

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm import parse
from plexrl_slurm.slurm.eligible import held_by_slurm
from plexrl_slurm.slurm.port import JobStatus, SlurmState
from plexrl_slurm.slurm.queued import queued_jobs

NOW = 1_796_000_000_000_000
WAITS = JobStatus(state=SlurmState.PENDING, word="PENDING")
#: Slurm's last answer.
OTHERS = {
    SlurmId("1"): WAITS,
    SlurmId("2"): dataclasses.replace(WAITS, state=SlurmState.RUNNING),
    SlurmId("3"): dataclasses.replace(WAITS, state=SlurmState.COMPLETED, word="COMPLETED"),
    SlurmId("4"): dataclasses.replace(WAITS, state=SlurmState.FAILED, word="NODE_FAIL"),
    SlurmId("5_1"): dataclasses.replace(WAITS, state=SlurmState.COMPLETED, array_id=SlurmId("5")),
    SlurmId("5_2"): dataclasses.replace(WAITS, array_id=SlurmId("5")),
}


def word(dependency: str) -> str:
    job = dataclasses.replace(WAITS, dependency=dependency)
    held = held_by_slurm(SlurmId("9"), OTHERS | {SlurmId("9"): job}, NOW)
    return "" if held is None else held.word


@pytest.mark.parametrize(
    ("dependency", "expected"),
    [
        ("", ""),
        ("afterany:1(unfulfilled)", "Dependency"),
        ("afterany:2(unfulfilled)", "Dependency"),
        ("afterany:3(unfulfilled)", ""),
        ("afterany:4(unfulfilled)", ""),
        ("afterok:3(unfulfilled)", ""),
        ("afterok:4(failed)", "DependencyNeverSatisfied"),
        ("afternotok:3(unfulfilled)", "DependencyNeverSatisfied"),
        ("afternotok:4(unfulfilled)", ""),
        ("after:1+10(unfulfilled)", "Dependency"),
        ("after:2(unfulfilled)", ""),
        ("afterany:5_*(unfulfilled)", "Dependency"),
        ("afterany:5_1(unfulfilled)", ""),
        ("afterany:77(unfulfilled)", ""),
        ("afterany:3:1(unfulfilled)", "Dependency"),
        ("afterok:3(unfulfilled),afterany:1(unfulfilled)", "Dependency"),
        ("afterany:1(unfulfilled),afterok:4(failed)", "DependencyNeverSatisfied"),
        ("afterany:1(unfulfilled)?afterok:3(unfulfilled)", ""),
        ("afterany:1(unfulfilled)?afterok:4(failed)", "Dependency"),
        ("singleton(unfulfilled)", ""),
    ],
)
def test_a_dependency_holds_a_job_until_it_has_come_true(dependency: str, expected: str) -> None:
    assert word(dependency) == expected


def test_what_is_said_names_the_job_and_the_way_out() -> None:
    job = dataclasses.replace(WAITS, dependency="afterok:4(failed)")
    held = held_by_slurm(SlurmId("9"), OTHERS | {SlurmId("9"): job}, NOW)
    assert held is not None
    assert held.sentence == (
        "Slurm will never start it, because job 4 is NODE_FAIL (afterok:4): "
        "scancel 9, or scontrol update JobId=9 Dependency="
    )


def test_a_job_that_is_to_begin_later_is_held_until_then() -> None:
    job = {SlurmId("9"): dataclasses.replace(WAITS, eligible_us=NOW)}
    held = held_by_slurm(SlurmId("9"), job, NOW - 1)
    assert held is not None
    assert held.word == "BeginTime"
    assert held.sentence == "it is to begin at 2026-11-30T00:53:20Z, and gets its place then"
    assert held_by_slurm(SlurmId("9"), job, NOW) is None


def test_a_job_that_runs_or_is_not_known_is_held_by_nothing() -> None:
    assert held_by_slurm(SlurmId("2"), OTHERS, NOW) is None
    assert held_by_slurm(SlurmId("77"), OTHERS, NOW) is None


def test_both_questions_to_squeue_say_it() -> None:
    item = {
        "job_id": 9,
        "job_state": "PENDING",
        "dependency": "afterany:1(unfulfilled)",
        "eligible_time": 1_796_000_000,
        "time_limit": 10,
    }
    (status,) = parse.jobs(json.dumps({"jobs": [item]}).encode()).values()
    assert (status.dependency, status.eligible_us) == ("afterany:1(unfulfilled)", NOW)
    assert status.limit_us == 600_000_000
    fields = "9;1001;ada;lab;PENDING;afterany:1(unfulfilled);1796000000;x;\n"
    (quick,) = queued_jobs(fields.replace(";", "|sep").encode(), "sep").values()
    assert (quick.dependency, quick.eligible_us) == ("afterany:1(unfulfilled)", NOW)
    fields = "9;1001;ada;lab;PENDING;(null);N/A;x;\n"
    (quick,) = queued_jobs(fields.replace(";", "|sep").encode(), "sep").values()
    assert (quick.dependency, quick.eligible_us) == ("", None)

"""sprio and squeue --start: Slurm's columns, filters, and what nobody can tell."""

import json
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import Result

from tests.cli.conftest import T0, FakeDaemon, make_job

Plexrl = Callable[..., Result]
WEIGHTS = {"age": 1000, "fairshare": 10000, "qos": 10000, "job": 1000}


def standing(number: int, user: str, account: str, fairshare: float, **more: Any) -> dict[str, Any]:
    return {
        "job_id": number,
        "slurm_id": str(100 + number),
        "name": "count",
        "user": user,
        "account": account,
        "partition": "rlvr",
        "qos": "normal",
        "priority": int(10000 * fairshare) + 143,
        "parts": {"age": 142, "fairshare": int(10000 * fairshare), "qos": 0, "job": 1},
        "factors": {"age": 0.1428571, "fairshare": fairshare, "qos": 0.0, "job": 0.001},
        **more,
    }


@pytest.fixture
def queue(daemon: FakeDaemon) -> FakeDaemon:
    daemon.answers["GET /priorities"] = {
        "weights": WEIGHTS,
        "jobs": [
            standing(2, "bob", "bio", 1.0, qos="fast"),
            standing(1, "ada", "physics", 0.25),
        ],
    }
    pending: dict[str, Any] = {"state": "pending", "started_us": None, "ended_us": None, "wpgs": []}
    daemon.jobs = [
        make_job(1, **pending, reason_word="Priority"),
        make_job(2, **pending, reason_word="Resources"),
        make_job(3, **pending, reason_word="QOSMaxJobsPerUserLimit"),
    ]
    return daemon


@pytest.fixture
def utc() -> Iterator[None]:
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    yield
    if before is None:
        del os.environ["TZ"]
    else:
        os.environ["TZ"] = before
    time.tzset()


GOLDEN = """\
          JOBID PARTITION     USER  ACCOUNT   PRIORITY        AGE  FAIRSHARE        QOS        JOB QOSNAME
            102      rlvr      bob      bio      10143        142      10000          0          1 fast
            101      rlvr      ada  physics       2643        142       2500          0          1 normal
"""  # noqa: E501


def test_the_next_job_comes_first_with_every_part(plexrl: Plexrl, queue: FakeDaemon) -> None:
    done = plexrl("sprio")
    assert (done.exit_code, done.stdout) == (0, GOLDEN)


def test_factors_are_shown_before_they_are_weighted(plexrl: Plexrl, queue: FakeDaemon) -> None:
    lines = plexrl("sprio", "-n", "-h").stdout.splitlines()
    assert lines[1].split()[4:8] == ["2643", "0.1428571", "0.2500000", "0.0000000"]
    weights = plexrl("sprio", "-w", "-h").stdout.split()
    assert weights == ["Weights", "1000", "10000", "10000", "1000"]


@pytest.mark.parametrize(
    ("words", "ids"),
    [
        pytest.param(("-u", "ada"), ["101"], id="user"),
        pytest.param(("-u", "ada,bob"), ["102", "101"], id="users"),
        pytest.param(("-j", "102"), ["102"], id="job"),
        pytest.param(("-j", "103"), [], id="a job that does not wait for its turn"),
    ],
)
def test_filters(plexrl: Plexrl, queue: FakeDaemon, words: tuple[str, ...], ids: list[str]) -> None:
    found = json.loads(plexrl("sprio", *words, "--json").stdout)
    assert [job["slurm_id"] for job in found["jobs"]] == ids
    assert found["weights"] == WEIGHTS


def test_an_unknown_job_is_an_error(plexrl: Plexrl, queue: FakeDaemon) -> None:
    done = plexrl("sprio", "-j", "999")
    assert done.exit_code == 66
    assert "no job '999'" in done.stderr


def test_expected_starts_are_in_order_and_honest(
    plexrl: Plexrl, queue: FakeDaemon, utc: None
) -> None:
    queue.answers["GET /starts"] = {
        "jobs": [
            {"job_id": 1, "start_us": T0 + 60_000_000, "unknown": None, "sentence": ""},
            {"job_id": 2, "start_us": T0, "unknown": None, "sentence": ""},
            {"job_id": 3, "start_us": None, "unknown": "ends", "sentence": "give jobs a --time"},
        ]
    }
    done = plexrl("squeue", "--start")
    assert done.stdout.splitlines() == [
        "             JOBID PARTITION     NAME     USER ST          START_TIME NODELIST(REASON)",
        "               102      rlvr   count2      ada PD 2026-02-02T02:40:00 (Resources)",
        "               101      rlvr   count1      ada PD 2026-02-02T02:41:00 (Priority)",
        "               103      rlvr   count3      ada PD             unknown "
        "(QOSMaxJobsPerUserLimit)",
    ]
    found = json.loads(plexrl("squeue", "--start", "--json").stdout)["jobs"]
    assert [job["expected_unknown"] for job in found] == [None, None, "ends"]
    assert found[2]["expected_sentence"] == "give jobs a --time"

"""What the queue's commands say of a job: its promise, and the word for what it waits for."""

import json
from typing import Any

from tests.cli.conftest import FakeDaemon, make_job
from tests.cli.test_commands import Plexrl

WAITS: dict[str, Any] = {
    "state": "pending",
    "started_us": None,
    "ended_us": None,
    "wpgs": [],
    "reason": "on train-0 job 101 (ada) would run 1.14 times as long as alone",
    "reason_word": "Promise",
    "max_slowdown": 1.05,
}


def test_show_job_has_the_promise_and_why_it_waits(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.jobs = [make_job(1), make_job(2, **WAITS)]
    said = plexrl("show", "job", "102").stdout
    assert "JobId=102 JobName=count2" in said
    assert "MaxSlowdown=1.05" in said
    assert "Reason=Promise Why=on train-0 job 101 (ada)" in said
    assert "StartTime=Unknown" in said
    assert "101" not in said.partition("\n")[0]
    (job,) = json.loads(plexrl("show", "job", "102", "--json").stdout)["jobs"]
    assert job["max_slowdown"] == 1.05


def test_a_job_that_nobody_knows_is_refused(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    daemon.jobs = [make_job(1)]
    result = plexrl("show", "job", "999")
    assert result.exit_code == 66


def test_squeue_has_one_word_and_the_sentence_where_there_is_room(
    plexrl: Plexrl, daemon: FakeDaemon
) -> None:
    daemon.jobs = [make_job(2, **WAITS)]
    assert plexrl("squeue", "-h").stdout.endswith(" (Promise)\n")
    assert plexrl("squeue", "-l", "-h").stdout.endswith(f" (Promise: {WAITS['reason']})\n")

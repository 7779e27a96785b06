"""A rollout comes in beside another job's tail; both end as if they had been alone."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.partition import Job, Partition, kill, wait_until
from tests.scenarios.test_tails import LONG, TOKENS, answer, ask, journal, sampler_of, tail

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


@pytest.fixture
def partition(tmp_path: Path, model: Path) -> Iterator[Partition]:
    one = Partition(tmp_path, model=model, rollout={**TOKENS, "device_bytes": "1GiB"})
    text = one.config.read_text(encoding="utf-8")
    text = text.replace('pool = "rollout"', 'pool = "rollout"\nsecond_slot_bytes = "1GiB"')
    text += "\n[tails]\nleast_seconds = 0\nco_resident = true\n"
    one.config.write_text(text, encoding="utf-8")
    try:
        one.start()
        yield one
    finally:
        one.close()
        # What the SDK has left open, while a warning for it is no error.
        gc.collect()


def two(partition: Partition) -> tuple[Any, Any]:
    """Samplers of two jobs."""
    first = sampler_of(Job(partition, seed=1, models=["tiny"]), 6)
    return first, sampler_of(Job(partition, seed=2, models=["tiny"]), 7)


def beside(partition: Partition) -> bool:
    """Whether somebody was switched in beside a tail."""
    return any(
        '["Switch",' in line and '"beside":"' in line for line in journal(partition).splitlines()
    )


def test_another_job_samples_beside_a_tail_that_goes_on(partition: Partition) -> None:
    first, second = two(partition)
    long = tail(first)
    began = time.monotonic()
    other = ask(second, 1, 60)
    wait_until(lambda: beside(partition), name="the other to come in")
    answered = answer(other)
    assert time.monotonic() - began < 0.5 * LONG * 0.02, "it did not wait for the tail"
    (wpg,) = [wpg for wpg in partition.nodes()["wpgs"] if wpg["id"] == "rollout-0"]
    assert wpg["running"] == 1 and wpg["beside"] and wpg["beside_jobs"], "and the tail runs on"
    ((tailing, *_),) = [job["beside"] for job in partition.client().jobs() if job["beside"]]
    assert (tailing["word"], tailing["wpg"]) == ("Tail", "rollout-0")
    assert answer(long) == answer(ask(first, 100, LONG)), "as one that was alone"
    assert answered == answer(ask(second, 1, 60))
    assert '["Pause",' not in journal(partition)
    assert partition.flaws() == []


def _rank(partition: Partition) -> None:
    kill(partition.rank_pid("rollout-0"))


def _agent(partition: Partition) -> None:
    kill(partition.agent_pid())


def _daemon(partition: Partition) -> None:
    partition.kill_daemon()
    time.sleep(0.3)
    partition.start()


@pytest.mark.parametrize("disturb", [_rank, _agent, _daemon])
def test_both_survive_what_dies_meanwhile(partition: Partition, disturb: Any) -> None:
    first, second = two(partition)
    long = tail(first)
    other = ask(second, 1, 100)
    wait_until(lambda: beside(partition), name="the other to come in")
    time.sleep(0.3)  # both are sampled
    disturb(partition)
    assert answer(other) == answer(ask(second, 1, 100))
    assert answer(long) == answer(ask(first, 100, LONG))
    assert partition.flaws() == []

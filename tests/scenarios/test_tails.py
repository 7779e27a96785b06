"""The tail of a rollout is paused for another job's, and ends as if it had not been."""

import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, Partition, kill, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
#: A token takes 20 ms.
TOKENS = {"token_us": 20_000}
SHORT, LONG = 60, 240


@pytest.fixture
def partition(tmp_path: Path, model: Path) -> Iterator[Partition]:
    one = Partition(tmp_path, model=model, rollout=TOKENS)
    text = one.config.read_text(encoding="utf-8")
    one.config.write_text(f"{text}\n[tails]\nleast_seconds = 0\n", encoding="utf-8")
    try:
        one.start()
        yield one
    finally:
        one.close()
        # What the SDK has left open, while a warning for it is no error.
        gc.collect()


def sampler_of(job: Job, token: int) -> Any:
    """A client for weights of its own."""
    training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
    training.forward_backward([datum(4, 5, token)], "cross_entropy").result()
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    return training.save_weights_and_get_sampling_client().result()


def ask(sampler: Any, seed: int, tokens: int) -> Any:
    return sampler.sample(
        prompt=types.ModelInput.from_ints([4, 5, 6]),
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=tokens, seed=seed),
    )


def answer(future: Any) -> list[tuple[list[int], list[float]]]:
    return [(one.tokens, one.logprobs) for one in future.result(timeout=60).sequences]


def tail(sampler: Any) -> Any:
    """Of nine calls the last one, when the others have ended, as those did before."""
    for future in [ask(sampler, seed, SHORT) for seed in range(8)] + [ask(sampler, 8, LONG)]:
        future.result(timeout=60)
    short = [ask(sampler, seed, SHORT) for seed in range(8)]
    long = ask(sampler, 100, LONG)
    for future in short:
        future.result(timeout=60)
    return long


def journal(partition: Partition) -> str:
    files = sorted((partition.folder / "state" / "journal").glob("*.jsonl"))
    return "".join(file.read_text(encoding="utf-8") for file in files)


def test_a_tail_is_paused_while_another_job_samples(partition: Partition) -> None:
    first = sampler_of(Job(partition, seed=1, models=["tiny"]), 6)
    second = sampler_of(Job(partition, seed=2, models=["tiny"]), 7)
    long = tail(first)
    began = time.monotonic()
    answer(ask(second, 1, 2))
    assert time.monotonic() - began < 0.5 * LONG * 0.02, "it did not wait for the tail"
    assert '["Pause",' in journal(partition) and '"Paused"' in journal(partition)
    assert answer(long) == answer(ask(first, 100, LONG)), "as one that is not paused"
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
def test_a_paused_tail_survives_what_dies_meanwhile(partition: Partition, disturb: Any) -> None:
    first = sampler_of(Job(partition, seed=1, models=["tiny"]), 6)
    second = sampler_of(Job(partition, seed=2, models=["tiny"]), 7)
    long = tail(first)
    other = ask(second, 1, 60)
    wait_until(lambda: '"Paused"' in journal(partition), name="the tail to be paused")
    disturb(partition)
    assert answer(other) == answer(ask(second, 1, 60))
    assert answer(long) == answer(ask(first, 100, LONG))
    assert partition.flaws() == []

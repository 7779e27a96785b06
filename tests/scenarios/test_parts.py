"""A long call is run in parts; a rank may die between them."""

import time
from pathlib import Path
from typing import Any

import pytest
from tinker import types

from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, Partition, kill, running

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

#: Three tokens each; two fit into a part.
DATA = [(4, 5, 6), (7, 8, 9), (10, 11, 12), (13, 14, 15), (16, 17, 18)]
OPTIONS: dict[str, Any] = {
    "settings": {"max_part_tokens": 6},
    "train": {"delay_us": {"forward_backward": 400_000}},
}


def learn(partition: Partition, *, kill_after_s: float | None = None) -> tuple[Any, ...]:
    job = Job(partition, seed=1, models=["tiny"])
    training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
    future = training.forward_backward([datum(*tokens) for tokens in DATA], "cross_entropy")
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        kill(partition.rank_pid("train-0"))
    result = future.result()
    training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    training.save_weights_for_sampler("end").result()
    logprobs = [output["logprobs"].tolist() for output in result.loss_fn_outputs]
    return logprobs, result.metrics, partition.published(job, "end")


def test_the_answer_is_whole_and_a_death_between_parts_changes_nothing(
    tmp_path: Path, model: Path
) -> None:
    (tmp_path / "calm").mkdir()
    (tmp_path / "wild").mkdir()
    with running(tmp_path / "calm", model=model, **OPTIONS) as partition:
        calm = learn(partition)
        runs = partition.query(
            "select count(*) from ledger where activity = 'busy' and call_id like '%.1'"
        )
        assert runs[0][0] >= 3, "three parts are three stretches"
    assert [len(each) for each in calm[0]] == [3] * 5
    with running(tmp_path / "wild", model=model, **OPTIONS) as partition:
        # The first part has ended, the second has not.
        assert learn(partition, kill_after_s=0.6) == calm

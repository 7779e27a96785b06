"""DeepSpeed over two agents learns what it learns on one, also if a rank dies in a collective."""

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.controller import datum
from tests.scenarios.partition import REPOSITORY, Job, Partition, kill, running, wait_until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings(
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    ),
]

ENGINES = ("deepspeed", "fake_sample")
#: Ranks, and options of the engine.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks-zero 2": (2, {"zero_stage": 2}),
    "4 ranks-zero 3-parameters and optimizer in host memory": (
        4,
        {"zero_stage": 3, "offload_param": "cpu", "offload_optimizer": "cpu"},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make = [sys.executable, str(REPOSITORY / "examples" / "make_models.py"), str(folder), "tiny"]
    assert os.spawnv(os.P_WAIT, sys.executable, make) == 0
    return folder


def partition_in(folder: Path, model: Path, layout: str, *, nodes: int) -> Any:
    ranks, options = LAYOUTS[layout]
    return running(
        folder,
        seconds=280,
        model=model,
        engines=ENGINES,
        train={**options, "max_tokens_per_microbatch": 32},
        train_gpus=ranks,
        train_nodes=nodes,
        settings={"image_every": 1},
    )


def learn(
    job: Job, others: Job, *, between: Callable[[int], None] = lambda step: None
) -> list[Any]:
    """Two jobs by turns, so that images leave and come; what the first one was told."""
    from tinker import types

    told: list[Any] = []
    clients = [
        each.service().create_lora_training_client(base_model="tiny", rank=0, seed=3).result()
        for each in (job, others)
    ]
    for step in range(3):
        for number, client in enumerate(clients):
            data = [datum(4, 5 + step, 6, 7), datum(7, 8, 9 + step), datum(3, 4 + number)]
            first = client.forward_backward(data, "cross_entropy")
            second = client.forward_backward(data[:1], "cross_entropy")
            taken = client.optim_step(types.AdamParams(learning_rate=1e-2))
            between(2 * step + number)
            results = [first.result(), second.result()]
            metrics = taken.result().metrics
            if number == 0:
                told += [
                    (result.metrics["loss:sum"], result.loss_fn_outputs[0]["logprobs"].tolist())
                    for result in results
                ]
                told.append(metrics)
    clients[0].save_weights_for_sampler("end").result()
    return told


def weights(partition: Partition, job: Job) -> dict[str, Any]:
    from safetensors.torch import load_file

    checkpoints = partition.folder / "state" / "checkpoints"
    (path,) = checkpoints.glob(f"job{job.slurm_id}-*/sampler_weights/end")
    return dict(load_file(path / "model.safetensors"))


class Strike:
    """Kills the last rank once, while calls of a turn run."""

    def __init__(self, partition: Partition, *, ranks: int) -> None:
        self._partition, self._last = partition, ranks - 1
        self._thread = threading.Thread(target=self._strike)
        self.failures: list[BaseException] = []

    def between(self, turn: int) -> None:
        if turn == 4:
            self._thread.start()

    def join(self) -> None:
        self._thread.join()
        assert not self.failures, self.failures

    def _strike(self) -> None:
        time.sleep(0.05)
        try:
            peer = self._partition.rank_pid("train-0", 0)
            kill(self._partition.rank_pid("train-0", self._last))
            # It waits for the dead one, perhaps in a collective, and must not wait for long.
            wait_until(lambda: not Path(f"/proc/{peer}").exists(), seconds=30, name="its end")
        except BaseException as error:
            self.failures.append(error)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_agents_learn_bit_by_bit_what_one_learns(
    model: Path, tmp_path_factory: pytest.TempPathFactory, layout: str
) -> None:
    from torch import equal

    with partition_in(tmp_path_factory.mktemp("one"), model, layout, nodes=1) as partition:
        jobs = [Job(partition, seed=seed, models=["tiny"]) for seed in (3, 4)]
        told = learn(*jobs)
        wanted = weights(partition, jobs[0])
    with partition_in(tmp_path_factory.mktemp("two"), model, layout, nodes=2) as partition:
        jobs = [Job(partition, seed=seed, models=["tiny"]) for seed in (3, 4)]
        strike = Strike(partition, ranks=LAYOUTS[layout][0])
        assert learn(*jobs, between=strike.between) == told
        strike.join()
        found = weights(partition, jobs[0])
    assert found.keys() == wanted.keys()
    assert all(equal(found[name], wanted[name]) for name in wanted)

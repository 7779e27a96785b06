"""Training and rollout take turns on the same GPUs: two jobs there learn as they would alone."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import SLOW, SLOW_SAMPLES
from tests.scenarios.controller import datum, train
from tests.scenarios.partition import Job, Partition, kill, running, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

Disturb = Callable[[Partition], None]
SEEDS = (7, 8)
#: What each takes awake, keeps asleep, and the GPU has.
MIB = 1 << 20
TRAIN = SLOW | {
    "device_bytes": 70 * MIB,
    "device_used": 70 * MIB,
    "device_left": 4 * MIB,
    "device_total": 100 * MIB,
}
ROLLOUT = SLOW_SAMPLES | {
    "device_bytes": 60 * MIB,
    "device_used": 60 * MIB,
    "device_left": 6 * MIB,
    "device_total": 100 * MIB,
}
SHARED: dict[str, Any] = {
    "train": TRAIN,
    "rollout": ROLLOUT,
    "shared": {"residual_bytes": 10 * MIB, "gpu_bytes": 100 * MIB},
}


def together(partition: Partition, between: Callable[[int], None]) -> list[tuple[list[Any], Any]]:
    """What two jobs see at once, and the weights that each ends with."""
    jobs = [Job(partition, seed=seed, models=["tiny"]) for seed in SEEDS]
    seen: list[list[Any]] = [[] for _ in jobs]

    def one(index: int) -> None:
        seen[index] = train(jobs[index], between=between if index == 0 else lambda _: None)

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ends = [partition.published(job, "end") for job in jobs]
    for job in jobs:
        job.cancel()
        wait_until(lambda: job.row()["state"] == "cancelled", name="the job to end")  # noqa: B023
    return list(zip(seen, ends, strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path) -> list[tuple[list[Any], Any]]:
    """The same of each job by itself, on WPGs with GPUs of their own."""
    folder = tmp_path_factory.mktemp("alone")
    found = []
    with running(folder, model=model, train=SLOW, rollout=SLOW_SAMPLES) as partition:
        for seed in SEEDS:
            job = Job(partition, seed=seed, models=["tiny"])
            found.append((train(job), partition.published(job, "end")))
    return found


def _rank(wpg: str) -> Disturb:
    return lambda partition: kill(partition.rank_pid(wpg))


def _asleep(partition: Partition) -> None:
    (name,) = [wpg["id"] for wpg in partition.nodes()["wpgs"] if wpg["asleep"]][:1]
    kill(partition.rank_pid(name))


def _agent(partition: Partition) -> None:
    kill(partition.agent_pid())


def _daemon(partition: Partition) -> None:
    ranks = [partition.rank_pid(wpg) for wpg in ("train-0", "rollout-0")]
    partition.kill_daemon()
    time.sleep(0.5)
    partition.start()
    assert [partition.rank_pid(wpg) for wpg in ("train-0", "rollout-0")] == ranks


@pytest.mark.parametrize(
    ("disturb", "at"),
    [
        pytest.param(None, -1, id="nothing"),
        pytest.param(_rank("train-0"), 1, id="training rank while it trains"),
        pytest.param(_rank("rollout-0"), 101, id="rollout rank while it samples"),
        pytest.param(_asleep, 1, id="the rank that sleeps"),
        pytest.param(_agent, 1, id="agent while it trains"),
        pytest.param(_daemon, 1, id="daemon while it trains"),
        pytest.param(_daemon, 101, id="daemon while it samples"),
    ],
)
def test_two_jobs_on_one_group_see_what_each_sees_alone(
    tmp_path: Path,
    model: Path,
    alone: list[tuple[list[Any], Any]],
    disturb: Disturb | None,
    at: int,
) -> None:
    failures: list[BaseException] = []
    strikes: list[threading.Thread] = []
    with running(tmp_path, model=model, **SHARED) as partition:

        def strike() -> None:
            time.sleep(0.15)
            try:
                if disturb is not None:
                    disturb(partition)
            except BaseException as error:
                failures.append(error)

        def between(step: int) -> None:
            if step == at:
                strikes.append(threading.Thread(target=strike))
                strikes[-1].start()

        assert together(partition, between) == alone
        for each in strikes:
            each.join()
        assert not failures, failures
        assert bool(strikes) == (disturb is not None)
        partition.stop_daemon()
        assert partition.flaws() == []
        wpgs = {row[0] for row in partition.query("select distinct wpg from ledger")}
        assert wpgs == {"train-0"}, "the time of the GPUs is booked once, where they belong"


def test_sinfo_and_explain_tell_who_is_awake_and_who_waits(tmp_path: Path, model: Path) -> None:
    slow = TRAIN | {"delay_us": {"forward_backward": 3_000_000}}
    with running(tmp_path, model=model, **(SHARED | {"train": slow})) as partition:
        job, other = (
            Job(partition, seed=1, models=["tiny"]),
            Job(partition, seed=2, models=["tiny"]),
        )
        before = {wpg["id"]: wpg for wpg in partition.nodes()["wpgs"]}
        assert [before[name]["state"] for name in ("train-0", "rollout-0")] == ["asleep"] * 2
        assert (before["train-0"]["gpus"], before["rollout-0"]["gpus"]) == (1, 0)
        assert before["rollout-0"]["shares"] == "train-0"
        mine, others = (
            each.service().create_lora_training_client(base_model="tiny", rank=0).result()
            for each in (job, other)
        )
        client = mine.save_weights_and_get_sampling_client().result()
        step = [others.forward_backward([datum(4, 5, 6)], "cross_entropy") for _ in range(2)]

        def busy() -> bool:
            wpgs = {wpg["id"]: wpg for wpg in partition.nodes()["wpgs"]}
            return bool(wpgs["train-0"]["state"] == "busy")

        wait_until(busy, name="the other job to train")
        from tinker import types

        parameters = types.SamplingParams(max_tokens=4)
        prompt = types.ModelInput.from_ints([4, 5])
        sample = client.sample(prompt=prompt, num_samples=1, sampling_params=parameters)

        def told() -> bool:
            with partition.client() as asked:
                sentences = asked.explain(job.id)["sentences"]
            waits = "rollout-0 waits for the GPUs that train-0 and rollout-0 share: "
            return any(waits in sentence for sentence in sentences)

        wait_until(told, name="the wait to be told")
        for future in step:
            future.result()
        assert [len(each.tokens) for each in sample.result().sequences] == [4]


def test_memory_that_is_not_given_back_is_told_and_tried_again(tmp_path: Path, model: Path) -> None:
    full = {"device_left": 25 * MIB}
    with running(tmp_path, model=model, **(SHARED | {"train": TRAIN | full})) as partition:
        job = Job(partition, seed=1, models=["tiny"])
        training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
        client = training.save_weights_and_get_sampling_client().result()
        from tinker import types

        prompt = types.ModelInput.from_ints([4, 5])
        parameters = types.SamplingParams(max_tokens=4)
        sample = client.sample(prompt=prompt, num_samples=1, sampling_params=parameters)

        def refused() -> bool:
            with partition.client() as asked:
                sentences = asked.explain(job.id)["sentences"]
            return any(
                "rollout-0 could not have the GPUs" in each and "still in use" in each
                for each in sentences
            )

        wait_until(refused, name="the refusal to be told")
        # The training WPG goes on, and the sample still waits.
        state = training.save_state("s").result()
        assert state.path.endswith("/s")
        assert not sample.future().done()
        job.cancel()
        wait_until(lambda: job.row()["state"] == "cancelled", name="the job to end")

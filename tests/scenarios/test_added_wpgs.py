"""A WPG that is added to the settings of a partition that is up."""

import gc
from collections.abc import Iterator

import pytest

from tests.scenarios.controller import datum
from tests.scenarios.partition import Job, Partition

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

MORE = """
[[wpg]]
pool = "train"
engine = "fake_train"
"""


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK leaves goes while its warnings are ignored."""
    yield
    gc.collect()


def test_a_wpg_that_is_added_comes_up_with_the_next_daemon_and_takes_jobs(
    partition: Partition,
) -> None:
    first = Job(partition, seed=1, models=["tiny"])
    pids = {wpg["id"]: wpg["pids"] for wpg in partition.nodes()["wpgs"]}
    partition.stop_daemon()
    partition.config.write_text(partition.config.read_text(encoding="utf-8") + MORE)
    partition.start()
    nodes = partition.nodes()
    states = {wpg["id"]: wpg["state"] for wpg in nodes["wpgs"]}
    assert sorted(states) == ["rollout-0", "train-0", "train-1"]
    (hold,) = nodes["holds"]
    assert (hold["state"], hold["trouble"]) == ("up", "")
    now = {wpg["id"]: wpg["pids"] for wpg in nodes["wpgs"]}
    assert {name: now[name] for name in pids} == pids, "the ranks of before went on"
    second = Job(partition, seed=2, models=["tiny"])
    trained = []
    for job in (first, second):
        client = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
        client.forward_backward([datum(4, 5)], "cross_entropy").result()
        with partition.client() as asked:
            trained += [each["wpg"] for each in asked.explain(job.id)["deployments"]]
    assert sorted(trained) == ["train-0", "train-1"]
    assert partition.flaws() == []

"""kill -9 of a rank, the agent, the daemon: the controller notices only time."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.conftest import SLOW, SLOW_SAMPLES
from tests.scenarios.controller import train
from tests.scenarios.partition import Job, Partition, kill, running, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)

Disturb = Callable[[Partition], None]


def _rank(wpg: str) -> Disturb:
    return lambda partition: kill(partition.rank_pid(wpg))


def _agent(partition: Partition) -> None:
    kill(partition.agent_pid())


def _daemon(partition: Partition) -> None:
    agent = partition.agent_pid()
    ranks = [partition.rank_pid(wpg) for wpg in ("train-0", "rollout-0")]
    partition.kill_daemon()
    time.sleep(0.5)
    partition.start()
    assert partition.agent_pid() == agent, "the agent has to outlive its daemon"
    assert [partition.rank_pid(wpg) for wpg in ("train-0", "rollout-0")] == ranks


def _rank_then_daemon(partition: Partition) -> None:
    agent = partition.agent_pid()
    kill(partition.rank_pid("train-0"))
    wait_until(lambda: _is_up(partition), name="the gang to come back")
    time.sleep(0.2)
    partition.kill_daemon()
    partition.start()
    assert partition.agent_pid() == agent


def _is_up(partition: Partition) -> bool:
    return all(wpg["state"] not in ("down", "starting") for wpg in partition.nodes()["wpgs"])


def _daemon_by_term(partition: Partition) -> None:
    partition.stop_daemon()
    partition.start()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[list[Any], Any]:
    """What a run sees, and the weights that it ends with, when nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with running(folder, model=model, train=SLOW, rollout=SLOW_SAMPLES) as partition:
        job = Job(partition, seed=7, models=["tiny"])
        return train(job), partition.published(job, "end")


@pytest.mark.parametrize(
    ("disturb", "at"),
    [
        pytest.param(_rank("train-0"), 0, id="training rank in the first step"),
        pytest.param(_rank("train-0"), 2, id="training rank in the third step"),
        pytest.param(_rank("rollout-0"), 101, id="rollout rank while it samples"),
        pytest.param(_agent, 1, id="agent while it trains"),
        pytest.param(_agent, 101, id="agent while it samples"),
        pytest.param(_daemon, 1, id="daemon while it trains"),
        pytest.param(_daemon, 101, id="daemon while it samples"),
        pytest.param(_daemon_by_term, 1, id="daemon stopped and started"),
        pytest.param(_rank_then_daemon, 2, id="daemon while calls run again for a dead rank"),
    ],
)
def test_a_killed_process_changes_nothing_that_the_controller_sees(
    partition: Partition, undisturbed: tuple[list[Any], Any], disturb: Disturb, at: int
) -> None:
    job = Job(partition, seed=7, models=["tiny"])
    failures: list[BaseException] = []

    def strike() -> None:
        time.sleep(0.15)
        try:
            disturb(partition)
        except BaseException as error:
            failures.append(error)

    threads: list[threading.Thread] = []

    def between(step: int) -> None:
        if step == at:
            threads.append(threading.Thread(target=strike))
            threads[-1].start()

    seen = train(job, between=between)
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert threads, "nothing was disturbed"
    assert seen == undisturbed[0]
    assert partition.published(job, "end") == undisturbed[1]
    job.cancel()
    wait_until(lambda: job.row()["state"] == "cancelled", name="the job to end")
    partition.stop_daemon()
    assert partition.flaws() == []


def test_both_ranks_killed_again_and_again_still_give_the_same_end(
    partition: Partition, undisturbed: tuple[list[Any], Any]
) -> None:
    job = Job(partition, seed=7, models=["tiny"])
    pids: set[int] = set()

    def between(step: int) -> None:
        if step in (0, 2, 101, 103):
            pid = partition.rank_pid("train-0" if step < 100 else "rollout-0")
            pids.add(pid)
            kill(pid)

    assert train(job, between=between) == undisturbed[0]
    assert len(pids) == 4
    assert partition.published(job, "end") == undisturbed[1]


def test_one_dead_rank_of_a_gang_of_two_takes_the_gang_and_nothing_else(
    tmp_path: Path, model: Path, undisturbed: tuple[list[Any], Any]
) -> None:
    options: dict[str, Any] = {"train": SLOW, "rollout": SLOW_SAMPLES, "train_gpus": 2}
    settings = {"image_every": 1}
    with running(tmp_path, model=model, settings=settings, **options) as partition:
        rollout = partition.rank_pid("rollout-0")
        job = Job(partition, seed=7, models=["tiny"])

        def between(step: int) -> None:
            if step in (1, 3):
                kill(partition.rank_pid("train-0", rank=1))

        assert train(job, between=between) == undisturbed[0]
        assert partition.published(job, "end") == undisturbed[1]
        assert len({path.suffix for path in partition.images()}) == 2
        assert partition.rank_pid("rollout-0") == rollout
        job.cancel()
        partition.stop_daemon()
        assert partition.flaws() == []


def test_a_rank_that_hangs_is_replaced_after_its_time(
    tmp_path: Path, model: Path, undisturbed: tuple[list[Any], Any]
) -> None:
    patience = SLOW | {"answer_timeout_s": 2}
    with running(tmp_path, model=model, train=patience, rollout=SLOW_SAMPLES) as partition:
        job = Job(partition, seed=7, models=["tiny"])
        stopped: list[int] = []

        def between(step: int) -> None:
            if step == 1:
                stopped.append(partition.rank_pid("train-0"))
                os.kill(stopped[0], signal.SIGSTOP)

        assert train(job, between=between) == undisturbed[0]
        assert partition.rank_pid("train-0") != stopped[0]


def test_a_call_that_always_kills_its_rank_fails_with_the_reason(
    tmp_path: Path, model: Path
) -> None:
    from tinker import RequestFailedError, types

    from tests.scenarios.controller import datum

    poison = {"crash_on": [{"kind": "optim_step", "count": 1}]}
    with running(tmp_path, model=model, train=poison) as partition:
        job = Job(partition, seed=1, models=["tiny"])
        training = job.service().create_lora_training_client(base_model="tiny", rank=0).result()
        gradients = training.forward_backward([datum(4, 5, 6)], "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=1e-3))
        assert gradients.result().metrics["loss:sum"] > 0
        with pytest.raises(RequestFailedError, match="ranks died 3 times"):
            step.result()
        # The next call finds a deployment that works.
        logprobs = training.forward([datum(4, 5, 6)], "cross_entropy").result()
        assert len(logprobs.loss_fn_outputs) == 1


def test_a_second_daemon_of_the_same_partition_is_refused(partition: Partition) -> None:
    import subprocess
    import sys

    second = subprocess.run(
        [sys.executable, "-m", "plexrl_slurm.daemons.partitiond", str(partition.config)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert second.returncode == 77
    assert "has a daemon already" in second.stderr
    assert partition.daemon is not None
    assert str(partition.daemon.pid) in second.stderr
    os.kill(partition.daemon.pid, 0)

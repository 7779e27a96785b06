"""The whole path with DeepSpeed and vLLM: the examples, shared and alone, disturbed and not."""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from plexrl_slurm.cli.submit import Request, environment_for, submit, wrapped
from tests.scenarios.partition import REPOSITORY, Partition, kill, running, wait_until

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

STEPS = 4


@pytest.fixture(scope="module")
def partition(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Partition]:
    folder = tmp_path_factory.mktemp("real")
    model = folder / "tiny"
    make = [sys.executable, str(REPOSITORY / "examples" / "make_models.py"), str(model), "tiny"]
    assert os.spawnv(os.P_WAIT, sys.executable, make) == 0
    options: dict[str, Any] = {
        "rollout": {"kv_cache_bytes": 64 << 20},
        "engines": ("deepspeed", "vllm"),
        "settings": {"image_every": 2},
    }
    with running(folder, seconds=300, model=model, **options) as one:
        yield one


class Example:
    """``grpo_count`` as a job, submitted as ``plexrl sbatch`` does it."""

    def __init__(self, partition: Partition, name: str, *, seed: int, options: str = "") -> None:
        self.partition, self.name, self.steps = partition, name, STEPS
        self.lines_file = partition.folder / f"{name}.jsonl"
        command = (
            f"exec {sys.executable} {REPOSITORY / 'examples' / 'grpo_count.py'} --steps {STEPS} "
            f"--prompts 8 --group 8 --seed {seed} --out {self.lines_file} {options}"
        )
        with partition.client() as client:
            self.job = submit(
                client,
                partition.slurm,
                Request(
                    partition="test",
                    name=name,
                    account="a",
                    models=("tiny",),
                    seed=seed,
                    priority=1,
                    shown="wrap",
                    script=wrapped(command),
                    arguments=(),
                    workdir=partition.folder,
                    environment=environment_for("ALL") | {"OMP_NUM_THREADS": "1"},
                    output=f"{name}.out",
                ),
            )

    def lines(self) -> list[dict[str, Any]]:
        if not self.lines_file.exists():
            return []
        return [json.loads(line) for line in self.lines_file.read_text().splitlines()]

    def learned(self) -> Any:
        """When it has ended: losses, samples, rewards and weights, bit for bit."""

        def row() -> Any:
            with self.partition.client() as client:
                found = client.job(self.job.slurm_id)
            return found if found["state"] not in ("pending", "admitted", "running") else None

        ended = wait_until(row, seconds=300, name=f"job {self.name}")
        output = (self.partition.folder / f"{self.name}.out").read_text()
        assert ended["state"] == "completed", f"{ended}; {output[-3000:]}"
        checkpoints = self.partition.folder / "state" / "checkpoints"
        pattern = f"job{ended['slurm_id']}-*/sampler_weights/final/model.safetensors"
        (path,) = checkpoints.glob(pattern)
        lines = [(line["loss"], line["samples"], line["reward"]) for line in self.lines()]
        assert len(lines) == self.steps
        return lines, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def alone(partition: Partition) -> dict[int, Any]:
    """What two jobs learn when each has the partition for itself."""
    return {seed: Example(partition, f"alone-{seed}", seed=seed).learned() for seed in (11, 12)}


def test_two_jobs_that_share_learn_bit_by_bit_what_they_learn_alone(
    partition: Partition, alone: dict[int, Any]
) -> None:
    assert alone[11] != alone[12]
    together = {seed: Example(partition, f"shared-{seed}", seed=seed) for seed in (11, 12)}
    assert {seed: example.learned() for seed, example in together.items()} == alone
    switches = partition.query("select count(*) from ledger where activity = 'switch'")
    assert switches[0][0] > 0


def test_off_policy_jobs_keep_two_snapshots_alive_and_share_as_well(
    partition: Partition, alone: dict[int, Any]
) -> None:
    single = Example(partition, "async-alone", seed=11, options="--async").learned()
    assert single != alone[11], "the second rollout has to come from the older weights"
    both = [
        Example(partition, "async-shared", seed=11, options="--async --tool-seconds 0.3"),
        Example(partition, "async-other", seed=12, options="--async"),
    ]
    learned = [example.learned() for example in both]
    assert learned[0] == single


@pytest.mark.parametrize("victim", ["train-0", "rollout-0", "daemon"])
def test_a_kill_in_the_middle_changes_nothing_that_is_learned(
    partition: Partition, alone: dict[int, Any], victim: str
) -> None:
    example = Example(partition, f"killed-{victim}", seed=11)
    wait_until(lambda: len(example.lines()) >= 2, seconds=200, name="the second step")
    if victim == "daemon":
        agent = partition.agent_pid()
        partition.kill_daemon()
        partition.start(seconds=120)
        assert partition.agent_pid() == agent
    else:
        # Stopped first, so that it is certainly in the middle of a function when it is killed.
        pid = partition.rank_pid(victim)
        os.kill(pid, signal.SIGSTOP)
        wait_until(
            lambda: _state(partition, victim) in ("busy", "switch"), name=f"{victim} to work"
        )
        kill(pid)
    assert example.learned() == alone[11]


def _state(partition: Partition, wpg: str) -> str:
    (view,) = [view for view in partition.nodes()["wpgs"] if view["id"] == wpg]
    return str(view["state"])


def test_the_books_of_all_this_add_up_to_the_microsecond(
    partition: Partition, alone: dict[int, Any]
) -> None:
    partition.stop_daemon()
    assert partition.flaws() == []
    (held, spent) = partition.query(
        "select (select sum((l.stop_us - l.start_us)) from (select distinct wpg, start_us, "
        "stop_us from ledger) l), (select sum(gpu_us) from ledger)"
    )[0]
    assert held == spent
    assert partition.query("select count(*) from jobs where billed = 0") == [(0,)]

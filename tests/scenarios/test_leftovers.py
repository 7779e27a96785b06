"""Ends of every kind: nothing is left behind, nothing waits for ever, and the daemon lives on."""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.port import BatchJob
from tests.scenarios.conftest import SLOW
from tests.scenarios.controller import train
from tests.scenarios.partition import Job, Partition, kill, running, wait_until

#: The SDK leaves its connections to the garbage collector.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)


class Raw:
    """The Tinker protocol by hand, for what the SDK never does."""

    def __init__(self, job: Job) -> None:
        self._http = httpx.Client(
            base_url=f"{job.url}/api/v1", headers={"X-API-Key": job.token}, timeout=30
        )

    def ask(self, route: str, /, **body: Any) -> httpx.Response:
        return self._http.post(route, json=body)

    def post(self, route: str, /, **body: Any) -> dict[str, Any]:
        answer = self.ask(route, **body)
        assert answer.status_code == 200, (route, answer.status_code, answer.text)
        found: dict[str, Any] = answer.json()
        return found

    def result(self, request_id: str) -> dict[str, Any]:
        while True:
            found = self.post("/retrieve_future", request_id=request_id)
            if found.get("type") != "try_again":
                return found

    def session(self) -> str:
        answer = self.post("/create_session", tags=[], sdk_version="0.38.0", type="create_session")
        return str(answer["session_id"])

    def model(self, session: str) -> str:
        asked = self.post(
            "/create_model",
            session_id=session,
            model_seq_id=0,
            base_model="tiny",
            lora_config={"rank": 0},
        )
        return str(self.result(asked["request_id"])["model_id"])

    def close(self) -> None:
        self._http.close()


Opened = Callable[[Raw], Raw]


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """What the SDK leaves goes while its warnings are ignored."""
    yield
    gc.collect()


@pytest.fixture
def quick(tmp_path: Path, model: Path) -> Iterator[Partition]:
    with running(tmp_path, model=model) as one:
        yield one


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Closes, in the end, what it was given."""
    with contextlib.ExitStack() as stack:

        def open_raw(raw: Raw) -> Raw:
            return stack.enter_context(contextlib.closing(raw))

        yield open_raw


@pytest.fixture
def raw(quick: Partition, opened: Opened) -> Raw:
    return opened(Raw(Job(quick, seed=1, models=["tiny"])))


def _spool(partition: Partition) -> list[str]:
    return [
        path.name for path in (partition.folder / "state" / "spool").rglob("*") if path.is_file()
    ]


def test_a_wpg_whose_ranks_died_often_comes_up_again_under_a_new_agent(quick: Partition) -> None:
    for _ in range(2):
        _strike(quick, quick.rank_pid("train-0"))
    _strike(quick, quick.agent_pid())
    assert train(Job(quick, seed=1, models=["tiny"]), steps=1)


def _strike(partition: Partition, pid: int) -> None:
    """Kill a process; returns when the training WPG is up with another rank."""
    before = partition.rank_pid("train-0")
    kill(pid)
    wait_until(lambda: _another(partition, before), seconds=20, name="another rank")


def _another(partition: Partition, pid: int) -> bool:
    (view,) = [view for view in partition.nodes()["wpgs"] if view["id"] == "train-0"]
    up = view["state"] not in ("starting", "down")
    return (
        up
        and bool(view["pids"])
        and view["pids"][0] != pid
        and Path(f"/proc/{view['pids'][0]}").exists()
    )


def test_a_job_leaves_nothing_in_the_spool_and_the_host_tier(quick: Partition) -> None:
    job = Job(quick, seed=1, models=["tiny"])
    train(job, steps=2)
    assert _spool(quick)
    job.cancel()
    wait_until(lambda: not _spool(quick), name="the spool to be empty")
    wait_until(lambda: not quick.snapshots(), name="the snapshots to go")


def test_a_named_snapshot_is_kept_in_its_durable_copy_only(quick: Partition, raw: Raw) -> None:
    session = raw.session()
    model = raw.model(session)
    asked = raw.post("/save_weights_for_sampler", model_id=model, seq_id=1, path="kept")
    uri = raw.result(asked["request_id"])["path"]
    wait_until(lambda: not quick.snapshots(), name="the copy in the host tier to go")
    sampler = raw.post(
        "/create_sampling_session", session_id=session, sampling_session_seq_id=0, model_path=uri
    )
    assert _sample(raw, sampler["sampling_session_id"]).status_code == 200


def _sample(raw: Raw, sampler: str) -> httpx.Response:
    asked = raw.post(
        "/asample",
        sampling_session_id=sampler,
        seq_id=1,
        num_samples=1,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]},
        sampling_params={"max_tokens": 2},
    )
    while True:
        answer = raw.ask("/retrieve_future", request_id=asked["request_id"])
        if b"try_again" not in answer.content:
            return answer


def test_a_later_session_of_a_job_samples_the_base_model_again(raw: Raw) -> None:
    for _ in range(2):
        session = raw.session()
        sampler = raw.post(
            "/create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model="tiny",
        )
        assert _sample(raw, sampler["sampling_session_id"]).status_code == 200
        raw.post(f"/sessions/{session}/finish", reason={"type": "success"})


def test_a_sampler_whose_publish_failed_fails_its_samples(
    tmp_path: Path, model: Path, opened: Opened
) -> None:
    with running(tmp_path, model=model, train={"delay_us": {"save_state": 700_000}}) as partition:
        raw = opened(Raw(Job(partition, seed=1, models=["tiny"])))
        session = raw.session()
        deployment = raw.model(session)
        raw.post("/save_weights", model_id=deployment, seq_id=1, path="first")
        asked = raw.post(
            "/save_weights_for_sampler", model_id=deployment, seq_id=2, sampling_session_seq_id=0
        )
        raw.post("/cancel_future", request_id=asked["request_id"])
        assert "cancelled" in raw.result(asked["request_id"])["error"]
        answer = _sample(raw, f"{session}.e0.2")
        assert "save the weights for sampling again" in answer.json()["error"]


def test_a_model_that_is_unloaded_fails_what_it_still_had(
    tmp_path: Path, model: Path, opened: Opened
) -> None:
    with running(tmp_path, model=model, train={"delay_us": {"save_state": 700_000}}) as partition:
        raw = opened(Raw(Job(partition, seed=1, models=["tiny"])))
        deployment = raw.model(raw.session())
        asked = [
            raw.post("/save_weights", model_id=deployment, seq_id=seq, path=f"n{seq}")
            for seq in (1, 2, 4)
        ]
        raw.post("/unload_model", model_id=deployment)
        for one in asked:
            assert raw.result(one["request_id"])["error"]
        wait_until(lambda: not _spool(partition), name="the spool to be empty")


def test_a_daemon_deletes_what_its_forerunner_left_in_the_spool(quick: Partition) -> None:
    job = Job(quick, seed=1, models=["tiny"])
    train(job, steps=1)
    quick.kill_daemon()
    spool = quick.folder / "state" / "spool"
    for stray in ("bodies/s77-1.train.0.3", "results/s77-1.train.0.3+1", "samples/s77-1.b0"):
        (spool / stray).write_bytes(b"stray")
    kept = {name for name in _spool(quick) if not name.startswith("s77")}
    assert kept
    quick.start()
    assert set(_spool(quick)) == kept


def test_a_waiting_job_that_its_user_released_cannot_hurt_the_daemon(quick: Partition) -> None:
    with quick.client() as client:
        client.drain(on=False)
        row = client.submit(
            {
                "partition": "test",
                "name": "early",
                "account": "",
                "models": [],
                "priority": 1,
                "seed": 1,
                "script": "x",
                "options": {},
            }
        )
        client.drain(on=True)
        batch = BatchJob(
            name="early", script="#!/bin/sh\nexit 0\n", workdir=quick.folder, environment={}
        )
        number = quick.slurm.submit(batch, hold=True)
        client.bind(row["job_id"], number)
        quick.slurm.release(number)
        ended = wait_until(lambda: _ended(client.job(number)), name="the job to end")
        assert ended["state"] == "failed"
        assert "before it was admitted" in ended["reason"]
        assert client.health()


def _ended(row: dict[str, Any]) -> dict[str, Any] | None:
    return row if row["ended_us"] is not None else None


def test_a_hold_that_slurm_ended_is_followed_by_another_and_jobs_go_on(
    tmp_path: Path, model: Path
) -> None:
    with running(tmp_path, model=model, train=SLOW) as partition:
        job = Job(partition, seed=7, models=["tiny"])

        def between(step: int) -> None:
            if step != 1:
                return
            ((hold,),) = partition.query("select slurm_id from holds where state != 'ended'")
            partition.slurm.cancel(SlurmId(hold))

        seen = train(job, steps=2, between=between)
        assert len(seen) == 2 * 8 + 1
        assert [state for (state,) in partition.query("select state from holds")] == ["ended", "up"]
        assert partition.flaws() == []


def test_a_hold_that_is_given_back_leaves_no_host_tier(quick: Partition) -> None:
    train(Job(quick, seed=1, models=["tiny"]), steps=1)
    assert quick.host.exists()
    with quick.client() as client:
        client.release()
    assert quick.daemon is not None
    assert quick.daemon.wait(timeout=40) == 0
    time.sleep(0.1)
    assert not [path for path in quick.host.rglob("*") if path.is_file()]
    assert quick.flaws() == []

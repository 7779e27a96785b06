"""Slurm's records of holds are copied, and tell what jobs used, whatever Slurm answers."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import CauseId, JobId, SlurmId, WpgId
from plexrl_slurm.core.messages import Activity, Charge, Pool, Wpg
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons import usage as module
from plexrl_slurm.daemons.usage import Usage, whose
from plexrl_slurm.db import holds, ledger, queue
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from plexrl_slurm.db.usage import Incomplete
from plexrl_slurm.slurm.port import PastJob, SlurmState
from tests.db.builders import add_running_job

SECOND = 1_000_000
#: When everything here happens.
T0 = 1_796_000_000 * SECOND


def record(number: str, start: int | None, end: int | None, **more: Any) -> PastJob:
    """Seconds after T0; one without an end runs."""
    state = SlurmState.RUNNING if end is None else SlurmState.COMPLETED
    begun = None if start is None else T0 + start * SECOND
    values: dict[str, Any] = {
        "id": SlurmId(number),
        "state": state,
        "word": str(state),
        "user": "ada",
        "account": "lab",
        "start_us": begun,
        "end_us": None if end is None else T0 + end * SECOND,
        "elapsed_us": 0 if start is None or end is None else (end - start) * SECOND,
        "gpus": 2,
        "nodes": ("n1",),
        "exit_code": None,
        "comment": "",
        "admin_comment": "",
    }
    return PastJob(**(values | more))


class Sacct:
    """An accounting that a test fills."""

    def __init__(self) -> None:
        self.records: dict[SlurmId, tuple[PastJob, ...]] = {}
        self.asked: list[list[str]] = []
        self.notes: list[tuple[str, str]] = []
        self.keeps = True
        self.error: Exception | None = None

    def put(self, *records: PastJob) -> None:
        self.records[records[0].id] = records

    def past(self, jobs: Iterable[SlurmId]) -> Mapping[SlurmId, tuple[PastJob, ...]]:
        self.asked.append(list(jobs))
        if isinstance(self.error, SlurmUnavailable):
            raise self.error
        return dict(self.records)

    def annotate(self, job: SlurmId, text: str) -> None:
        if self.error is not None:
            raise self.error
        self.notes.append((job, text))
        if self.keeps:
            (*before, last) = self.records[job]
            changed = {name: getattr(last, name) for name in PastJob.__slots__}
            self.records[job] = (*before, PastJob(**changed | {"admin_comment": text.lower()}))


class Bench:
    """The loop with a database of its own; ``look`` is one turn at a time of the test's."""

    def __init__(self, folder: Path) -> None:
        self.engine = open_database(f"sqlite:///{folder}/x.db")
        upgrade(self.engine)
        self.sacct = Sacct()
        self.now = T0 + 1_000 * SECOND
        self.fresh()

    def fresh(self) -> None:
        """Another daemon."""
        self.usage = Usage(self._parts())

    def _parts(self) -> Any:
        return SimpleNamespace(
            settings=SimpleNamespace(partition="rl"),
            epoch=self.now,
            port=self.sacct,
            holds=SimpleNamespace(live={}),
            state=SimpleNamespace(jobs={}),
        )

    def write(self, work: Callable[[Any], Any]) -> Any:
        with transaction(self.engine) as session:
            return work(session)

    def query(self, sql: str) -> list[Any]:
        rows = self.write(lambda s: list(s.connection().exec_driver_sql(sql)))
        return [tuple(row) for row in rows]

    def look(self, *, after: int = 100) -> None:
        """One look, so many seconds after the one before."""
        self.now += after * SECOND

        async def turn() -> None:
            async with Store(self.engine) as store:
                self.usage._parts.store = store
                await self.usage.look(self.now)

        asyncio.run(turn())

    def add_hold(self, name: str, slurm_id: str, *, ended: int | None = None) -> None:
        def work(session: Any) -> None:
            holds.open_hold(
                session,
                hold_id=name,
                partition="rl",
                backend="slurm",
                slurm_id=SlurmId(slurm_id),
                epoch="1",
                now_us=T0,
            )
            if ended is not None:
                holds.end_hold(session, name, now_us=T0 + ended * SECOND)

        self.write(work)

    def add_job(self, *, billed: bool = True) -> JobId:
        def work(session: Any) -> JobId:
            job = add_running_job(session, started_us=T0)
            queue.finish(session, job, state=JobState.COMPLETED, now_us=T0 + 60 * SECOND)
            if billed:
                queue.close_bill(session, job)
            return job

        found: JobId = self.write(work)
        return found

    def stories(self) -> list[str]:
        return [
            text for (text,) in self.query("select text from job_events where kind='accounted'")
        ]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    made = Bench(tmp_path)
    monkeypatch.setattr(module, "now_us", lambda: made.now)
    yield made
    made.engine.dispose()


ROWS = "select hold_id, slurm_id, start_us, end_us, gpus from slurm_usage order by id"


def test_a_component_belongs_to_the_hold_with_the_nearest_number_below() -> None:
    asked = [
        Incomplete(id=name, leader=leader, submitted_us=T0, ended_us=None)
        for name, leader in (("h2", 20), ("h1", 7))
    ]
    records = {SlurmId(n): [record(n, 0, None)] for n in ("7", "8", "20", "22", "3")}
    found = whose(asked, records)
    assert {hold: [r.id for r in many] for hold, many in found.items()} == {
        "h1": ["7", "8"],
        "h2": ["20", "22"],
    }


def test_an_older_job_with_the_same_number_is_not_the_holds() -> None:
    asked = [Incomplete(id="h1", leader=7, submitted_us=T0, ended_us=None)]
    records = {SlurmId("7"): [record("7", -90_000, -80_000), record("7", 1, None)]}
    assert [r.start_us for r in whose(asked, records)["h1"]] == [T0 + SECOND]


def test_a_live_hold_is_asked_for_each_minute_and_an_ended_one_until_all_its_last_words(
    bench: Bench,
) -> None:
    bench.add_hold("h1", "7")
    bench.sacct.put(record("7", 0, None))
    bench.sacct.put(record("8", 0, None))
    bench.look()
    bench.look(after=5)
    assert bench.sacct.asked == [["7"]]
    assert [row[3] for row in bench.query(ROWS)] == [None, None]
    bench.write(lambda s: holds.end_hold(s, "h1", now_us=bench.now))
    bench.look(after=5)
    bench.sacct.put(record("7", 0, 1_000))
    del bench.sacct.records[SlurmId("8")]
    bench.look(after=5)
    bench.sacct.put(record("8", 0, 1_001))
    bench.look(after=5)
    assert bench.sacct.asked == [["7"]] * 4
    bench.look(after=300)
    bench.look(after=300)
    assert bench.sacct.asked == [["7"]] * 4
    assert bench.query(ROWS) == [
        ("h1", "7", T0, T0 + 1_000 * SECOND, 2),
        ("h1", "8", T0, T0 + 1_001 * SECOND, 2),
    ]


def test_a_hold_that_never_started_is_asked_for_once(bench: Bench) -> None:
    bench.add_hold("h1", "7", ended=900)
    bench.sacct.put(record("7", None, 900, state=SlurmState.CANCELLED))
    for _ in range(3):
        bench.look()
    assert bench.sacct.asked == [["7"]]
    assert bench.query(ROWS) == []


def test_what_accounting_never_said_is_given_up(bench: Bench) -> None:
    bench.add_hold("h1", "7", ended=10)
    bench.look(after=8 * 86_400)
    assert bench.sacct.asked == []


def test_a_job_is_told_once_and_seen_to_be_there(bench: Bench) -> None:
    job = bench.add_job()
    number = f"{100 + job}"
    bench.sacct.put(record(number, 0, 60, admin_comment="plexrl:1:rl:model=tiny"))
    bench.look()
    text = f"plexrl: job {number}, busy 0.0 GPU-s, switch 0.0, kept 0.0"
    assert bench.sacct.notes == [(number, text)]
    assert bench.stories() == []
    bench.fresh()
    bench.look()
    bench.look()
    assert bench.sacct.notes == [(number, text)]
    assert bench.stories() == [text]


def test_a_job_whose_end_accounting_does_not_know_yet_waits(bench: Bench) -> None:
    job = bench.add_job()
    bench.look()
    bench.sacct.put(record(f"{100 + job}", 0, None))
    bench.look()
    assert bench.sacct.notes == []
    bench.sacct.put(record(f"{100 + job}", 0, 60))
    bench.look()
    assert len(bench.sacct.notes) == 1


def test_the_sites_own_comment_is_left_alone(bench: Bench) -> None:
    job = bench.add_job()
    bench.sacct.put(record(f"{100 + job}", 0, 60, admin_comment="ticket 12"))
    bench.look()
    assert bench.sacct.notes == []
    assert "which was left alone" in bench.stories()[0]


def test_a_bill_that_a_killed_daemon_left_open_is_closed(bench: Bench) -> None:
    job = bench.add_job(billed=False)
    bench.sacct.put(record(f"{100 + job}", 0, 60))
    bench.look()
    assert bench.query("select billed from jobs") == [(1,)]
    assert len(bench.sacct.notes) == 1


def test_what_slurm_does_not_keep_is_not_written_again_and_again(bench: Bench) -> None:
    job = bench.add_job()
    bench.sacct.put(record(f"{100 + job}", 0, 60))
    bench.sacct.keeps = False
    for _ in range(4):
        bench.look()
    assert len(bench.sacct.notes) == 1
    assert "though Slurm took" in bench.stories()[0]


def test_a_refusal_is_one_sentence_in_the_log_with_its_remedy(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    job = bench.add_job()
    bench.sacct.put(record(f"{100 + job}", 0, 60))
    bench.sacct.error = SlurmRejected(("sacctmgr",), "Access/permission denied")
    caplog.set_level("INFO")
    bench.look()
    bench.look()
    assert caplog.text.count("set adminlevel=operator") == 1
    bench.sacct.error = None
    bench.look()
    assert len(bench.sacct.notes) == 1


def test_no_answer_and_no_sense_end_nothing(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.add_hold("h1", "7")
    caplog.set_level("INFO")
    bench.sacct.error = SlurmUnavailable("slurmdbd does not answer")
    bench.look()
    bench.look()
    assert caplog.text.count("slurmdbd does not answer") == 1
    bench.sacct.error = None
    bench.sacct.records = {SlurmId("7"): (None,)}  # type: ignore[dict-item]
    bench.look()
    assert "accounting failed" in caplog.text
    bench.sacct.put(record("7", 0, None))
    bench.look()
    assert len(bench.query(ROWS)) == 1


def test_the_summary_is_what_the_ledger_says(bench: Bench) -> None:
    bench.add_hold("h1", "7")
    job = bench.add_job()

    def book(session: Any) -> None:
        wpg = Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=2)
        holds.hold_wpgs(session, "h1", [holds.Stay(wpg=wpg, held_us=T0)])
        ledger.append(
            session,
            [ten_seconds(job)],
            holds={WpgId("train-0"): "h1"},
        )

    bench.write(book)
    bench.sacct.put(record(f"{100 + job}", 0, 60))
    bench.look()
    assert "busy 20.0 GPU-s" in bench.sacct.notes[0][1]


def ten_seconds(job: JobId) -> Charge:
    return Charge(
        wpg=WpgId("train-0"),
        activity=Activity.BUSY,
        job=job,
        call=None,
        start_us=T0,
        stop_us=T0 + 10 * SECOND,
        gpu_us=20 * SECOND,
        cause=CauseId("test"),
    )


def test_the_loop_looks_at_once_when_something_ends(bench: Bench) -> None:
    parts: Any = bench.usage._parts
    assert bench.usage._due(bench.now)
    bench.look()
    parts.holds.live = {"h1": object()}
    parts.state.jobs = {JobId(1): object()}
    later = bench.now + 5 * SECOND
    assert not bench.usage._due(later)
    parts.holds.live = {}
    assert bench.usage._due(later)
    assert not bench.usage._due(bench.now + SECOND)
    assert bench.usage._due(bench.now + 61 * SECOND)

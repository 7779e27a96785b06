"""The impure half of the scheduler, with a core that only listens."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.errors import StorageFull
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    AnyEvent,
    AnyInstruction,
    Call,
    FunctionKind,
    Persist,
    RunEnded,
    Switch,
    SwitchEnded,
    Tick,
    WakeAt,
    WpgDown,
)
from plexrl_slurm.daemons import shell as shell_module
from plexrl_slurm.daemons.entries import Entry
from plexrl_slurm.daemons.shell import Shell
from plexrl_slurm.daemons.spool import Spool

WPG = WpgId("train-0")


class Core:
    """Hears everything and answers with what a test put into ``next``."""

    def __init__(self) -> None:
        self.heard: list[AnyEvent] = []
        self.next: list[AnyInstruction] = []

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        self.heard.append(event)
        return []

    def plan(self, at_us: int, cause: CauseId) -> list[AnyInstruction]:
        out, self.next = self.next, []
        return out


class Agents:
    """Orders that were sent."""

    def __init__(self) -> None:
        self.switches: list[Switch] = []

    def switch(self, step: Switch, weights: object, durable: object) -> None:
        self.switches.append(step)

    def persist(self, step: Persist, known: object) -> None:
        raise AssertionError(step)


class Books:
    """Ends of calls, written down at once."""

    def __init__(self) -> None:
        self.ends: list[tuple[CallId, wire.Result]] = []

    def finished(self, entry: Entry, result: wire.Result, *, ok: bool, after: Any) -> None:
        self.ends.append((entry.call.id, result))
        after()


class Bench:
    """A shell and what surrounds it."""

    def __init__(self, folder: Path) -> None:
        self.core, self.agents, self.books = Core(), Agents(), Books()
        self.spool = Spool(folder)
        core: Any = self.core
        books: Any = self.books
        orders: Any = self.agents
        self.shell = Shell(core, spool=self.spool, books=books, max_part_tokens=100)
        self.shell.orders = orders

    async def switch(self, incoming: str) -> None:
        self.core.next = [
            Switch(
                wpg=WPG,
                outgoing=None,
                outgoing_progress=(0, 0),
                incoming=DeploymentId(incoming),
                cause=CauseId("test"),
            )
        ]
        self.shell.tick()
        await asyncio.sleep(0)

    def ends_of_switches(self) -> list[SwitchEnded]:
        return [event for event in self.core.heard if isinstance(event, SwitchEnded)]


def call(name: str, *, kind: FunctionKind = FunctionKind.SAMPLE, parts: int = 1) -> Call:
    return Call(
        id=CallId(name),
        deployment=DeploymentId("d"),
        job=JobId(1),
        kind=kind,
        seq=1,
        parts=parts,
    )


def sample(name: str) -> Entry:
    return Entry(call=call(name), sample=wire.Sample([1], 1, 1, seed=0))


def test_a_failed_switch_is_told_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_module, "RETRY_S", 0.01)

    async def story() -> None:
        bench = Bench(tmp_path)
        await bench.switch("a")
        bench.shell.switch_ended(WPG, ok=False, moved_bytes=0, error="it is damaged")
        assert bench.ends_of_switches() == []
        await asyncio.sleep(0.05)
        told = [(event.ok, event.error) for event in bench.ends_of_switches()]
        assert told == [(False, "it is damaged")]

    asyncio.run(story())


def test_a_failure_told_late_does_not_hit_the_switch_that_came_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell_module, "RETRY_S", 0.01)

    async def story() -> None:
        bench = Bench(tmp_path)
        await bench.switch("a")
        bench.shell.switch_ended(WPG, ok=False, moved_bytes=0)
        bench.shell.feed(WpgDown(at_us=1, cause=CauseId("test"), wpg=WPG, reason="killed"))
        await bench.switch("b")
        await asyncio.sleep(0.05)
        assert bench.ends_of_switches() == []
        bench.shell.switch_ended(WPG, ok=True, moved_bytes=7)
        assert [(event.ok, event.moved_bytes) for event in bench.ends_of_switches()] == [(True, 7)]
        assert [step.incoming for step in bench.agents.switches] == ["a", "b"]

    asyncio.run(story())


def test_a_sample_that_waits_for_its_weights_can_be_cancelled(tmp_path: Path) -> None:
    async def story() -> None:
        bench = Bench(tmp_path)
        one, other = sample("one"), sample("other")
        bench.shell.submit(one)
        bench.shell.submit(other)
        bench.shell.cancel(CallId("one"))
        assert one.outcome == wire.Failed("cancelled", "server")
        bench.shell.drop(DeploymentId("d"), reason="its publish failed")
        assert other.outcome == wire.Failed("its publish failed", "server")
        assert [name for name, _ in bench.books.ends] == ["one", "other"]

    asyncio.run(story())


def test_a_call_whose_deployment_went_while_it_was_accepted_fails_at_once(tmp_path: Path) -> None:
    async def story() -> None:
        bench = Bench(tmp_path)
        entry = Entry(call=call("late", kind=FunctionKind.OPTIM_STEP), data=b"body")
        bench.shell.refuse(entry, "its session has ended")
        assert entry.outcome == wire.Failed("its session has ended", "server")
        assert bench.core.heard == []

    asyncio.run(story())


def test_a_full_spool_does_not_keep_the_end_of_a_part_from_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Spool, call: str, data: bytes, *, part: int | None = None) -> None:
        raise StorageFull("spool", 1, 0)

    async def story() -> None:
        bench = Bench(tmp_path)
        entry = Entry(call=call("long", kind=FunctionKind.FORWARD_BACKWARD, parts=2))
        bench.shell.entries[entry.call.id] = entry
        monkeypatch.setattr(Spool, "write_result", full)
        result = wire.encode(wire.OptimOutput({}))
        bench.shell.run_ended(WPG, entry.call.id, 0, ok=True, result=result, error="")
        assert [event.part for event in bench.core.heard if isinstance(event, RunEnded)] == [0]
        assert entry.parts == {0: wire.OptimOutput({})}

    asyncio.run(story())


def test_answers_are_forgotten_with_their_files_once_they_are_old(tmp_path: Path) -> None:
    async def story() -> None:
        bench = Bench(tmp_path)
        entries = {}
        for name in ("fetched", "unfetched", "needed", "waiting"):
            entry = Entry(call=call(name, kind=FunctionKind.OPTIM_STEP), forgotten=name != "needed")
            if name != "waiting":
                entry.resolve(wire.OptimOutput({}))
                bench.spool.write_result(name, b"result")
            bench.shell.entries[entry.call.id] = entries[name] = entry
        entries["fetched"].fetched_us = entries["needed"].fetched_us = 10
        bench.shell.collect(fetched_before_us=10, ended_before_us=0)
        assert len(bench.shell.entries) == 4
        bench.shell.collect(fetched_before_us=11, ended_before_us=0)
        assert bench.spool.read_result("fetched") is None
        assert sorted(bench.shell.entries) == ["needed", "unfetched", "waiting"]
        late_us = entries["unfetched"].ended_us + 1
        bench.shell.collect(fetched_before_us=11, ended_before_us=late_us)
        assert sorted(bench.shell.entries) == ["needed", "waiting"]

    asyncio.run(story())


def test_a_timer_that_rings_early_is_set_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1_000_000]
    monkeypatch.setattr(shell_module, "now_us", lambda: clock[0])

    async def run() -> None:
        bench = Bench(tmp_path)
        bench.core.next = [WakeAt(at_us=1_010_000, cause=CauseId("test"))]
        bench.shell.tick()
        await asyncio.sleep(0)
        bench.core.heard.clear()
        clock[0] = 1_009_976  # the loop's clock runs ahead by 24 us
        await asyncio.sleep(0.05)
        assert bench.core.heard == []
        clock[0] = 1_010_001
        await asyncio.sleep(0.05)
        (tick,) = bench.core.heard
        assert isinstance(tick, Tick)
        assert tick.at_us == 1_010_001

    asyncio.run(run())

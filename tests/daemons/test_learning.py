"""What is believed of a job: a guess, then what its like were, then what its own steps are."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CauseId, JobId, SlurmId, WpgId
from plexrl_slurm.core.learning import Learned
from plexrl_slurm.core.messages import (
    CallArrived,
    DeploymentPlaced,
    FunctionKind,
    Pool,
    Rollouts,
    RunEnded,
    SwitchEnded,
    WpgHeld,
    WpgUp,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.profiles import Guess
from plexrl_slurm.daemons.learning import EVERY, OWN_STEPS, HabitBook, LearningCore
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.daemons.writer import Writer
from plexrl_slurm.db import profiles
from plexrl_slurm.db.engine import open_database
from plexrl_slurm.db.schema import upgrade
from plexrl_slurm.db.store import Store
from tests.core.workloads import ROLLOUT, call, sampled
from tests.daemons.holds_bench import settings_in

S = 1_000_000


def learned(step: int = 100, phase: int = 20, *, steps: int = OWN_STEPS) -> Learned:
    return Learned(
        steps=steps, step_us=step * S, phase_us=phase * S, function_us=phase * S,
        sample_us=50 * S, spread_us=S, overlap_percent=0,
    )  # fmt: skip


class Told:
    """A learner that says what the test says."""

    def __init__(self) -> None:
        self.said: dict[JobId, Learned] = {}

    def learned(self, job: JobId) -> Learned | None:
        return self.said.get(job)


class Bench:
    def __init__(self, folder: Path, store: Store) -> None:
        settings = settings_in(folder)
        self.store, self.state = store, State()
        self.writer = Writer(store)
        self.placer = Placer(self.state, settings)
        self.book = HabitBook(partition="rlvr", guess=Guess(), writer=self.writer, state=self.state)
        self.learner = Told()
        learner: Any = self.learner
        self.book.inform(self.placer, learner)
        self.news: list[JobId] = []
        self.book.on_news = self.news.append

    def job(self, number: int, user: str = "ada", name: str = "grpo") -> LiveJob:
        job = LiveJob(
            id=JobId(number), uid=1, user=user, name=name, seed=0, priority=1,
            slurm_id=SlurmId(str(number)), running=True, models=("tiny",),
            homes={Pool.TRAIN: WpgId("train-0")}, started_us=1000 * S,
        )  # fmt: skip
        self.state.jobs[job.id] = job
        return job

    def step(self, job: LiveJob, found: Learned) -> None:
        self.learner.said[job.id] = found
        self.book.stepped(job.id)

    def phase(self, job: LiveJob) -> int:
        return self.book.habits_of(job, "tiny", 1).train.phase_us

    async def settle(self) -> None:
        task = asyncio.create_task(self.writer.run())
        await self.writer.drain()
        task.cancel()


Play = Callable[[Callable[[Path, Store], Any]], None]


@pytest.fixture
def play(tmp_path: Path) -> Play:
    def run(scene: Callable[[Path, Store], Any]) -> None:
        async def whole() -> None:
            engine = open_database(f"sqlite:///{tmp_path}/x.db")
            upgrade(engine)
            try:
                async with Store(engine) as store:
                    await scene(tmp_path, store)
            finally:
                engine.dispose()

        asyncio.run(whole())

    return run


def test_a_guess_then_its_own_steps_then_its_likes(play: Play) -> None:
    async def scene(folder: Path, store: Store) -> None:
        bench = Bench(folder, store)
        guessed = Guess().habits().train.phase_us
        first = bench.job(1)
        assert bench.phase(first) == guessed
        assert bench.book.source(first) == "a guess"
        bench.step(first, learned(steps=OWN_STEPS - 1))
        assert bench.phase(first) == guessed
        bench.step(first, learned(phase=21))
        assert bench.phase(first) == 21 * S
        assert bench.book.source(first) == "its own steps"
        assert bench.news == [1]
        await bench.settle()
        # Another daemon, which knows only the database.
        later = Bench(folder, store)
        await later.book.read(store)
        same = later.job(2)
        assert later.phase(same) == 21 * S
        assert later.book.source(same) == "earlier jobs"
        assert later.phase(later.job(3, name="other")) == 21 * S
        assert later.phase(later.job(4, user="bob")) == 21 * S
        assert later.book.habits_of(same, "else", 1) == Guess().habits()

    play(scene)


def test_what_a_job_has_lost_is_taken_off_its_promise(play: Play) -> None:
    async def scene(folder: Path, store: Store) -> None:
        bench = Bench(folder, store)
        job, allowed = bench.job(1), bench.placer.allowed_of
        late = replace(learned(), alone_us=500 * S, taken_us=570 * S)
        before = bench.placer.version_of
        assert before is not None
        bench.step(job, replace(late, steps=OWN_STEPS - 1))
        assert allowed(job) == 0
        known = before(job)
        bench.step(job, late)
        # 1.10 of 1000 s, of which 570 s are over: 530 s are left for 500 s.
        assert allowed(job) == 1.06
        seen = bench.book.view(job)
        assert (seen["slowed"], seen["allowed"]) == (1.14, 1.06)
        assert bench.book.view(bench.job(9))["slowed"] is None
        assert before(job) != known
        bench.book.ended(job, well=True, at_us=2000 * S)
        assert allowed(job) == 0
        # That one took 5 steps of 100 s; of this one 15 are left, as its like took 20.
        await bench.settle()
        longer = bench.job(2)
        bench.book.ended(longer, well=False, at_us=0)
        bench.step(job, replace(learned(steps=20), alone_us=1, taken_us=1))
        bench.book.ended(job, well=True, at_us=3000 * S)
        bench.step(longer, late)
        assert allowed(longer) == round(1 + (2000 * 0.1 - 70) / 1500, 3)
        strict = bench.job(3)
        strict.max_slowdown = 1.5
        bench.step(strict, replace(late, taken_us=500 * S))
        assert allowed(strict) == round(1 + 2000 * 0.5 / 1500, 3)

    play(scene)


ROLLED = Rollouts(lengths_us=(9 * S, 70 * S), gaps_us=(5, 20 * S), stalls_us=(20 * S,))


def test_lengths_and_pauses_of_rollouts_are_believed_of_the_same_job_after_a_restart(
    play: Play,
) -> None:
    async def scene(folder: Path, store: Store) -> None:
        bench = Bench(folder, store)
        first = bench.job(1)
        bench.step(first, replace(learned(), rollouts=ROLLED))
        await bench.settle()
        later = Bench(folder, store)
        await later.book.read(store)
        for job, believed in ((later.job(1), ROLLED), (later.job(2, name="other"), None)):
            found = later.book.expected_of(job.id)
            assert found is not None and found.rollouts == believed

    play(scene)


def test_a_profile_of_an_earlier_version_is_read(play: Play) -> None:
    async def scene(folder: Path, store: Store) -> None:
        bench = Bench(folder, store)
        bench.step(bench.job(1), learned())
        await bench.settle()
        (row,) = await store.run(profiles.newest, partition="rlvr")
        assert {**row.learned, "rollouts": None} == row.learned
        del row.learned["rollouts"]
        assert msgspec.convert(row.learned, Learned) == learned()

    play(scene)


def test_the_core_tells_what_it_has_learned_of_rollouts(tmp_path: Path) -> None:
    prior, policy = SwitchCosts(), find_policy("atc_h")
    core = LearningCore(policy, path=tmp_path / "j" / "1.jsonl", prior=prior)
    wpg, deployment, cause = ROLLOUT, sampled(1, "s"), CauseId("test")
    core.handle(WpgHeld(wpg=wpg, at_us=0, cause=cause))
    core.handle(WpgUp(wpg=wpg.id, at_us=0, cause=cause))
    core.handle(DeploymentPlaced(deployment=deployment, at_us=0, cause=cause))
    asked = call(deployment, FunctionKind.SAMPLE, 0)
    core.handle(CallArrived(call=asked, at_us=S, cause=cause))
    core.plan(S, cause)
    core.handle(SwitchEnded(wpg=wpg.id, ok=True, at_us=2 * S, cause=cause))
    core.plan(2 * S, cause)
    core.handle(RunEnded(wpg=wpg.id, call=asked.id, part=0, ok=True, at_us=9 * S, cause=cause))
    assert core.learner.rollouts_of(JobId(1)) == Rollouts(lengths_us=(7 * S,))
    core.close()


def test_ones_own_jobs_count_before_those_of_others_and_newer_before_older(play: Play) -> None:
    async def scene(folder: Path, store: Store) -> None:
        bench = Bench(folder, store)
        mine, theirs, newest = bench.job(1), bench.job(2, "bob"), bench.job(3, "eve")
        bench.step(mine, learned(phase=11))
        bench.step(theirs, learned(phase=22))
        bench.step(newest, learned(phase=33))
        for job in (mine, theirs, newest):
            bench.book.ended(job, well=True, at_us=2000 * S)
        await bench.settle()
        later = Bench(folder, store)
        await later.book.read(store)
        assert later.phase(later.job(4, "ada", "another")) == 11 * S
        assert later.phase(later.job(5, "zoe")) == 33 * S

    play(scene)


def test_what_is_learned_is_written_now_and_then_and_news_are_told(play: Play) -> None:
    async def scene(folder: Path, store: Store) -> None:
        bench = Bench(folder, store)
        job = bench.job(1)
        for steps in range(1, 2 * EVERY + 1):
            bench.step(job, learned(steps=steps))
        assert bench.news == [1] * 3  # after 5, 10 and 20
        await bench.settle()

    play(scene)


def test_when_a_job_is_expected_to_end(play: Play) -> None:
    async def scene(folder: Path, store: Store) -> None:
        bench = Bench(folder, store)
        job = bench.job(1)
        now = 1500 * S
        assert bench.book.expected_end_us(job, now) is None
        job.time_limit_us = 9000 * S
        assert bench.book.expected_end_us(job, now) == 10_000 * S
        job.limit_end_us = 8000 * S  # Slurm knows better
        assert bench.book.expected_end_us(job, now) == 8000 * S
        bench.step(job, learned(steps=30))
        bench.book.ended(job, well=True, at_us=4000 * S)
        again = bench.job(2)
        assert bench.book.expected_end_us(again, now) == 4000 * S
        bench.step(again, learned(steps=10))
        assert bench.book.expected_end_us(again, now) == now + 20 * 100 * S
        late = bench.job(3)
        assert bench.book.expected_end_us(late, 5000 * S) is None

    play(scene)


def test_a_job_that_did_not_end_well_says_nothing_of_how_long_such_jobs_run(play: Play) -> None:
    async def scene(folder: Path, store: Store) -> None:
        bench = Bench(folder, store)
        job = bench.job(1)
        bench.step(job, learned())
        bench.book.ended(job, well=False, at_us=4000 * S)
        assert bench.book.expected_end_us(bench.job(2), 1500 * S) is None
        await bench.settle()

    play(scene)

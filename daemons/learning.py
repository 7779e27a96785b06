"""What jobs are like: learned while they run, kept in the database, believed at the next one."""

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.grouping import allowance
from plexrl_slurm.core.ids import CauseId, JobId
from plexrl_slurm.core.learning import Learned, Learner
from plexrl_slurm.core.messages import (
    AnyEvent,
    AnyInstruction,
    DeploymentPlaced,
    Expected,
    Pool,
)
from plexrl_slurm.core.policy import Policy
from plexrl_slurm.core.profiles import Guess, Habits
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.daemons.writer import Writer
from plexrl_slurm.db import profiles
from plexrl_slurm.db.models import ProfileRow
from plexrl_slurm.db.store import Store
from plexrl_slurm.journal import JournalledCore
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: After so many steps of its own a job is believed to be as they were.
OWN_STEPS: Final = 5
#: What is learned is written down after these, and then every so many steps.
EVERY: Final = 10

#: User, job name, model, GPUs of the training WPG.
Key = tuple[str, str, str, int]


class LearningCore(JournalledCore):
    """A core of which somebody learns what jobs are like; that decides nothing in it."""

    def __init__(self, policy: Policy, *, path: Path, prior: SwitchCosts, **more: Any) -> None:
        super().__init__(policy, path=path, prior=prior, **more)
        self.learner = Learner()
        self.learner.rollouts_of = self._books.estimates.rollouts
        #: Called when a step of a job was measured.
        self.on_step: Callable[[JobId], None] = lambda _job: None
        #: What is believed of a job that comes.
        self.expected_of: Callable[[JobId], Expected | None] = lambda _job: None
        self._learns = True

    def handle(self, event: AnyEvent) -> list[AnyInstruction]:
        if isinstance(event, DeploymentPlaced) and event.expected is None:
            event = replace(event, expected=self.expected_of(event.deployment.job))
        out = super().handle(event)
        self._watch(event, event.at_us, out)
        return out

    def plan(self, at_us: int, cause: CauseId) -> list[AnyInstruction]:
        out = super().plan(at_us, cause)
        self._watch(None, at_us, out)
        return out

    def _watch(self, event: AnyEvent | None, at_us: int, out: list[AnyInstruction]) -> None:
        if not self._learns:
            return
        try:
            stepped = self.learner.heard(event) if event is not None else None
            self.learner.said(at_us, out)
            if stepped is not None:
                self.on_step(stepped)
        except Exception:  # nobody's call fails because somebody takes notes
            log.exception("learning has ended")
            self._learns = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What jobs of one key have been like."""

    learned: Learned
    #: Of the last one that ended well; 0: none has.
    run_steps: int = 0
    run_us: int = 0


class HabitBook:
    """What the partition believes of its jobs."""

    def __init__(self, *, partition: str, guess: Guess, writer: Writer, state: State) -> None:
        self._partition, self._writer, self._state = partition, writer, state
        self._guess, self._guessed = guess, guess.habits()
        self._known: dict[Key, Known] = {}
        #: The newest by user and model, and by model alone (""); of these by GPUs, newest last.
        self._sizes: dict[tuple[str, str], dict[int, Known]] = {}
        #: How often something was learned of jobs of a model.
        self._news: Counter[str] = Counter()
        self._own: dict[JobId, Learned] = {}
        self._habits: dict[JobId, Habits] = {}
        #: What is left of promises, by what their jobs have lost.
        self._allowed: dict[JobId, float] = {}
        #: Where jobs live; set by :meth:`inform`.
        self._placer: Placer | None = None
        self._learner: Learner | None = None
        #: Called when a job is known by its own steps, and then from time to time.
        self.on_news: Callable[[JobId], None] = lambda _job: None

    def inform(self, placer: Placer, learner: Learner) -> None:
        """From now on ``placer`` asks this book, which learns from ``learner``."""
        self._placer, self._learner = placer, learner
        placer.habits_of = self.habits_of
        placer.version_of = self.version_of
        placer.allowed_of = lambda job: self._allowed.get(job.id, 0.0)
        placer.ends_of = lambda job: self.expected_end_us(job, now_us())

    async def read(self, store: Store) -> None:
        """What earlier daemons have learned."""
        for row in await store.run(profiles.newest, partition=self._partition):
            try:
                self._remember(row)
            except msgspec.ValidationError as error:  # of another version
                say(log, "profile_not_read", user=row.user, model=row.model, reason=error)

    def _remember(self, row: ProfileRow) -> None:
        key = (row.user, row.name, row.model, row.gpus)
        known = Known(
            learned=msgspec.convert(row.learned, Learned),
            run_steps=row.run_steps,
            run_us=row.run_us,
        )
        self._put(key, known)

    # -- asked -------------------------------------------------------------------------------
    def habits_of(self, job: LiveJob, model: str, gpus: int) -> Habits:
        """Its own after five steps; else of its user's earlier jobs; else anybody's; a guess."""
        if (own := self._habits.get(job.id)) is not None:
            return own
        known = self._like(job, model, gpus)
        return self._guessed if known is None else known.learned.habits(self._guess.switch_us)

    def version_of(self, job: LiveJob) -> Hashable:
        """Another one when :meth:`habits_of` has another answer."""
        own = self._habits.get(job.id)
        if own is not None:
            return own, self._allowed.get(job.id)
        return self._news[job.models[0] if job.models else ""]

    def _like(self, job: LiveJob, model: str, gpus: int) -> Known | None:
        exact = self._known.get((job.user, job.name, model, gpus))
        if exact is not None:
            return exact
        for sizes in (self._sizes.get((job.user, model)), self._sizes.get(("", model))):
            if sizes:
                return sizes[gpus] if gpus in sizes else next(reversed(sizes.values()))
        return None

    def _put(self, key: Key, known: Known) -> None:
        """The newest of its key, of its user and of anybody."""
        self._known[key] = known
        user, _, model, gpus = key
        self._news[model] += 1
        for whose in (user, ""):
            sizes = self._sizes.setdefault((whose, model), {})
            sizes.pop(gpus, None)
            sizes[gpus] = known

    def expected_of(self, job_id: JobId) -> Expected | None:
        """For the scheduler's estimates; ``None``: nobody knows anything."""
        job = self._state.jobs.get(job_id)
        if job is None:
            return None
        if (own := self._own.get(job_id)) is not None:
            return own.expected()
        model = job.models[0] if job.models else ""
        key = (job.user, job.name, model, self._gpus(job))
        known = self._like(job, model, key[-1])
        if known is None:
            return None
        found = known.learned.expected()
        # Lengths and pauses are those of what a job asks: others' say nothing of it.
        return found if key in self._known else replace(found, rollouts=None)

    def source(self, job: LiveJob) -> str:
        """Where what is believed of it comes from, for people."""
        if job.id in self._habits:
            return "its own steps"
        model = job.models[0] if job.models else ""
        return "a guess" if self._like(job, model, self._gpus(job)) is None else "earlier jobs"

    def view(self, job: LiveJob) -> dict[str, Any]:
        """What is believed of it, for programs and people."""
        model = job.models[0] if job.models else ""
        found = self.habits_of(job, model, self._gpus(job))
        own = self._own.get(job.id)
        return {
            "from": self.source(job),
            "steps": 0 if own is None else own.steps,
            "step_us": found.train.step_us,
            "train_us": found.train.phase_us,
            "function_us": found.train.function_us,
            "sample_us": found.rollout.phase_us,
            "switch_us": found.train.switch_us,
            "overlaps": found.train.overlaps,
            "slowed": None if own is None or not own.alone_us else own.taken_us / own.alone_us,
            "allowed": self._allowed.get(job.id) or None,
            "expected_end_us": self.expected_end_us(job, now_us()),
        }

    def expected_end_us(self, job: LiveJob, at_us: int) -> int | None:
        """By its time limit, and by how its like have run; ``None``: nobody knows."""
        ends = [self._limit_end_us(job, at_us), self._usual_end_us(job, at_us)]
        known = [end for end in ends if end is not None]
        return min(known, default=None)

    def _limit_end_us(self, job: LiveJob, at_us: int) -> int | None:
        if job.limit_end_us is not None:
            return job.limit_end_us
        if job.time_limit_us is None:
            return None
        begun_us = job.started_us if job.started_us is not None else at_us
        return begun_us + job.time_limit_us

    def _usual_end_us(self, job: LiveJob, at_us: int) -> int | None:
        model = job.models[0] if job.models else ""
        known = self._known.get((job.user, job.name, model, self._gpus(job)))
        if known is None or not known.run_us or job.started_us is None:
            return None
        own = self._own.get(job.id)
        if own is not None and known.run_steps > own.steps:
            return at_us + (known.run_steps - own.steps) * own.step_us
        end_us = job.started_us + known.run_us
        return end_us if end_us > at_us else None

    # -- told --------------------------------------------------------------------------------
    def stepped(self, job_id: JobId) -> None:
        """A step of it was measured."""
        learned = self._learner.learned(job_id) if self._learner is not None else None
        if learned is None:
            return
        self._own[job_id] = learned
        if learned.steps < OWN_STEPS:
            return
        self._habits[job_id] = learned.habits(self._guess.switch_us)
        if learned.steps == OWN_STEPS or learned.steps % EVERY == 0:
            job = self._state.jobs.get(job_id)
            if job is not None:
                self._write(job, learned, run=None)
                self._allowed[job_id] = self._left_of_promise(job, learned)
            self.on_news(job_id)

    def ended(self, job: LiveJob, *, well: bool, at_us: int) -> None:
        """It is over; while its deployments are known."""
        learned = self._own.pop(job.id, None)
        self._habits.pop(job.id, None)
        self._allowed.pop(job.id, None)
        if learned is not None and learned.steps >= OWN_STEPS:
            whole = well and job.started_us is not None
            self._write(job, learned, run=at_us - (job.started_us or at_us) if whole else None)

    def _left_of_promise(self, job: LiveJob, learned: Learned) -> float:
        """One of which nobody knows how long it runs is taken to have half of it before it."""
        if self._placer is None or not learned.alone_us:
            return 0.0
        model = job.models[0] if job.models else ""
        known = self._known.get((job.user, job.name, model, self._gpus(job)))
        steps = known.run_steps - learned.steps if known is not None else 0
        found = allowance(
            self._placer.promise(job),
            done_us=learned.alone_us,
            taken_us=learned.taken_us,
            left_us=max(0, steps) * learned.step_us or learned.alone_us,
        )
        return round(found, 3)

    def _gpus(self, job: LiveJob) -> int:
        home = job.homes.get(Pool.TRAIN)
        held = self._placer.wpgs.get(home) if self._placer and home is not None else None
        return held.wpg.gpus if held is not None else 1

    def _write(self, job: LiveJob, learned: Learned, *, run: int | None) -> None:
        if not job.models:
            return
        key = (job.user, job.name, job.models[0], self._gpus(job))
        before = self._known.get(key)
        known = Known(learned=learned) if before is None else replace(before, learned=learned)
        if run is not None:
            known = replace(known, run_steps=learned.steps, run_us=run)
        self._put(key, known)
        values: dict[str, Any] = {
            "partition": self._partition,
            **dict(zip(("user", "name", "model", "gpus"), key, strict=True)),
            "learned": msgspec.to_builtins(learned),
            "run_steps": known.run_steps,
            "run_us": known.run_us,
            "now_us": now_us(),
        }
        self._writer.add(_save, values, lazy=True)


def _save(session: Any, values: Mapping[str, Any]) -> None:
    profiles.save(session, **values)

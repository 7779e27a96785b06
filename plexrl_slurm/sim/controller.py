"""What a job's script does: sample, reward, train, and again; synchronous or one step ahead."""

from collections.abc import Callable
from typing import Any, Protocol

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import Call, FunctionKind
from plexrl_slurm.sim.job import SimJob, Step


class Service(Protocol):
    """What a controller needs of the world."""

    now_us: int

    def at(self, at_us: int, action: Callable[..., None], *args: Any) -> None:
        """Do something later."""

    def call(self, job: JobId, kind: FunctionKind, seq: int, length_us: int) -> None:
        """Ask for a function."""

    def stepped(self, job: SimJob, steps: int) -> None:
        """So many steps are taken."""

    def ended(self, job: SimJob) -> None:
        """Nothing more is wanted."""


class Controller:
    """One job's progress. The rollout of a step needs the weights of the step before it, or, a
    step ahead, of the one before that."""

    def __init__(self, job: SimJob, service: Service) -> None:
        self._job, self._service = job, service
        self._seq = self._sample_seq = 0
        #: Rollouts begun, ended and rewarded; steps trained.
        self._begun = self._sampled = self._rewarded = self._trained = 0
        self._steps: dict[int, Step] = {}
        #: Of the rollout that is under way: what it samples after the tools that it waits for.
        self._parts: list[int] = []
        #: Of the step that trains: its functions that are left. ``None``: none trains.
        self._left: list[tuple[FunctionKind, int]] | None = None

    @property
    def steps(self) -> int:
        """Steps that it has taken."""
        return self._trained

    def begin(self) -> None:
        """Create the deployment, as soon as its script has come so far."""
        at_us = self._service.now_us + self._job.begin_us
        self._service.at(at_us, self._ask, FunctionKind.CREATE, self._job.create_us)

    def finished(self, call: Call) -> None:
        """A call was answered."""
        if call.kind is FunctionKind.CREATE:
            self._sample()
        elif call.kind is FunctionKind.SAMPLE and self._parts:
            stall_us = self._steps[self._sampled].stall_us
            self._service.at(self._service.now_us + stall_us, self._sample_on)
        elif call.kind is FunctionKind.SAMPLE:
            reward_us = self._steps[self._sampled].reward_us
            self._sampled += 1
            self._service.at(self._service.now_us + reward_us, self._reward)
            self._sample()
        elif self._left:
            self._service.at(self._service.now_us + self._job.gap_us, self._next)
        else:
            self._step()

    def _sample(self) -> None:
        number = self._begun
        ahead = 1 if self._job.trace.overlaps else 0
        if (
            number < self._job.trace.length
            and number == self._sampled
            and number - ahead <= self._trained
        ):
            self._begun += 1
            step = self._steps[number] = self._job.step(number)
            self._parts = list(step.sampling_us)
            self._sample_on()

    def _sample_on(self) -> None:
        """A call for all of a rollout up to where its sequences wait for their tools."""
        self._sample_seq += 1
        length_us = self._parts.pop(0)
        self._service.call(self._job.number, FunctionKind.SAMPLE, self._sample_seq - 1, length_us)

    def _reward(self) -> None:
        self._rewarded += 1
        self._train()

    def _train(self) -> None:
        if self._left is None and self._trained < self._rewarded:
            self._left = list(self._steps.pop(self._trained).train)
            self._next()

    def _next(self) -> None:
        assert self._left
        kind, length_us = self._left.pop(0)
        self._ask(kind, length_us)

    def _step(self) -> None:
        self._left = None
        self._trained += 1
        self._service.stepped(self._job, self._trained)
        if self._trained == self._job.trace.length:
            self._service.ended(self._job)
            return
        self._train()
        self._sample()

    def _ask(self, kind: FunctionKind, length_us: int) -> None:
        self._seq += 1
        self._service.call(self._job.number, kind, self._seq - 1, length_us)

"""What the past says about durations, gaps, phases and steps. Integer arithmetic only."""

from typing import Final

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import Expected, FunctionKind, Pool, Rollouts
from plexrl_slurm.core.stalls import Stalls
from plexrl_slurm.core.tails import Lengths

#: Duration of a function of which nothing is known.
PRIOR_FUNCTION_US: Final = 1_000_000
#: A job's step time alone, before its first step has ended.
PRIOR_STEP_US: Final = 20_000_000
#: No step is believed to be shorter.
LEAST_STEP_US: Final = 1_000


def ewma(old: int | None, new: int) -> int:
    """Exponentially weighted mean with weight 0.3 for the newest."""
    return new if old is None else old + (new - old) * 3 // 10


class Estimates:
    """Means per job; forgotten with the job."""

    def __init__(self) -> None:
        self._functions: dict[JobId, dict[FunctionKind, int]] = {}
        self._gaps: dict[JobId, dict[FunctionKind, int]] = {}
        self._phases: dict[JobId, dict[Pool, int]] = {}
        self._steps: dict[JobId, int] = {}
        #: When the last step ended, and how long the job has waited for GPUs since.
        self._since: dict[JobId, tuple[int, int]] = {}
        #: Changes with whatever is learned of a job.
        self.versions: dict[JobId, int] = {}
        #: Pauses of rollouts.
        self.stalls = Stalls()
        #: Of sample calls.
        self.lengths = Lengths()

    def function_us(self, job: JobId, kind: FunctionKind) -> int:
        """Expected duration of one part of a function."""
        means = self._functions.get(job)
        return PRIOR_FUNCTION_US if means is None else means.get(kind, PRIOR_FUNCTION_US)

    def gap_us(self, job: JobId, previous: FunctionKind) -> int | None:
        """Expected time from the end of ``previous`` to the arrival of the next call."""
        if previous is FunctionKind.SAMPLE:
            return self.stalls.gap_us(job)
        means = self._gaps.get(job)
        return None if means is None else means.get(previous)

    def phase_us(self, job: JobId, pool: Pool) -> int | None:
        """Expected busy time of one phase."""
        means = self._phases.get(job)
        return None if means is None else means.get(pool)

    def left_us(self, job: JobId, kind: FunctionKind, pool: Pool, served_us: int) -> int:
        """Expected rest of a phase of which so much is served: at least one function."""
        functions, phases = self._functions.get(job), self._phases.get(job)
        least_us = (
            PRIOR_FUNCTION_US if functions is None else functions.get(kind, PRIOR_FUNCTION_US)
        )
        if phases is None or (total_us := phases.get(pool)) is None:
            return least_us
        left_us = total_us - served_us
        return left_us if left_us > least_us else least_us

    def step_us(self, job: JobId) -> int:
        """The job's step time if it never had to wait."""
        return self._steps.get(job, PRIOR_STEP_US)

    def expect(self, job: JobId, expected: Expected) -> None:
        """What is believed of a job; what it does itself counts more from its first step on."""
        self.learned(job)
        functions = self._functions.setdefault(job, {})
        for kind, length_us in expected.functions.items():
            functions.setdefault(kind, length_us)
        phases = self._phases.setdefault(job, {})
        for pool, busy_us in ((Pool.TRAIN, expected.train_us), (Pool.ROLLOUT, expected.sample_us)):
            if busy_us:
                phases.setdefault(pool, busy_us)
        self._steps.setdefault(job, max(LEAST_STEP_US, expected.step_us))
        if (found := expected.rollouts) is not None:
            self.lengths.expect(job, found.lengths_us)
            self.stalls.expect(job, found.gaps_us, found.stalls_us)

    def rollouts(self, job: JobId) -> Rollouts:
        """What its rollouts have been like, for :meth:`expect` of another time."""
        gaps_us, stalls_us = self.stalls.known(job)
        lengths_us = self.lengths.known(job)
        return Rollouts(lengths_us=lengths_us, gaps_us=gaps_us, stalls_us=stalls_us)

    def saw_function(self, job: JobId, kind: FunctionKind, duration_us: int) -> None:
        self.learned(job)
        means = self._functions.setdefault(job, {})
        means[kind] = ewma(means.get(kind), duration_us)

    def saw_gap(
        self, job: JobId, previous: FunctionKind, gap_us: int, *, stall: bool = False
    ) -> None:
        """``stall``: it was long, and of a rollout that then went on."""
        if previous is FunctionKind.SAMPLE:
            self.stalls.saw(job, gap_us, stall=stall)
            return
        means = self._gaps.setdefault(job, {})
        means[previous] = ewma(means.get(previous), gap_us)

    def saw_phase(self, job: JobId, pool: Pool, busy_us: int) -> None:
        self.learned(job)
        means = self._phases.setdefault(job, {})
        means[pool] = ewma(means.get(pool), busy_us)

    def saw_wait(self, job: JobId, waited_us: int) -> None:
        """The job waited for GPUs; its step would have been so much shorter alone."""
        if job in self._since:
            start_us, total_us = self._since[job]
            self._since[job] = (start_us, total_us + waited_us)

    def saw_step(self, job: JobId, at_us: int) -> None:
        """An optimizer step ended."""
        if job in self._since:
            self.learned(job)
            start_us, waited_us = self._since[job]
            alone_us = max(LEAST_STEP_US, at_us - start_us - waited_us)
            self._steps[job] = ewma(self._steps.get(job), alone_us)
        self._since[job] = (at_us, 0)

    def forget(self, job: JobId) -> None:
        """The job is over."""
        self._functions.pop(job, None)
        self._gaps.pop(job, None)
        self._phases.pop(job, None)
        self._steps.pop(job, None)
        self._since.pop(job, None)
        self.versions.pop(job, None)
        self.stalls.forget(job)
        self.lengths.forget(job)

    def learned(self, job: JobId) -> None:
        """What was derived for it before may be wrong now."""
        self.versions[job] = self.versions.get(job, 0) + 1

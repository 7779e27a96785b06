"""What the past says about durations, gaps, phases and steps. Integer arithmetic only."""

from typing import Final

from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import Expected, FunctionKind, Pool

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

    def function_us(self, job: JobId, kind: FunctionKind) -> int:
        """Expected duration of one part of a function."""
        return self._functions.get(job, {}).get(kind, PRIOR_FUNCTION_US)

    def gap_us(self, job: JobId, previous: FunctionKind) -> int | None:
        """Expected time from the end of ``previous`` to the arrival of the next call."""
        return self._gaps.get(job, {}).get(previous)

    def phase_us(self, job: JobId, pool: Pool) -> int | None:
        """Expected busy time of one phase."""
        return self._phases.get(job, {}).get(pool)

    def step_us(self, job: JobId) -> int:
        """The job's step time if it never had to wait."""
        return self._steps.get(job, PRIOR_STEP_US)

    def expect(self, job: JobId, expected: Expected) -> None:
        """What is believed of a job; what it does itself counts more from its first step on."""
        functions = self._functions.setdefault(job, {})
        for kind, length_us in expected.functions.items():
            functions.setdefault(kind, length_us)
        phases = self._phases.setdefault(job, {})
        for pool, busy_us in ((Pool.TRAIN, expected.train_us), (Pool.ROLLOUT, expected.sample_us)):
            if busy_us:
                phases.setdefault(pool, busy_us)
        self._steps.setdefault(job, max(LEAST_STEP_US, expected.step_us))

    def saw_function(self, job: JobId, kind: FunctionKind, duration_us: int) -> None:
        means = self._functions.setdefault(job, {})
        means[kind] = ewma(means.get(kind), duration_us)

    def saw_gap(self, job: JobId, previous: FunctionKind, gap_us: int) -> None:
        means = self._gaps.setdefault(job, {})
        means[previous] = ewma(means.get(previous), gap_us)

    def saw_phase(self, job: JobId, pool: Pool, busy_us: int) -> None:
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

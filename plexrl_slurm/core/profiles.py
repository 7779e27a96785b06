"""How a job uses each pool: what it asks of a training WPG, and of a rollout WPG."""

from dataclasses import dataclass, replace

from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.predict import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """A job's profile in each pool."""

    train: Profile
    rollout: Profile

    def of(self, pool: Pool) -> Profile:
        """Of one of them."""
        return self.train if pool is Pool.TRAIN else self.rollout

    def weighing(self, weight: int) -> "Habits":
        """The same of a job of that weight."""
        if self.train.weight == self.rollout.weight == weight:
            return self
        return Habits(
            train=replace(self.train, weight=weight), rollout=replace(self.rollout, weight=weight)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guess:
    """What a job is believed to be like of which nobody knows anything."""

    step_us: int = 60_000_000
    #: Share of a step in which it occupies a training WPG, and a rollout WPG.
    train_share: float = 0.08
    sample_share: float = 0.08
    #: To take one state out and another in.
    switch_us: int = 500_000

    def habits(self) -> Habits:
        """As profiles: it does one after the other."""
        return Habits(train=self._of(self.train_share), rollout=self._of(self.sample_share))

    def _of(self, share: float) -> Profile:
        phase_us = max(1, int(self.step_us * share))
        return Profile(
            step_us=self.step_us,
            phase_us=phase_us,
            function_us=phase_us,
            switch_us=self.switch_us,
            overlaps=False,
            spread_us=phase_us // 4,
        )

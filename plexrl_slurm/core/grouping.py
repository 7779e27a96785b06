"""Which jobs share a training WPG: placement policies over groups of one shape. Pure.

A *group* is a training WPG and the jobs that live on it; the pool's GPUs that are in no group
are free. Every job also takes rollout GPUs of its own. All or nothing. A job asks for a shape,
and may say which other shapes would do: then it joins a group of one of those rather than have
a WPG of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.predict import Profile, foreseen

#: Share of a node's memory that images may take.
MEMORY_SHARE: Final = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A job as its group sees it."""

    job: JobId
    #: Of the training WPG it needs, and of its own rollout WPG.
    train_gpus: int
    rollout_gpus: int
    #: Its training image.
    image_bytes: int
    profile: Profile
    #: The slowdown that it was promised, against itself alone on ``train_gpus``.
    max_slowdown: float
    #: Other sizes of a training WPG that would do, and how long its phase lasts there, as a
    #: part of its phase on ``train_gpus``.
    shapes: tuple[tuple[int, float], ...] = ()
    #: What it may be slowed down from now on so that the promise is kept at its end; 0: as
    #: promised.
    allowed: float = 0.0

    def on(self, gpus: int) -> Profile | None:
        """Its profile on a WPG of that size; ``None``: that would not do."""
        if gpus == self.train_gpus:
            return self.profile
        factor = self.factor(gpus)
        return stretched(self.profile, factor, self.train_gpus / gpus) if factor else None

    def factor(self, gpus: int) -> float:
        """How long its phase lasts there, as a part of that on ``train_gpus``; 0: not at all."""
        if gpus == self.train_gpus:
            return 1.0
        return next((factor for size, factor in self.shapes if size == gpus), 0.0)


@dataclass(slots=True, eq=False, kw_only=True)
class Group:
    """A training WPG and who lives there."""

    number: int
    gpus: int
    #: Bytes of images that its nodes can keep.
    host_bytes: int
    members: dict[JobId, Member] = field(default_factory=dict)
    #: Share of its time that they need, where that is known; whoever changes them forgets it.
    load: float | None = None


def allowance(
    promise: float, *, done_us: float, taken_us: float, left_us: float,
    least: float = 0.3, most: float = 1.5,
) -> float:  # fmt: skip
    """What is left of a promised slowdown: after work that takes ``done_us`` alone took
    ``taken_us``, and with work of ``left_us`` to do. Between parts of the promised loss, because
    what is left may end sooner than said, and because a promise that is broken is kept as well as
    can be.
    """
    promised = promise - 1
    lost_us = taken_us - done_us
    loss = ((done_us + left_us) * promised - lost_us) / max(1.0, left_us)
    return 1 + min(most * promised, max(least * promised, loss))


def stretched(profile: Profile, phase: float, switch: float) -> Profile:
    """``profile`` with the phase, and the switch, so many times as long."""
    phase_us, switch_us = int(profile.phase_us * phase), int(profile.switch_us * switch)
    away_us = profile.slack_us + profile.phase_us if profile.overlaps else profile.step_us
    if profile.overlaps:
        # What is not covered by the rollout makes the step.
        step_us = max(phase_us, profile.step_us if profile.slack_us else away_us)
    else:
        step_us = profile.step_us - profile.phase_us + phase_us
    return replace(
        profile,
        step_us=max(1, step_us),
        phase_us=phase_us,
        function_us=int(profile.function_us * phase),
        switch_us=switch_us,
        slack_us=max(0, away_us - phase_us) if profile.overlaps else 0,
    )


@dataclass(slots=True, kw_only=True)
class Pools:
    """The partition as placement sees it."""

    train_free: int
    rollout_free: int
    #: GPUs and memory of one node, for the memory of a new group.
    node_gpus: int
    node_bytes: int
    #: Disks of one node for images beyond its memory.
    nvme_bytes: int = 0
    groups: dict[int, Group] = field(default_factory=dict)

    def host_bytes(self, gpus: int) -> int:
        """What images may take on the nodes of a WPG of so many GPUs."""
        node_bytes = MEMORY_SHARE * self.node_bytes + self.nvme_bytes
        return int(node_bytes * gpus / self.node_gpus)


class Why(StrEnum):
    """What stands in the way of one job."""

    TRAIN_GPUS = "train_gpus"
    ROLLOUT_GPUS = "rollout_gpus"
    #: Every group that has room would break somebody's promise, or is full.
    PROMISE = "promise"
    HOST_MEMORY = "host_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a job goes."""

    #: ``None``: a new group.
    group: int | None


class Placement(StrEnum):
    """Named after the paper's; ``fit`` keeps promises."""

    ISOLATED = "isolated"
    PACK = "pack"
    SPREAD = "spread"
    FIT = "fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How groups are filled."""

    placement: Placement = Placement.FIT
    #: Most jobs of one group.
    most: int = 6
    #: Most load of one group.
    full: float = 0.95
    #: Share of a promise that a prediction may use; below 1 it leaves room for error.
    margin: float = 0.9


def find_placement(name: str) -> Placement:
    """The placement of that name. Raises ``BadInput``."""
    try:
        return Placement(name)
    except ValueError:
        known = ", ".join(Placement)
        raise BadInput(f"there is no placement {name!r}: choose one of {known}") from None


def place(wanted: Member, pools: Pools, rules: Rules) -> Home | Why:
    """A home for one job, or what stands in its way first."""
    if wanted.rollout_gpus > pools.rollout_free:
        return Why.ROLLOUT_GPUS
    fresh = wanted.train_gpus <= pools.train_free
    if wanted.image_bytes > pools.host_bytes(wanted.train_gpus):
        return Why.HOST_MEMORY
    if rules.placement is Placement.ISOLATED:
        return Home(group=None) if fresh else Why.TRAIN_GPUS
    if rules.placement is Placement.SPREAD and fresh:
        return Home(group=None)
    # Its own shape first. Pack and fit fill the densest; spread the emptiest.
    sign = 1 if rules.placement is Placement.SPREAD else -1
    ranked: list[tuple[bool, float, int, int, Group]] = []
    refused, last = Why.TRAIN_GPUS, -1
    for position, group in enumerate(pools.groups.values()):
        own = group.gpus == wanted.train_gpus
        why = _no_room(wanted, group, rules)
        if why is None:
            ranked.append((not own, sign * load_of(group), group.number, position, group))
        elif own:
            refused, last = why, position
    ranked.sort(key=lambda each: each[:3])
    for other, load, _, position, group in ranked:
        if rules.placement is not Placement.FIT or _bears(wanted, group, rules, sign * load):
            return Home(group=group.number)
        if not other and position > last:
            refused, last = Why.PROMISE, position
    return Home(group=None) if fresh else refused


def load_of(group: Group) -> float:
    """Share of its time that its members need."""
    if group.load is not None:
        return group.load
    found = 0.0
    for member in group.members.values():
        found += (member.on(group.gpus) or member.profile).load
    return found


def refusal(wanted: Member, group: Group, rules: Rules) -> Why | None:
    """Why ``wanted`` cannot join; cheap reasons first."""
    why = _no_room(wanted, group, rules)
    if why is not None or rules.placement is not Placement.FIT:
        return why
    return None if _bears(wanted, group, rules, load_of(group)) else Why.PROMISE


def _no_room(wanted: Member, group: Group, rules: Rules) -> Why | None:
    if not wanted.factor(group.gpus):
        return Why.TRAIN_GPUS
    members = group.members
    if len(members) >= rules.most:
        return Why.PROMISE
    images = sum(member.image_bytes for member in members.values()) + wanted.image_bytes
    return Why.HOST_MEMORY if images > group.host_bytes else None


def _bears(wanted: Member, group: Group, rules: Rules, load: float) -> bool:
    """Whether everybody's promise is kept if it joins a group of that load."""
    profile = wanted.on(group.gpus)
    if profile is None or load + profile.load > rules.full:
        return False
    return kept([*group.members.values(), wanted], rules.margin, group.gpus)


def kept(members: Sequence[Member], margin: float, gpus: int = 0) -> bool:
    """Whether every promise is predicted to be kept, on a WPG of ``gpus``; 0: all of one shape."""
    profiles = [(member.on(gpus) if gpus else None) or member.profile for member in members]
    found = foreseen(tuple(profiles))
    return all(
        slow * profile.step_us / max(1, member.profile.step_us) - 1
        <= ((member.allowed or member.max_slowdown) - 1) * margin
        for slow, profile, member in zip(found, profiles, members, strict=True)
    )

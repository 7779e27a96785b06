"""Jobs come, find homes and go, under every placement: capacity, promises and the queue's order."""

from collections import Counter
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plexrl_slurm.core.backlog import Backlog, Waiting
from plexrl_slurm.core.grouping import Group, Home, Member, Placement, Pools, Rules, Why, place
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.predict import slowdowns
from tests.core.effort import effort, tried
from tests.core.test_grouping import GIB, S, member, profile

TRAIN, ROLLOUT, MOST = 64, 48, 3
#: How often somebody joined others, by placement; and what such groups were like.
SEEN: Counter[str] = Counter()
HOUR_US = 3600 * S


class Partition(RuleBasedStateMachine):
    """A partition as placement sees it."""

    # Those that share are drawn more often.
    @initialize(
        placement=st.sampled_from([*Placement, Placement.FIT, Placement.FIT, Placement.PACK]),
        backfill=st.booleans(),
    )
    def begin(self, placement: Placement, backfill: bool) -> None:
        self.how = Rules(placement=placement, most=MOST)
        self.pools = Pools(
            train_free=TRAIN, rollout_free=ROLLOUT, node_gpus=8, node_bytes=400 * GIB
        )
        self.backlog = Backlog(backfill=backfill, guard_us=72 * HOUR_US, depth=3)
        self.homes: dict[JobId, int] = {}
        self.now = self.jobs = self.groups = 0

    @rule(
        gpus=st.sampled_from([8, 16, 16, 16, 32]), rollout=st.sampled_from([4, 4, 8, 16]),
        gib=st.sampled_from([1, 30, 100, 200, 400]), phase=st.sampled_from([1, 10, 20, 30, 50]),
        step=st.integers(60, 200), overlaps=st.booleans(),
        promise=st.sampled_from([1.0, 1.02, 1.05, 1.1, 1.1, 2.0]),
        left=st.sampled_from([0.0, 0.0, 0.3, 1.5]), wider=st.sampled_from([0.0, 0.6]),
        priority=st.sampled_from([1, 1, 5]), later_us=st.integers(0, 100 * HOUR_US),
    )  # fmt: skip
    def arrive(
        self, gpus: int, rollout: int, gib: int, phase: int, step: int, overlaps: bool,
        promise: float, left: float, wider: float, priority: int, later_us: int,
    ) -> None:  # fmt: skip
        self.now += later_us
        self.jobs += 1
        weighed = replace(profile(phase, step, overlaps=overlaps), weight=priority)
        new = replace(
            member(self.jobs, gpus=gpus, rollout=rollout, gib=gib, promise=promise, of=weighed),
            # What is left of the promise, and whether twice the GPUs would do as well.
            allowed=1 + left * (promise - 1) if left else 0.0,
            shapes=((2 * gpus, wider),) if wider else (),
        )
        self.backlog.arrive(Waiting(member=new, priority=priority, since_us=self.now))

    @precondition(lambda self: self.homes)
    @rule(data=st.data(), later_us=st.integers(0, HOUR_US))
    def end(self, data: st.DataObject, later_us: int) -> None:
        self.now += later_us
        job = data.draw(st.sampled_from(sorted(self.homes)))
        group = self.pools.groups[self.homes.pop(job)]
        gone = group.members.pop(job)
        self.pools.rollout_free += gone.rollout_gpus
        if not group.members:
            del self.pools.groups[group.number]
            self.pools.train_free += group.gpus

    @rule()
    def look(self) -> None:
        """Passes until nobody finds a home; then whoever is first has no place."""
        left = -1
        while left != len(self.backlog.jobs):
            left = len(self.backlog.jobs)
            self.backlog.run(self.now, self.found, self.take)
        waiting = sorted(
            self.backlog.jobs.values(), key=lambda w: (-w.priority, w.since_us, w.member.job)
        )
        if waiting and all(self.now - w.since_us < self.backlog.guard_us for w in waiting):
            first = waiting[0].member
            assert isinstance(self.found(first), Why), "a place is free, and its job waits"
            assert first.job in self.backlog.why, "it waits, and nobody says why"

    def found(self, wanted: Member) -> Home | Why:
        return place(wanted, self.pools, self.how)

    def take(self, new: Member, home: Home) -> None:
        """Whole or nothing: both pools have what it takes, and it is in neither twice."""
        assert new.job not in self.homes
        if home.group is None:
            self.groups += 1
            group = Group(number=self.groups, gpus=new.train_gpus,
                          host_bytes=self.pools.host_bytes(new.train_gpus))  # fmt: skip
            self.pools.groups[group.number] = group
            self.pools.train_free -= new.train_gpus
        else:
            assert self.how.placement is not Placement.ISOLATED
            group = self.pools.groups[home.group]
        assert new.factor(group.gpus) > 0
        group.members[new.job] = new
        if home.group is not None:
            self.joined(group, new)
        self.pools.rollout_free -= new.rollout_gpus
        self.homes[new.job] = group.number

    def joined(self, group: Group, new: Member) -> None:
        """It lives with others: with ``fit``, what all are predicted to lose was promised."""
        SEEN[self.how.placement] += 1
        SEEN["wider"] += group.gpus > new.train_gpus
        if self.how.placement is Placement.FIT:
            mine = list(group.members.values())
            there = [each.on(group.gpus) for each in mine]
            slow = slowdowns([profile for profile in there if profile is not None])
            for ratio, profile, each in zip(slow, there, mine, strict=True):
                assert profile is not None
                lost = ratio * profile.step_us / each.profile.step_us - 1
                may = (each.allowed or each.max_slowdown) - 1
                assert lost <= may * self.how.margin + 1e-9, "a broken promise"
                SEEN["close"] += len(mine) > 1 and may > 0 and lost > may / 2

    @invariant()
    def capacity_is_kept(self) -> None:
        if not hasattr(self, "pools"):
            return
        groups = list(self.pools.groups.values())
        members = [each for group in groups for each in group.members.values()]
        assert self.pools.train_free >= 0 <= self.pools.rollout_free
        assert self.pools.train_free + sum(group.gpus for group in groups) == TRAIN
        assert self.pools.rollout_free + sum(each.rollout_gpus for each in members) == ROLLOUT
        for group in groups:
            assert 1 <= len(group.members) <= MOST
            assert sum(each.image_bytes for each in group.members.values()) <= group.host_bytes
            SEEN["full"] += (
                sum(each.image_bytes for each in group.members.values()) > group.host_bytes * 0.7
                and len(group.members) > 1
            )

    def teardown(self) -> None:
        tried("placement machine")


TestPartition = Partition.TestCase
TestPartition.settings = effort(400)


def test_the_examples_have_shared_and_filled_groups() -> None:
    if not SEEN:
        TestPartition().runTest()
    # What is drawn depends on the modules that are loaded: some hundreds of each are usual.
    assert SEEN[Placement.FIT] > 1 < SEEN["full"], SEEN

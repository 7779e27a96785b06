"""Groups: who may share, who leaves, who waits."""

from dataclasses import replace

import pytest

from plexrl_slurm.core.backlog import HOUR_US, Backlog, Waiting
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.grouping import (
    Group,
    Home,
    Member,
    Placement,
    Pools,
    Rules,
    Why,
    allowance,
    find_placement,
    kept,
    place,
)
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.predict import Profile, slowdowns
from plexrl_slurm.core.regroup import merge, relieve

S, GIB = 1_000_000, 2**30


def profile(phase: int = 20, step: int = 100, *, overlaps: bool = False) -> Profile:
    return Profile(
        step_us=step * S, phase_us=phase * S, function_us=5 * S, switch_us=S // 10,
        overlaps=overlaps, slack_us=(step - phase) * S if overlaps else 0, spread_us=5 * S,
    )  # fmt: skip


def member(
    job: int, *, gpus: int = 16, rollout: int = 8, gib: int = 100, promise: float = 1.1,
    of: Profile | None = None,
) -> Member:  # fmt: skip
    return Member(
        job=JobId(job), train_gpus=gpus, rollout_gpus=rollout, image_bytes=gib * GIB,
        profile=of or profile(overlaps=True), max_slowdown=promise,
    )  # fmt: skip


def pools(*groups: list[Member], train: int = 0, rollout: int = 64) -> Pools:
    found = {
        number: Group(
            number=number, gpus=jobs[0].train_gpus, host_bytes=1000 * GIB,
            members={each.job: each for each in jobs},
        )
        for number, jobs in enumerate(groups, 1)
    }  # fmt: skip
    return Pools(
        train_free=train, rollout_free=rollout, node_gpus=8, node_bytes=1500 * GIB, groups=found
    )


FIT, PACK, SPREAD, ALONE = (
    Rules(placement=each)
    for each in (Placement.FIT, Placement.PACK, Placement.SPREAD, Placement.ISOLATED)
)


class TestPrediction:
    def test_alone_nobody_is_slower(self) -> None:
        assert slowdowns([]) == []
        assert slowdowns([profile()]) == [1.0]

    def test_a_job_with_slack_waits_for_nothing(self) -> None:
        found = slowdowns([profile(overlaps=True)] * 3)
        assert all(1.0 <= slow < 1.005 for slow in found)

    def test_a_synchronous_job_pays_half_of_the_others_phase(self) -> None:
        # Each is busy 20 % of the time, 10 s of 20 are left on average: 2 s of 100 and queueing.
        first, second = slowdowns([profile(), profile()])
        assert first == second
        assert 1.02 < first < 1.04

    def test_more_members_are_slower(self) -> None:
        found = [slowdowns([profile()] * count)[0] for count in range(1, 6)]
        assert found == sorted(found)
        assert found[0] < found[-1]

    def test_nobody_can_work_more_than_the_wpg_has_time(self) -> None:
        assert slowdowns([profile(60)] * 3)[0] > 1.8

    def test_one_with_slack_is_interrupted_for_a_synchronous_one(self) -> None:
        beside_slack = slowdowns([profile(), profile(30, 200, overlaps=True)])[0]
        beside_sync = slowdowns([profile(), profile(30, 200)])[0]
        assert beside_slack < beside_sync

    def test_a_long_phase_is_interrupted_by_short_ones_and_not_by_one_alike(self) -> None:
        long, alike, short = profile(400, 1500), profile(400, 1500), profile(32, 120)
        beside_alike, beside_short = (slowdowns([long, each]) for each in (alike, short))
        # The load is the same. A short one waits for a function of the long one only, which
        # waits for all those that come during its phase.
        assert beside_short[0] > beside_alike[0]
        assert beside_short[1] < 1 + 0.27 * 400 / 2 / 120  # the rest of the long phase

    def test_whoever_weighs_more_is_interrupted_less_and_interrupts_more(self) -> None:
        def pair(first: int, second: int) -> list[float]:
            return slowdowns([replace(profile(40), weight=each) for each in (first, second)])

        assert pair(3, 3) == pair(1, 1)
        light, heavy = pair(1, 20)
        assert heavy < pair(1, 1)[0] < light
        assert pair(20, 1) == [heavy, light]

    def test_a_promise_that_weights_break_is_not_given(self) -> None:
        mine = member(2, of=profile(40), promise=1.16)
        alike, heavy = (
            pools([member(1, of=replace(profile(40), weight=weight), promise=2.0)])
            for weight in (1, 20)
        )
        assert place(mine, alike, FIT) == Home(group=1)
        assert place(mine, heavy, FIT) is Why.PROMISE


class TestShapes:
    WIDER = ((32, 0.6),)

    def test_it_joins_a_larger_shape_rather_than_have_a_wpg_of_its_own(self) -> None:
        wide = pools([member(1, gpus=32)], train=16)
        assert place(member(2), wide, FIT) == Home(group=None)
        assert place(replace(member(2), shapes=self.WIDER), wide, FIT) == Home(group=1)
        assert place(replace(member(2), shapes=((24, 0.7),)), wide, FIT) == Home(group=None)

    def test_its_own_shape_comes_first_however_thin(self) -> None:
        both = pools([member(1, gpus=32), member(3, gpus=32)], [member(4)])
        assert place(replace(member(2), shapes=self.WIDER), both, FIT) == Home(group=2)

    def test_there_its_phase_is_shorter_and_its_slack_longer(self) -> None:
        sync = replace(member(1, of=profile()), shapes=self.WIDER).on(32)
        ahead = replace(member(1), shapes=self.WIDER).on(32)
        assert sync is not None
        assert ahead is not None
        assert (sync.phase_us, sync.step_us, sync.switch_us) == (12 * S, 92 * S, S // 20)
        assert (ahead.phase_us, ahead.step_us, ahead.slack_us) == (12 * S, 100 * S, 88 * S)

    def test_an_overlapping_step_that_training_makes_gets_shorter(self) -> None:
        bound = Profile(
            step_us=100 * S, phase_us=100 * S, function_us=S, switch_us=S, overlaps=True
        )
        wider = replace(member(1, of=bound), shapes=self.WIDER).on(32)
        assert wider is not None
        assert wider.step_us == 100 * S  # how far the rollout would let it is not known
        assert wider.phase_us == 60 * S

    def test_what_it_gains_there_may_be_used_up_by_waiting(self) -> None:
        others = [replace(member(n, of=profile(), promise=1.04), shapes=self.WIDER)
                  for n in (1, 2, 3)]  # fmt: skip
        assert not kept(others, 1.0)
        assert kept(others, 1.0, 32)

    def test_a_thin_group_is_merged_into_a_larger_shape(self) -> None:
        thin = replace(member(3), shapes=self.WIDER)
        found = merge(pools([member(1, gpus=32)], [thin]), FIT, lambda job: True)
        assert found is not None
        assert (found.group, found.homes) == (2, ((3, 1),))


class TestAllowance:
    def of(self, *, taken: int, done: int = 500, left: int = 500) -> float:
        return allowance(1.1, done_us=done * S, taken_us=taken * S, left_us=left * S)

    def test_who_is_as_late_as_promised_may_go_on_so(self) -> None:
        assert self.of(taken=550) == pytest.approx(1.1)

    def test_who_has_lost_less_may_lose_more_and_the_promise_holds(self) -> None:
        assert self.of(taken=530) == pytest.approx(1.14)
        assert 530 + 500 * self.of(taken=530) == pytest.approx(1.1 * 1000)

    def test_who_has_lost_more_may_lose_less_and_the_promise_holds(self) -> None:
        assert self.of(taken=570) == pytest.approx(1.06)

    def test_it_stays_between_parts_of_the_promise(self) -> None:
        assert self.of(taken=500) == pytest.approx(1.15)
        assert self.of(taken=900) == pytest.approx(1.03)
        assert self.of(taken=500, left=0) == pytest.approx(1.15)

    def test_nobody_joins_who_would_break_what_is_left(self) -> None:
        first = member(1, of=profile())
        late = replace(first, allowed=1.01)
        assert place(member(2, of=profile()), pools([first]), FIT) == Home(group=1)
        assert place(member(2, of=profile()), pools([late]), FIT) is Why.PROMISE


class TestPlace:
    def test_isolated_never_shares(self) -> None:
        assert place(member(2), pools([member(1)], train=16), ALONE) == Home(group=None)
        assert place(member(2), pools([member(1)]), ALONE) is Why.TRAIN_GPUS

    def test_spread_takes_a_new_wpg_then_the_emptiest(self) -> None:
        two = pools([member(1), member(2)], [member(3)], train=16)
        assert place(member(9), two, SPREAD) == Home(group=None)
        two.train_free = 0
        assert place(member(9), two, SPREAD) == Home(group=2)

    def test_pack_takes_the_densest(self) -> None:
        two = pools([member(3)], [member(1), member(2)], train=16)
        assert place(member(9), two, PACK) == Home(group=2)

    def test_pack_is_full_at_some_members(self) -> None:
        full = pools([member(number) for number in range(1, 7)], train=16)
        assert place(member(9), full, PACK) == Home(group=None)
        full.train_free = 0
        assert place(member(9), full, PACK) is Why.PROMISE

    def test_fit_takes_nobody_whose_promise_it_would_break(self) -> None:
        strict = member(1, of=profile(), promise=1.01)
        assert place(member(2, of=profile()), pools([strict]), FIT) is Why.PROMISE
        assert place(member(2, of=profile()), pools([strict], train=16), FIT) == Home(group=None)
        lax = member(1, of=profile(), promise=1.2)
        assert place(member(2, of=profile(), promise=1.2), pools([lax]), FIT) == Home(group=1)

    def test_shapes_are_not_mixed(self) -> None:
        assert place(member(2, gpus=8), pools([member(1)]), FIT) is Why.TRAIN_GPUS

    def test_memory_is_counted(self) -> None:
        assert place(member(2, gib=950), pools([member(1)]), FIT) is Why.HOST_MEMORY
        assert place(member(2, gib=2600), pools(train=16), FIT) is Why.HOST_MEMORY

    def test_rollout_gpus_are_needed_too(self) -> None:
        assert place(member(2), pools([member(1)], rollout=4), FIT) is Why.ROLLOUT_GPUS

    def test_an_unknown_placement_is_refused_with_the_known_ones(self) -> None:
        with pytest.raises(BadInput, match="choose one of isolated, pack, spread, fit"):
            find_placement("best")


class TestRegroup:
    def test_the_thinnest_group_is_emptied_into_another(self) -> None:
        found = merge(pools([member(1), member(2)], [member(3)]), FIT, lambda job: True)
        assert found is not None
        assert (found.group, found.homes, found.gives_back) == (2, ((3, 1),), True)

    def test_nobody_is_moved_that_may_not(self) -> None:
        two = pools([member(1)], [member(3)])
        assert merge(two, FIT, lambda job: False) is None

    def test_a_merge_breaks_no_promise(self) -> None:
        two = pools(*([member(n, of=profile(), promise=1.01)] for n in (1, 2)))
        assert merge(two, FIT, lambda job: True) is None

    def test_a_merge_changes_no_group(self) -> None:
        two = pools([member(1), member(2)], [member(3)])
        merge(two, FIT, lambda job: True)
        assert [sorted(group.members) for group in two.groups.values()] == [[1, 2], [3]]

    def test_whoever_breaks_a_promise_leaves(self) -> None:
        strict = member(1, of=profile(), promise=1.01)
        heavy = member(2, of=profile(30), promise=1.5)
        here = pools([strict, heavy], train=16)
        found = relieve(here.groups[1], here, FIT, lambda job: True)
        assert found is not None
        assert (found.homes, found.gives_back) == (((1, None),), False)
        assert kept([heavy], 1.0)

    def test_where_all_promises_are_kept_nobody_leaves(self) -> None:
        here = pools([member(1), member(2)], train=16)
        assert relieve(here.groups[1], here, FIT, lambda job: True) is None


class TestBacklog:
    @staticmethod
    def waiting(job: int, since_us: int, *, gpus: int = 16, priority: float = 1.0) -> Waiting:
        return Waiting(member=member(job, gpus=gpus), priority=priority, since_us=since_us)

    @staticmethod
    def run(backlog: Backlog, fits: set[int], at_us: int = 0) -> list[int]:
        taken: list[int] = []

        def take(member: Member, home: Home) -> None:
            taken.append(member.job)

        backlog.run(
            at_us,
            lambda each: Home(group=None) if each.job in fits else Why.TRAIN_GPUS,
            take,
        )
        return taken

    def test_priority_then_age(self) -> None:
        backlog = Backlog()
        for each in (self.waiting(1, 5), self.waiting(2, 3), self.waiting(3, 9, priority=2)):
            backlog.arrive(each)
        assert self.run(backlog, {1, 2, 3}) == [3, 2, 1]
        assert not backlog.jobs

    def test_without_backfill_nobody_goes_before_the_first(self) -> None:
        backlog = Backlog(backfill=False)
        for number in (1, 2):
            backlog.arrive(self.waiting(number, number, gpus=8 * number))
        assert self.run(backlog, {2}) == []
        assert backlog.why[JobId(1)] is Why.TRAIN_GPUS

    def test_backfill_fills_gaps_until_the_first_is_too_old(self) -> None:
        backlog = Backlog(guard_us=HOUR_US)
        for number in (1, 2, 3):
            backlog.arrive(self.waiting(number, number, gpus=8 * number))
        assert self.run(backlog, {2}, at_us=10) == [2]
        assert self.run(backlog, {3}, at_us=HOUR_US + 2) == []

    def test_who_joins_goes_before_who_needs_a_new_wpg_until_that_is_too_old(self) -> None:
        def order(at_us: int) -> list[int]:
            backlog, taken = Backlog(guard_us=HOUR_US, joins_first=True), list[int]()
            for number in (1, 2, 3):
                backlog.arrive(self.waiting(number, number))
            backlog.run(
                at_us,
                lambda each: Home(group=None if each.job == 1 else 7),
                lambda each, home: taken.append(each.job),
            )
            return taken

        assert order(10) == [2, 3, 1]
        assert order(HOUR_US + 1) == [1, 2, 3]

    def test_who_is_put_off_is_looked_at_again_after_the_others(self) -> None:
        backlog, taken = Backlog(joins_first=True), list[tuple[int, int | None]]()
        for number in (1, 2, 3):
            backlog.arrive(self.waiting(number, number))
        # The first opens a WPG, which the second then joins.
        backlog.run(
            10,
            lambda each: Home(group=7 if taken else None),
            lambda each, home: taken.append((each.job, home.group)),
        )
        assert taken == [(1, None), (2, 7), (3, 7)]

    def test_a_pass_looks_at_so_many_only(self) -> None:
        backlog = Backlog(depth=3)
        for number in range(1, 9):
            backlog.arrive(self.waiting(number, number, gpus=number))
        assert self.run(backlog, {3, 4}) == [3]

    def test_a_shape_that_found_no_gpus_is_not_asked_again(self) -> None:
        backlog, asked = Backlog(), []

        def place_it(each: Member) -> Why:
            asked.append(each.job)
            return Why.TRAIN_GPUS

        for number in range(1, 5):
            backlog.arrive(self.waiting(number, number))
        backlog.run(0, place_it, lambda member, home: None)
        assert asked == [1]
        assert set(backlog.why) == {1, 2, 3, 4}

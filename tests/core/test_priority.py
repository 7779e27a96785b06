"""Priorities: Slurm's factors, usage that decays, a total order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.priority import (
    DAY_US,
    Owner,
    Usage,
    Weights,
    factors,
    fair_shares,
    in_order,
    weighted,
)

A, B = Owner("physics", "ada"), Owner("biology", "bob")
WEIGHTS = Weights()

owners = st.builds(Owner, st.sampled_from("pqr"), st.sampled_from("uvw"))
# Not so small that half of it is nothing.
usages = st.dictionaries(owners, st.floats(0, 1e18, allow_subnormal=False))


def test_whoever_has_used_nothing_has_the_whole_factor_and_the_share_exactly_half() -> None:
    assert fair_shares({}, {}, [A, B]) == {A: 1.0, B: 1.0}
    assert fair_shares({A: 5.0, B: 5.0}, {}) == {A: 0.5, B: 0.5}
    assert fair_shares({A: 9.0, B: 0.0}, {}) == {A: 0.25, B: 1.0}


def test_an_account_with_more_shares_may_use_more() -> None:
    assert fair_shares({A: 9.0, B: 1.0}, {"physics": 9}) == pytest.approx({A: 0.5, B: 0.5})
    assert fair_shares({A: 9.0}, {"physics": 0, "biology": 1})[A] == 0.0


def test_users_of_an_account_share_it_and_pay_for_each_other() -> None:
    carol = Owner("physics", "carol")
    found = fair_shares({A: 10.0}, {}, [carol, B])
    # UE of carol is half of what her account used; her share is a quarter of all.
    assert found[carol] == pytest.approx(2 ** -(0.5 / 0.25))
    assert found[A] < found[carol] < found[B] == 1.0


def test_usage_counts_half_after_a_half_life() -> None:
    usage = Usage(10)
    usage.add(A, 800, 0)
    assert [usage.at(t)[A] for t in (0, 10, 20, 30)] == [800, 400, 200, 100]
    assert Usage(0).at(9) == {}
    forever = Usage(0)
    forever.add(A, 7, 0)
    assert forever.at(10**18)[A] == 7


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), max_size=20), st.data())
def test_the_order_in_which_usage_is_read_does_not_matter(
    facts: list[tuple[int, int]], data: st.DataObject
) -> None:
    one, other = Usage(10**6), Usage(10**6)
    for gpu_us, at_us in facts:
        one.add(A, gpu_us, at_us)
    for gpu_us, at_us in data.draw(st.permutations(facts)):
        other.add(A, gpu_us, at_us)
    now = 10**6
    assert other.at(now) == pytest.approx(one.at(now), rel=1e-9, abs=1e-6)


@given(usages, st.dictionaries(st.sampled_from("pqr"), st.integers(0, 1000)), st.lists(owners))
def test_factors_are_between_0_and_1_and_only_using_lowers_them(
    usage: dict[Owner, float], shares: dict[str, int], others: list[Owner]
) -> None:
    found = fair_shares(usage, shares, others)
    assert set(found) == {*usage, *others}
    assert all(0.0 <= factor <= 1.0 for factor in found.values())
    idle = {each.account for each in others} - {o.account for o, used in usage.items() if used}
    assert all(found[each] == 1.0 for each in others if each.account in idle and shares.get(
        each.account, 1))  # fmt: skip


@given(usages.filter(lambda usage: sum(usage.values()) > 0), st.floats(0.001, 1000))
def test_only_proportions_count(usage: dict[Owner, float], factor: float) -> None:
    scaled = {owner: used * factor for owner, used in usage.items()}
    assert fair_shares(scaled, {}) == pytest.approx(fair_shares(usage, {}), abs=1e-6)


def test_parts_add_up_to_the_priority() -> None:
    found = factors(
        waited_us=7 * DAY_US // 2, fairshare=0.25, qos=5, most_qos=10, priority=100, weights=WEIGHTS
    )
    parts = weighted(found, WEIGHTS)
    assert (parts.age, parts.fairshare, parts.qos, parts.job) == (500, 2500, 5000, 100)
    assert parts.total == 8100


def test_age_is_worth_no_more_after_the_longest_age() -> None:
    ages = [
        factors(waited_us=t, fairshare=0, qos=0, most_qos=0, priority=1, weights=WEIGHTS).age
        for t in (-1, 0, 7 * DAY_US, 70 * DAY_US)
    ]
    assert ages == [0, 0, 1, 1]


jobs = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(0, 10**6)),
    unique_by=lambda job: job[2],
)


def order(given_jobs: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return in_order(
        given_jobs,
        at_us=100,
        guard_us=50,
        priority=lambda job: job[0],
        since_us=lambda job: job[1],
        number=lambda job: job[2],
    )


@given(jobs, st.data())
def test_the_order_is_total(given_jobs: list[tuple[int, int, int]], data: st.DataObject) -> None:
    assert order(data.draw(st.permutations(given_jobs))) == order(given_jobs)


@given(jobs)
def test_nobody_goes_before_whoever_has_waited_too_long(
    given_jobs: list[tuple[int, int, int]],
) -> None:
    found = order(given_jobs)
    late = [job for job in found if job[1] <= 50]
    assert found[: len(late)] == sorted(late, key=lambda job: job[1:])
    rest = found[len(late) :]
    assert rest == sorted(rest, key=lambda job: (-job[0], job[1], job[2]))

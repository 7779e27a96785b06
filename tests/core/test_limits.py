"""Limits: who is refused, who waits, and in which words."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.dues import Dues
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import (
    HeldKind,
    Key,
    LimitRules,
    Limits,
    Qos,
    Scope,
    Subject,
    Tally,
)
from plexrl_slurm.core.priority import DAY_US, Owner

GIB = 2**30


def job(
    number: int, user: str = "ada", account: str = "lab", qos: str = "normal", gib: int = 0
) -> Subject:
    return Subject(job=JobId(number), user=user, account=account, qos=qos, host_bytes=gib * GIB)


def tally(rules: LimitRules, running: Sequence[Subject] = (), **used: int) -> Tally:
    found = Tally(rules, {Key(Scope.ACCOUNT, name): gpu_us for name, gpu_us in used.items()})
    for each in running:
        found.submit(each)
        found.enter(each)
    return found


TWO = Limits(max_jobs=2)


def test_every_limit_that_holds_a_job_is_told() -> None:
    rules = LimitRules(
        users=Limits(max_jobs=1, host_bytes=2 * GIB),
        accounts=Limits(gpu_us_per_day=10**6),
        qos={"normal": Qos(name="normal", limits=TWO)},
    )
    found = tally(rules, [job(1, gib=2)], lab=2 * 10**6)
    held = found.holding(job(2, gib=1))
    assert [each.sentence for each in held] == [
        "user ada has 1 job running, and max_jobs is 1: it starts when one of them ends",
        "jobs of user ada have 2.00 GiB of host memory, this one needs 1.00 GiB, and host_bytes is "
        "2.00 GiB: it starts when one of them ends",
        "account lab used 2 GPU-seconds in 24 hours, and gpu_seconds_per_day is 1: it starts when "
        "less of them lies in the last 24 hours",
    ]
    assert found.holds(job(2, gib=1)) == held[0]
    assert [each.word for each in held] == [
        "AssocMaxJobsLimit", "AssocGrpMemLimit", "AssocGrpGRESMinutes",
    ]  # fmt: skip
    assert tally(rules).holding(job(2, gib=1)) == ()


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        pytest.param(LimitRules(users=TWO), HeldKind.USER_JOBS, id="each user"),
        pytest.param(LimitRules(user={"ada": TWO}), HeldKind.USER_JOBS, id="one user"),
        pytest.param(LimitRules(accounts=TWO), HeldKind.ACCOUNT_JOBS, id="each account"),
        pytest.param(
            LimitRules(qos={"normal": Qos(name="normal", limits=TWO)}), HeldKind.QOS_JOBS, id="qos"
        ),
        pytest.param(
            LimitRules(qos={"normal": Qos(name="normal", per_user=TWO)}),
            HeldKind.QOS_USER_JOBS,
            id="each user of a qos",
        ),
    ],
)
def test_a_third_job_waits_for_one_of_two_to_end(rules: LimitRules, kind: HeldKind) -> None:
    found = tally(rules, [job(1)])
    assert found.holds(job(3)) is None
    found.enter(job(2))
    held = found.holds(job(3))
    assert held is not None
    assert held.kind is kind
    assert "2 jobs running, and max_jobs is 2" in held.sentence
    found.leave(job(1))
    assert found.holds(job(3)) is None


def test_over_a_limit_that_was_lowered_more_than_one_must_end() -> None:
    found = tally(LimitRules(users=TWO), [job(1), job(2), job(3), job(4)])
    held = found.holds(job(5))
    assert held is not None
    assert held.sentence == (
        "user ada has 4 jobs running, and max_jobs is 2: it starts when 3 of them have ended"
    )
    found.leave(job(1))
    found.leave(job(2))
    held = found.holds(job(5))
    assert held is not None
    assert held.sentence.endswith("it starts when one of them ends")


def test_another_users_jobs_do_not_count() -> None:
    found = tally(LimitRules(users=TWO), [job(1, user="bob"), job(2, user="bob")])
    assert found.holds(job(3)) is None
    own = tally(LimitRules(users=TWO, user={"ada": Limits(max_jobs=3)}), [job(1), job(2)])
    assert own.holds(job(3)) is None


def test_a_job_over_a_submit_limit_is_refused_with_who_which_how_much_and_what_to_do() -> None:
    found = tally(LimitRules(user={"ada": Limits(max_submit=1)}), [job(1)])
    held = found.refusal(job(2))
    assert held is not None
    assert held.kind is HeldKind.USER_SUBMIT
    assert held.sentence == (
        "user ada has 1 job waiting or running, and max_submit is 1: wait for one to end, or ask "
        "your admin for more ([limits.user.ada])"
    )
    assert found.refusal(job(2, user="bob")) is None


def test_gpu_time_of_a_day_holds_what_comes_next() -> None:
    rules = LimitRules(account={"lab": Limits(gpu_us_per_day=3_600_000_000)})
    assert tally(rules, lab=3_599_999_999).holds(job(1)) is None
    held = tally(rules, lab=4_000_000_000).holds(job(1))
    assert held is not None
    assert held.kind is HeldKind.ASSOC_GPU
    assert "account lab used 4,000 GPU-seconds in 24 hours" in held.sentence
    assert "gpu_seconds_per_day is 3,600" in held.sentence
    assert rules.daily()
    assert not LimitRules(users=TWO).daily()


DAY, MEMORY = Limits(gpu_us_per_day=3_600_000_000), Limits(host_bytes=4 * GIB)


@pytest.mark.parametrize(
    ("key", "rules", "kind"),
    [
        (Key(Scope.USER, "ada"), LimitRules(users=DAY), HeldKind.ASSOC_GPU),
        (Key(Scope.USER, "ada"), LimitRules(user={"ada": DAY}), HeldKind.ASSOC_GPU),
        (Key(Scope.ACCOUNT, "lab"), LimitRules(accounts=DAY), HeldKind.ASSOC_GPU),
        (
            Key(Scope.QOS, "normal"),
            LimitRules(qos={"normal": Qos(name="normal", limits=DAY)}),
            HeldKind.QOS_GPU,
        ),
        (
            Key(Scope.QOS_USER, "normal", "ada"),
            LimitRules(qos={"normal": Qos(name="normal", per_user=DAY)}),
            HeldKind.QOS_USER_GPU,
        ),
    ],
)
def test_gpu_time_of_a_day_is_limited_for_everybody(
    key: Key, rules: LimitRules, kind: HeldKind
) -> None:
    dues = Dues(0)
    dues.add(Owner("lab", "ada"), "normal", 3_599_999_999, 2 * DAY_US)
    assert Tally(rules, dues.today(2 * DAY_US)).holds(job(1)) is None
    dues.add(Owner("lab", "ada"), "normal", 1, 2 * DAY_US + 1)
    held = Tally(rules, dues.today(2 * DAY_US)).holds(job(1))
    assert held is not None
    assert held.kind is kind
    assert f"{key.words()} used 3,600 GPU-seconds in 24 hours" in held.sentence
    stranger = job(2, user="bob", account="bio", qos="other")
    assert Tally(rules, dues.today(2 * DAY_US)).holds(stranger) is None
    assert Tally(rules, dues.today(3 * DAY_US + 60_000_000)).holds(job(1)) is None


@pytest.mark.parametrize(
    ("rules", "kind", "whose"),
    [
        (LimitRules(users=MEMORY), HeldKind.ASSOC_MEMORY, "user ada"),
        (LimitRules(accounts=MEMORY), HeldKind.ASSOC_MEMORY, "account lab"),
        (LimitRules(account={"lab": MEMORY}), HeldKind.ASSOC_MEMORY, "account lab"),
        (
            LimitRules(qos={"normal": Qos(name="normal", limits=MEMORY)}),
            HeldKind.QOS_MEMORY,
            "qos normal",
        ),
    ],
)
def test_host_memory_is_limited_for_everybody(
    rules: LimitRules, kind: HeldKind, whose: str
) -> None:
    found = tally(rules, [job(1, gib=3)])
    assert found.holds(job(2, gib=1)) is None
    held = found.holds(job(2, gib=2))
    assert held is not None
    assert held.kind is kind
    assert held.sentence.startswith(f"jobs of {whose} have 3.00 GiB of host memory")
    assert found.holds(job(2, user="bob", account="bio", qos="other", gib=4)) is None


def test_host_memory_is_for_jobs_together_and_a_job_that_never_fits_is_refused() -> None:
    rules = LimitRules(users=Limits(host_bytes=4 * GIB))
    found = tally(rules, [job(1, gib=3)])
    held = found.holds(job(2, gib=2))
    assert held is not None
    assert held.kind is HeldKind.ASSOC_MEMORY
    assert "have 3.00 GiB of host memory, this one needs 2.00 GiB" in held.sentence
    assert found.refusal(job(2, gib=2)) is None
    never = found.refusal(job(2, gib=5))
    assert never is not None and "declare fewer or smaller models" in never.sentence


def test_a_users_own_limits_leave_the_general_ones_where_they_say_nothing() -> None:
    found = Limits(max_jobs=5).over(Limits(max_jobs=2, max_submit=9))
    assert found == Limits(max_jobs=5, max_submit=9)


def test_a_qos_is_for_everybody_unless_it_names_some() -> None:
    assert Qos(name="x").admits("ada", "lab")
    some = Qos(name="x", users=frozenset({"ada"}), accounts=frozenset({"bio"}))
    assert [some.admits(*who) for who in (("ada", "lab"), ("bob", "bio"), ("bob", "lab"))] == [
        True,
        True,
        False,
    ]


subjects = st.builds(
    job,
    st.integers(1, 99),
    user=st.sampled_from("uv"),
    account=st.sampled_from("ab"),
    qos=st.sampled_from(["normal", "fast"]),
    gib=st.integers(0, 3),
)
counts = st.none() | st.integers(0, 4)
limits = st.builds(
    Limits, max_jobs=counts, host_bytes=st.none() | st.integers(0, 6).map(lambda n: n * GIB)
)


@given(
    st.lists(subjects, max_size=20),
    st.builds(
        LimitRules,
        users=limits,
        accounts=limits,
        qos=st.builds(
            lambda all_, each: {"fast": Qos(name="fast", limits=all_, per_user=each)},
            limits,
            limits,
        ),
    ),
)
def test_whoever_is_let_in_one_after_another_keeps_every_limit(
    wanted: list[Subject], rules: LimitRules
) -> None:
    found, inside = Tally(rules), list[Subject]()
    for each in wanted:
        if found.holds(each) is None:
            found.enter(each)
            inside.append(each)
    for mine, of in (("user", rules.users), ("account", rules.accounts)):
        for name in {getattr(each, mine) for each in inside}:
            group = [each for each in inside if getattr(each, mine) == name]
            assert of.max_jobs is None or len(group) <= of.max_jobs
            assert of.host_bytes is None or sum(e.host_bytes for e in group) <= of.host_bytes


@pytest.mark.parametrize("limit", ["max_jobs", "max_submit", "gpu_us_per_day"])
def test_whoever_may_have_nothing_is_not_told_to_wait_for_an_end(limit: str) -> None:
    found = tally(LimitRules(users=Limits(**{limit: 0})), [job(1)])
    held = found.refusal(job(2)) if limit == "max_submit" else found.holds(job(2))
    name = {"gpu_us_per_day": "gpu_seconds_per_day"}.get(limit, limit)
    assert held is not None
    assert held.sentence == (
        f"{name} of user ada is 0, so that none of its jobs starts: ask your admin for more "
        "([limits.user.ada])"
    )


def test_a_waiting_job_larger_than_a_limit_that_was_lowered_is_told_that_no_end_helps() -> None:
    rules = LimitRules(users=Limits(host_bytes=GIB))
    held = tally(rules).holds(job(1, gib=2))
    assert held is not None and held.kind is HeldKind.ASSOC_MEMORY
    assert "declare fewer or smaller models" in held.sentence
    assert "when one of them ends" not in held.sentence

"""The last samples of a rollout, paused for those that wait."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from plexrl_slurm.core.costs import PRIOR_PREFILL, Prefills
from plexrl_slurm.core.explain import ReasonKind
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import (
    Activity,
    Call,
    Deployment,
    DeploymentPlaced,
    Expected,
    FunctionKind,
)
from plexrl_slurm.core.tails import ENOUGH, Lengths, Tail, TailRules, Waiter, is_tail, pays
from tests.core.hand import CAUSE, SECOND, Hand, short
from tests.core.workloads import ROLLOUT, call, sampled

S, T = sampled(1, "s"), sampled(2, "t")
RULES = TailRules()
TAIL = Tail(
    running=2,
    most=64,
    pauses=0,
    fewest=0,
    ran_us=90 * SECOND,
    rest_us=60 * SECOND,
    back_us=SECOND,
    weight=1,
    step_us=SECOND,
)
OTHER = Waiter(work_us=20 * SECOND, weight=1, step_us=SECOND, overdue=False)


# -- the decision ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"running": 5}, True),  # less than a tenth of 64
        ({"running": 7}, False),
        ({"running": 4, "most": 8}, True),
        ({"running": 4, "most": 4}, False),  # none of them has ended
        ({"running": 0}, False),
        ({"running": 4, "most": 4, "pauses": 1, "fewest": 1}, True),  # they were one before
        ({"running": 4, "most": 4, "pauses": 1}, False),
        ({"pauses": 3}, True),
        ({"pauses": 4}, False),
    ],
)
def test_a_tail_is_few_of_many_that_were_not_paused_too_often(
    changes: dict[str, int], expected: bool
) -> None:
    assert is_tail(RULES, replace(TAIL, **changes)) is expected


def test_nothing_is_a_tail_where_pausing_is_off() -> None:
    assert not is_tail(TailRules(pause=False), TAIL)


@pytest.mark.parametrize(
    ("tail", "other", "expected"),
    [
        ({}, {}, True),
        # The other's work is longer than the rest.
        ({}, {"work_us": 60 * SECOND}, False),
        ({}, {"work_us": 60 * SECOND, "weight": 2}, True),
        ({"weight": 4}, {}, False),
        # A job with shorter steps is more in a hurry.
        ({"step_us": 10 * SECOND}, {"work_us": 500 * SECOND}, True),
        ({}, {"step_us": 10 * SECOND}, False),
        # The re-prefill and the switch back eat what is saved.
        ({"back_us": 40 * SECOND}, {}, False),
        ({"back_us": 60 * SECOND}, {"overdue": True}, False),
        ({"back_us": 59 * SECOND}, {"overdue": True, "work_us": 900 * SECOND}, True),
        ({"rest_us": 4 * SECOND}, {"overdue": True}, False),
        ({"ran_us": SECOND - 1}, {"overdue": True}, False),
        ({"rest_us": None}, {"overdue": True}, False),
    ],
)
def test_a_pause_has_to_save_more_than_it_costs(
    tail: dict[str, Any], other: dict[str, Any], expected: bool
) -> None:
    assert pays(RULES, replace(TAIL, **tail), replace(OTHER, **other)) is expected


def test_the_rest_of_a_sample_is_what_longer_ones_took_more() -> None:
    lengths, job = Lengths(), JobId(1)
    for second in range(1, ENOUGH):
        lengths.saw(job, second * SECOND)
    assert lengths.rest_us(job, 0) is None, "too few are known"
    lengths.saw(job, 100 * SECOND)
    assert lengths.rest_us(job, 0) == 16 * SECOND
    assert lengths.rest_us(job, 10 * SECOND) == 90 * SECOND
    assert lengths.rest_us(job, 200 * SECOND) == 100 * SECOND, "older than all: half its age"
    lengths.forget(job)
    assert lengths.rest_us(job, 0) is None


def test_what_a_prefill_costs_is_learned() -> None:
    prefills = Prefills()
    assert prefills.estimate_us(ROLLOUT.id, PRIOR_PREFILL) == SECOND
    prefills.learn(ROLLOUT.id, tokens=1000, took_us=SECOND // 10)
    assert prefills.estimate_us(ROLLOUT.id, PRIOR_PREFILL) == 4 * SECOND // 10
    prefills.learn(ROLLOUT.id, tokens=0, took_us=0)
    assert prefills.estimate_us(ROLLOUT.id, PRIOR_PREFILL) == 4 * SECOND // 10


# -- in the scheduler -----------------------------------------------------------------------


def samples(deployment: Deployment, *seqs: int) -> list[Call]:
    return [call(deployment, FunctionKind.SAMPLE, seq, tokens=100) for seq in seqs]


def tailing(rules: TailRules | None = RULES, *, policy: str = "atc_h") -> tuple[Hand, list[Call]]:
    """Of 16 samples 14 ended after 10 s, as those before did; one of old lasted 200 s."""
    hand = Hand(ROLLOUT, policy=policy, tails=rules)
    hand.place(S, T)
    hand.up()
    first = samples(S, *range(16))
    hand.arrive(*first)
    hand.later(1).switched()
    hand.later(10)
    for ended in first[1:]:
        hand.end(ended)
    hand.later(190).end(first[0])
    rollout = samples(S, *range(16, 32))
    hand.later(0.01).arrive(*rollout)
    hand.later(10)
    for ended in rollout[2:]:
        hand.end(ended)
    return hand, rollout[:2]


def test_a_tail_is_paused_for_who_waits_and_goes_on_after_them() -> None:
    hand, (a, b) = tailing()
    (other,) = samples(T, 0)
    assert short(hand.later(1).arrive(other)) == [f"pause {a.id} {b.id}"]
    assert hand.paused(a, tokens=40) == []
    assert short(hand.later(0.1).paused(b, tokens=30)) == ["switch nothing -> t"]
    assert short(hand.later(1).switched()) == ["run t/0"]
    (reason, *_) = hand.core.explain(a.id).reasons
    assert reason.kind is ReasonKind.PAUSED
    assert reason.sentence == "sample s/16 was paused after 40 tokens and goes on there"
    assert short(hand.later(5).end(other)) == ["finish t/0", "switch nothing -> s"]
    assert short(hand.later(1).switched()) == [f"run {a.id}", f"run {b.id}"]
    assert short(hand.later(150).end(a, prefilled=(400, SECOND))) == [f"finish {a.id}"]


@pytest.mark.parametrize("rules", [None, TailRules(pause=False)])
def test_without_the_setting_tails_run_to_their_end(rules: TailRules | None) -> None:
    hand, _ = tailing(rules)
    assert hand.later(1).arrive(*samples(T, 0)) == []


def test_a_tail_without_anybody_who_waits_runs_on() -> None:
    hand, _ = tailing()
    assert hand.later(50).tick() == []


def test_a_tail_that_was_left_alone_is_looked_at_again() -> None:
    hand, (a, b) = tailing()
    # Its work is as long as the rest, until it is overdue.
    hand.core._books.estimates.saw_function(T.job, FunctionKind.SAMPLE, 500 * SECOND)
    hand.core._books.estimates.saw_phase(T.job, ROLLOUT.pool, 500 * SECOND)
    assert hand.later(1).arrive(*samples(T, 0)) == []
    assert hand.wakes[-1] == hand.now + SECOND
    out: list[str] = []
    while not out:
        out = short(hand.later(1).tick())
    assert out == [f"pause {a.id} {b.id}"]


def test_who_the_pause_was_for_runs_next_whatever_the_index_says() -> None:
    hand, (a, b) = tailing(policy="drain_first")
    other = samples(T, 0)[0]
    assert short(hand.later(1).arrive(other)) == [f"pause {a.id} {b.id}"]
    hand.later(0.1).paused(a)
    assert short(hand.paused(b)) == ["switch nothing -> t"]


def test_a_call_that_ends_first_or_cannot_be_split_is_waited_for() -> None:
    hand, (a, b) = tailing()
    hand.later(1).arrive(*samples(T, 0))
    assert short(hand.later(0.1).end(a)) == [f"finish {a.id}"]
    assert hand.later(60).tick() == [], "it is asked once"
    assert short(hand.later(1).end(b)) == [f"finish {b.id}", "switch nothing -> t"]


def test_if_who_waited_goes_away_the_tail_goes_on_at_once() -> None:
    hand, (a, b) = tailing()
    (other,) = samples(T, 0)
    hand.later(1).arrive(other)
    assert short(hand.cancel(other)) == ["fail t/0: cancelled"]
    assert short(hand.paused(a)) == [f"run {a.id}"]
    assert short(hand.paused(b)) == [f"run {b.id}"]


def test_a_call_is_paused_only_so_often() -> None:
    hand, (a, b) = tailing(TailRules(pauses=1))
    hand.later(1).arrive(*samples(T, 0))
    hand.paused(a)
    hand.paused(b)
    hand.later(1).switched()
    hand.later(1).end(*samples(T, 0))
    hand.later(1).switched()
    hand.later(1).end(b)
    assert hand.later(1).arrive(*samples(T, 1)) == []
    assert hand.later(100).tick() == []


def test_a_paused_call_that_nobody_waits_for_any_more_is_over() -> None:
    hand, (a, b) = tailing()
    hand.later(1).arrive(*samples(T, 0))
    assert hand.cancel(a) == []
    assert short(hand.paused(a)) == [f"fail {a.id}: cancelled"]
    assert short(hand.paused(b)) == ["switch nothing -> t"]


def test_a_tail_whose_job_ends_while_it_is_paused_leaves_nothing() -> None:
    hand, (a, b) = tailing()
    hand.later(1).arrive(*samples(T, 0))
    hand.paused(a)
    assert short(hand.drop(S)) == [
        f"fail {a.id}: the job has ended", f"fail {b.id}: the job has ended",
    ]  # fmt: skip
    assert short(hand.paused(b)) == ["switch nothing -> t"]


def test_ranks_that_die_while_they_pause_run_the_calls_again() -> None:
    hand, (a, b) = tailing()
    hand.later(1).arrive(*samples(T, 0))
    hand.paused(a)
    hand.down()
    assert hand.later(1).paused(b) == [], "it was lost before this was heard"
    assert short(hand.later(1).up()) == ["switch nothing -> t"]
    hand.later(1).switched()
    hand.later(1).end(*samples(T, 0))
    assert short(hand.later(1).switched()) == [f"run {b.id}", f"run {a.id}"]


def test_a_restarted_core_adopts_what_is_being_paused() -> None:
    hand, (a, b) = tailing()
    hand.later(1).arrive(*samples(T, 0))
    hand.restart()
    hand.place(S, T)
    hand.up(S, running=((a.id, 0), (b.id, 0)))
    hand.arrive(a)
    assert hand.later(0.1).paused(b) == []
    assert short(hand.arrive(b)) == [f"run {b.id}"]
    assert short(hand.paused(a)) == [f"run {a.id}"]


def test_a_restarted_core_knows_a_tail_by_what_was_believed_before() -> None:
    learned = tailing()[0].core._books.estimates.rollouts(S.job)
    assert len(learned.lengths_us) > ENOUGH
    hand = Hand(ROLLOUT, policy="atc_h", tails=RULES)
    expected = Expected(step_us=SECOND, train_us=0, sample_us=0, rollouts=learned)
    hand.core.handle(DeploymentPlaced(deployment=S, expected=expected, at_us=hand.now, cause=CAUSE))
    hand.place(T)
    hand.up()
    rollout = samples(S, *range(16))
    hand.arrive(*rollout)
    hand.later(1).switched()
    hand.later(10)
    for ended in rollout[2:]:
        hand.end(ended)
    assert short(hand.later(1).arrive(*samples(T, 0))) == ["pause s/0 s/1"]


def test_every_microsecond_of_a_paused_tail_is_its_jobs_once() -> None:
    hand, (a, b) = tailing()
    (other,) = samples(T, 0)
    hand.later(1).arrive(other)
    hand.later(1).paused(a)
    hand.later(1).paused(b)
    hand.later(1).switched()
    hand.later(5).end(other)
    hand.later(1).switched()
    hand.later(7).end(a)
    hand.later(1).end(b)
    hand.later(1).release()
    rows = sorted(hand.charges, key=lambda row: row.start_us)
    for before, after in pairwise(rows):
        assert before.stop_us == after.start_us
    spent = {
        job: sum(r.gpu_us for r in rows if r.job == job and r.activity is Activity.BUSY)
        for job in (S.job, T.job)
    }
    stretches_s = 200 + 10 + 1 + 1 + 1 + 7 + 1
    assert spent == {S.job: 3 * stretches_s * SECOND, T.job: 3 * 5 * SECOND}

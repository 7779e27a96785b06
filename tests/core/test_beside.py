"""The last samples of a rollout, which run on in a second engine slot beside those that waited."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from plexrl_slurm.core.messages import Activity, Call
from plexrl_slurm.core.tails import TailRules, pays_beside
from tests.core.hand import SECOND, Hand, short
from tests.core.test_tails import OTHER, TAIL, S, T, samples
from tests.core.workloads import ROLLOUT, sampled

TWO = replace(ROLLOUT, second_slot=True)
RULES = TailRules(co_resident=True)
U = sampled(3, "u")


# -- the decision ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "other", "expected"),
    [
        ({}, {}, True),
        # Its own weight hardly counts: it is not sent away.
        ({"weight": 10}, {}, True),
        ({"weight": 100}, {}, False),
        ({"step_us": SECOND // 100}, {}, False),
        ({"weight": 100}, {"overdue": True}, True),
        ({"rest_us": 4 * SECOND}, {"overdue": True}, False),
        ({"rest_us": None}, {"overdue": True}, False),
        # It would come in as soon when the tail has ended.
        ({}, {"switch_us": 60 * SECOND}, False),
        ({}, {"switch_us": 59 * SECOND}, True),
        # Neither is there a switch back, nor are tokens computed again.
        ({"back_us": 90 * SECOND}, {}, True),
    ],
)
def test_running_beside_has_to_save_more_than_it_slows(
    tail: dict[str, Any], other: dict[str, Any], expected: bool
) -> None:
    assert pays_beside(RULES, replace(TAIL, **tail), replace(OTHER, **other)) is expected


def test_two_that_slow_each_other_down_by_all_of_it_had_better_not_run_together() -> None:
    slow = replace(RULES, slowdown=300)
    assert not pays_beside(slow, TAIL, OTHER)


# -- in the scheduler -----------------------------------------------------------------------


def tailing(rules: TailRules = RULES, *, wpg: Any = TWO) -> tuple[Hand, list[Call]]:
    """Of 16 samples 14 ended after 10 s, as those before did; one of old lasted 200 s."""
    hand = Hand(wpg, policy="atc_h", tails=rules)
    hand.place(S, T, U)
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


def together(*, seconds: float = 1) -> tuple[Hand, Call, Call, Call]:
    """The tail of S beside a sample of T."""
    hand, (a, b) = tailing()
    (other,) = samples(T, 0)
    assert short(hand.later(1).arrive(other)) == ["switch nothing -> t beside s"]
    assert short(hand.later(seconds).switched()) == ["run t/0"]
    return hand, a, b, other


def test_who_waits_comes_in_beside_a_tail_that_runs_on() -> None:
    hand, a, b, other = together()
    assert (
        hand.core.explain(other.id).sentence
        == "sample t/0 runs on rollout-0 beside a tail of job 1"
    )
    assert (
        hand.core.explain(a.id).sentence
        == f"sample {a.id} runs on rollout-0 as a tail beside job 2"
    )
    (view,) = hand.core.views()
    assert (view.resident, view.beside, view.beside_jobs, view.running) == (T.id, S.id, (S.job,), 3)
    assert short(hand.later(5).end(other)) == ["finish t/0"]
    assert short(hand.later(60).end(a)) == [f"finish {a.id}"]
    assert short(hand.later(60).end(b)) == [f"finish {b.id}"]
    (view,) = hand.core.views()
    assert (view.resident, view.beside, view.activity) == (T.id, None, Activity.IDLE)


@pytest.mark.parametrize(
    ("rules", "wpg"),
    [(TailRules(), TWO), (RULES, ROLLOUT), (replace(RULES, pause=False), ROLLOUT)],
)
def test_without_the_setting_and_a_slot_nothing_runs_beside(rules: TailRules, wpg: Any) -> None:
    hand, (a, b) = tailing(rules, wpg=wpg)
    expected = [f"pause {a.id} {b.id}"] if rules.pause else []
    assert short(hand.later(1).arrive(*samples(T, 0))) == expected


def test_it_needs_no_pausing() -> None:
    hand, _ = tailing(replace(RULES, pause=False))
    assert short(hand.later(1).arrive(*samples(T, 0))) == ["switch nothing -> t beside s"]


def test_a_third_takes_the_place_of_the_second_and_not_of_the_tail() -> None:
    hand, a, b, other = together()
    hand.arrive(*samples(U, 0))
    assert short(hand.later(5).end(other)) == ["finish t/0", "switch nothing -> u beside s"]
    assert short(hand.later(1).switched()) == ["run u/0"]
    hand.later(1).end(a)
    assert short(hand.later(1).end(b)) == [f"finish {b.id}"]
    assert short(hand.later(1).arrive(*samples(T, 1))) == []
    assert short(hand.later(1).end(*samples(U, 0))) == ["finish u/0", "switch nothing -> t"]


def test_the_next_samples_of_a_tail_wait_their_turn_and_need_no_load() -> None:
    hand, a, b, other = together()
    (more,) = samples(S, 40)
    assert short(hand.later(1).arrive(more)) == []
    assert short(hand.later(5).end(other)) == ["finish t/0", "switch nothing -> s"]
    assert short(hand.later(0.01).end(a)) == [f"finish {a.id}"]
    assert short(hand.later(0.01).switched()) == ["run s/40"]
    (view,) = hand.core.views()
    assert (view.resident, view.beside) == (S.id, None)
    assert short(hand.later(1).end(b)) == [f"finish {b.id}"]


def test_a_tail_that_ends_while_the_other_is_loaded_frees_its_slot() -> None:
    hand, (a, b) = tailing()
    hand.later(1).arrive(*samples(T, 0))
    hand.end(a)
    hand.end(b)
    (view,) = hand.core.views()
    assert view.beside is None
    assert short(hand.later(1).switched()) == ["run t/0"]


def test_a_load_that_fails_leaves_the_tail_alone_and_is_tried_again() -> None:
    hand, (a, b) = tailing()
    hand.later(1).arrive(*samples(T, 0))
    assert short(hand.later(1).switched(ok=False)) == ["switch nothing -> t beside s"]
    assert short(hand.later(1).switched()) == ["run t/0"]
    assert short(hand.end(a)) == [f"finish {a.id}"]
    assert short(hand.end(b)) == [f"finish {b.id}"]


def test_ranks_that_die_end_both_and_both_run_again_once() -> None:
    hand, a, b, other = together()
    assert hand.down() == []
    out = short(hand.later(1).up())
    runs: list[str] = []
    ended: dict[str, Call] = {a.id: a, b.id: b, other.id: other}
    while out or ended.keys() - {run.removeprefix("run ") for run in runs}:
        started = [word for word in out if word.startswith("run")]
        runs += started
        if any(word.startswith("switch") for word in out):
            assert "beside" not in " ".join(out), "they have died under it"
            out = short(hand.later(1).switched())
        else:
            out = [
                word for run in started
                for word in short(hand.later(1).end(ended[run.removeprefix("run ")]))
                if not word.startswith("finish")
            ]  # fmt: skip
    assert sorted(runs) == [f"run {a.id}", f"run {b.id}", "run t/0"]


def test_a_wpg_is_drained_when_both_have_ended() -> None:
    hand, a, b, other = together()
    assert hand.drain() == []
    assert short(hand.later(1).end(other)) == ["finish t/0"]
    assert short(hand.later(1).end(a)) == [f"finish {a.id}"]
    assert short(hand.later(1).end(b)) == [f"finish {b.id}", "drained rollout-0"]


def test_a_tail_whose_job_ends_frees_its_slot_when_it_has_stopped() -> None:
    hand, a, b, _ = together()
    assert short(hand.drop(S)) == [
        f"fail {a.id}: the job has ended", f"fail {b.id}: the job has ended",
    ]  # fmt: skip
    hand.end(a, ok=False)
    hand.end(b, ok=False)
    (view,) = hand.core.views()
    assert (view.resident, view.beside) == (T.id, None)


@pytest.mark.parametrize("first", ["s", "t"])
def test_a_restarted_core_adopts_both(first: str) -> None:
    hand, a, b, other = together()
    hand.restart()
    hand.place(S, T)
    hand.up(T, running=((a.id, 0), (b.id, 0), (other.id, 0)), beside=S)
    for known in (a, b, other) if first == "s" else (other, b, a):
        hand.arrive(known)
    (view,) = hand.core.views()
    assert (view.resident, view.beside, view.running) == (T.id, S.id, 3)
    assert short(hand.later(1).end(other)) == ["finish t/0"]
    assert short(hand.end(a)) == [f"finish {a.id}"]
    assert short(hand.end(b)) == [f"finish {b.id}"]
    (view,) = hand.core.views()
    assert view.beside is None


def test_a_restarted_core_forgets_a_tail_of_which_nothing_runs() -> None:
    hand, _, _, other = together()
    hand.restart()
    hand.place(S, T)
    hand.arrive(other)
    hand.up(T, running=((other.id, 0),), beside=S)
    (view,) = hand.core.views()
    assert (view.resident, view.beside) == (T.id, None)


def test_the_tail_of_the_second_is_paused_for_a_third() -> None:
    hand, (a, _) = tailing()
    rollout = samples(T, *range(20))
    hand.later(1).arrive(*rollout)
    hand.later(1).switched()
    hand.later(20)
    for ended in rollout[2:]:
        hand.end(ended)
    out = short(hand.later(1).arrive(*samples(U, 0)))
    while not out:
        out = short(hand.later(1).tick())
    assert out == ["pause t/0 t/1"]
    hand.paused(rollout[0])
    assert short(hand.paused(rollout[1])) == ["switch nothing -> u beside s"]
    assert short(hand.end(a)) == [f"finish {a.id}"]


def test_every_microsecond_of_two_at_once_is_booked_once() -> None:
    hand, a, b, other = together(seconds=4)
    hand.later(6).end(other)
    hand.later(7).end(a)
    hand.later(1).end(b)
    hand.later(1).release()
    rows = sorted(hand.charges, key=lambda row: (row.start_us, row.stop_us))
    for before, after in pairwise(rows):
        assert before.stop_us == after.start_us or before.start_us == after.start_us
    by_start: dict[int, int] = {}
    for row in rows:
        by_start[row.start_us] = by_start.get(row.start_us, 0) + row.gpu_us
        assert row.activity is not Activity.KEPT
    assert sum(by_start.values()) == 3 * (hand.now - SECOND)
    for row in rows:
        assert by_start[row.start_us] == 3 * (row.stop_us - row.start_us)
    switches = [row for row in rows if row.activity is Activity.SWITCH]
    assert len(switches) == 1, "one that goes on beside a tail is booked to the tail's job"
    six = [row for row in rows if row.stop_us - row.start_us == 6 * SECOND]
    # Two samples of 100 tokens, and one of 100.
    assert {row.job: row.gpu_us for row in six} == {S.job: 12 * SECOND, T.job: 6 * SECOND}
    assert all(row.activity is Activity.BUSY for row in six)

"""Rollouts whose sequences all wait for their tools."""

import heapq

import pytest

from plexrl_slurm.core.explain import ReasonKind
from plexrl_slurm.core.messages import (
    Activity,
    Call,
    Deployment,
    Expected,
    FunctionKind,
    Rollouts,
    Run,
    Switch,
)
from plexrl_slurm.core.stalls import Stalls
from tests.core.hand import SECOND, Hand, short
from tests.core.workloads import ROLLOUT, call, sampled

S, T = sampled(1, "s"), sampled(2, "t")
SAMPLE = FunctionKind.SAMPLE


def samples(deployment: Deployment, *seqs: int) -> list[Call]:
    return [call(deployment, SAMPLE, seq, tokens=10) for seq in seqs]


def pausing(*pauses_s: float, switch_s: float = 1) -> tuple[Hand, int]:
    """A rollout that is resident, has paused like this, and has no call now; its next seq."""
    hand = Hand(ROLLOUT)
    hand.place(S, T)
    hand.up()
    hand.arrive(*samples(S, 0))
    hand.later(switch_s).switched(moved_bytes=S.image_bytes)
    hand.later(1).end(*samples(S, 0))
    for seq, pause_s in enumerate(pauses_s, 1):
        hand.later(pause_s).arrive(*samples(S, seq))
        hand.later(1).end(*samples(S, seq))
    return hand, len(pauses_s) + 1


def test_a_rollout_that_waits_for_its_tools_yields_at_once() -> None:
    hand, _ = pausing(20, 20, 20)
    assert short(hand.later(0.01).arrive(*samples(T, 0))) == ["switch nothing -> t"]


def test_its_next_call_competes_by_the_policy() -> None:
    hand, seq = pausing(20, 20, 20)
    hand.arrive(*samples(T, 0))
    hand.later(1).switched()
    assert hand.later(18).arrive(*samples(S, seq)) == [], "the other runs"
    assert short(hand.later(1).end(*samples(T, 0))) == ["finish t/0", "switch nothing -> s"]


@pytest.mark.parametrize(
    ("pauses", "holds"),
    [
        ((0.1, 0.1, 0.1, 20, 0.1, 0.1, 20), True),
        ((20, 0.1, 20, 20, 0.1, 20), False),
        ((), False),
    ],
)
def test_a_hold_goes_by_what_most_pauses_were_like(pauses: tuple[float, ...], holds: bool) -> None:
    hand, seq = pausing(*pauses)
    out = short(hand.later(0.01).arrive(*samples(T, 0)))
    assert out == ([] if holds else ["switch nothing -> t"])
    if holds:
        (kept,) = (view for view in hand.core.views() if view.kept_until_us is not None)
        assert kept.activity is Activity.KEPT
        assert short(hand.later(0.1).arrive(*samples(S, seq))) == [f"run s/{seq}"]


@pytest.mark.parametrize(
    ("switch_s", "pause_s", "held_s"),
    [
        # Twice the usual pause, if leaving and coming back is dearer,
        (0.3, 0.2, 0.4),
        (0.15, 0.2, 0.304),
        # not at all if it is cheaper;
        (0.09, 0.2, 0),
        (0.01, 0.2, 0),
        # the milliseconds of a client always.
        (0.01, 0.02, 0.05),
    ],
)
def test_nobody_is_waited_for_for_longer_than_it_takes_to_leave_and_come_back(
    switch_s: float, pause_s: float, held_s: float
) -> None:
    hand, _ = pausing(pause_s, pause_s, pause_s, switch_s=switch_s)
    ended_us = hand.now
    hand.later(0.001).arrive(*samples(T, 0))
    until_us = hand.core.views()[0].kept_until_us
    assert until_us == (ended_us + round(held_s * SECOND) if held_s else None)


def test_what_earlier_jobs_paused_like_is_one_pause_beside_its_own() -> None:
    """Of their user the last job had no tools, and this one has."""
    stalls = Stalls()
    stalls.expect(S.job, [500_000] * 40, [])
    assert stalls.gap_us(S.job) == 500_000
    for seen, middle_us in ((1, 500_000), (2, 4 * SECOND), (3, 4 * SECOND)):
        stalls.saw(S.job, 4 * SECOND, stall=True)
        assert stalls.gap_us(S.job) == middle_us, seen
    stalls.expect(S.job, [1], [1])
    assert stalls.gap_us(S.job) == stalls.stall_us(S.job) == stalls.longest_us(S.job) == 4 * SECOND
    # For the next daemon they all are known, the newest last.
    assert stalls.known(S.job) == ((500_000,) * 29 + (4 * SECOND,) * 3, (4 * SECOND,) * 3)
    stalls.forget(S.job)
    assert stalls.gap_us(S.job) is None and stalls.known(S.job) == ((), ())


def test_a_hold_for_what_earlier_jobs_were_like_ends_after_two_pauses() -> None:
    hand = Hand(ROLLOUT)
    hand.place(T)
    hand.place(S, expected=Expected(
        step_us=5 * SECOND, train_us=0, sample_us=SECOND, rollouts=Rollouts(gaps_us=(600_000,) * 18)
    ))  # fmt: skip
    hand.up()
    held = []
    for seq in range(4):
        hand.arrive(*samples(S, seq))
        if hand.core.views()[0].resident != S.id:
            hand.later(1).switched(moved_bytes=S.image_bytes)
        hand.later(1).end(*samples(S, seq))
        held.append(hand.later(0.01).arrive(*samples(T, seq)) == [])
        while hand.core.views()[0].kept_until_us is not None:
            hand.later(0.2).tick()
        hand.later(1).switched()
        hand.later(1).end(*samples(T, seq))
        hand.later(2)
    assert held == [True, True, False, False]


def test_explain_says_that_the_sequences_wait_for_their_tools() -> None:
    hand, _ = pausing(20, 0.1, 21)
    (reason,) = hand.core.explain(S.id).reasons
    assert reason.kind is ReasonKind.TOOLS
    assert reason.sentence == (
        "its sequences wait for their tools: job 1 asks again after 20.0 s as a rule, and "
        "rollout-0 is free for others until then"
    )
    assert hand.core.explain(T.id).reasons[0].kind is ReasonKind.IDLE


@pytest.mark.parametrize("pauses", [(), (0.1, 0.1)])
def test_explain_says_it_only_of_those_that_have_waited_for_tools(pauses: tuple[float]) -> None:
    hand, _ = pausing(*pauses)
    assert hand.core.explain(S.id).reasons[0].kind is ReasonKind.IDLE


def test_a_pause_before_another_snapshot_is_no_stall() -> None:
    hand, _ = pausing(0.1)
    following = sampled(1, "s2")
    hand.place(following)
    hand.later(100).arrive(*samples(following, 0))
    hand.later(1).switched()
    hand.later(1).end(*samples(following, 0))
    assert hand.core._books.estimates.stalls.stall_us(following.job) is None


def simulated_us(*jobs: Deployment) -> int:
    """Rollouts of four turns of 10 s with tools of 20 s between them, switches of 1 s."""
    hand = Hand(ROLLOUT, policy="atc_h")
    hand.place(*jobs)
    hand.up()
    calls = {c.id: (job, c) for job in jobs for c in samples(job, *range(4))}
    soon = [(hand.now, number, "ask", samples(job, 0)[0]) for number, job in enumerate(jobs)]
    count, ended_us = len(soon), 0
    while soon:
        hand.now, _, what, asked = heapq.heappop(soon)
        job = calls[asked.id][0]
        if what == "switched":
            out = hand.switched()
        else:
            out = hand.arrive(asked) if what == "ask" else hand.end(asked)
        if what == "end" and asked.seq < 3:
            count += 1
            heapq.heappush(
                soon, (hand.now + 20 * SECOND, count, "ask", samples(job, asked.seq + 1)[0])
            )
        elif what == "end":
            ended_us = hand.now
        for order in out:
            count += 1
            if isinstance(order, Run):
                heapq.heappush(soon, (hand.now + 10 * SECOND, count, "end", calls[order.call][1]))
            elif isinstance(order, Switch):
                heapq.heappush(soon, (hand.now + SECOND, count, "switched", asked))
    return ended_us - SECOND


def test_two_rollouts_with_tools_share_a_wpg_in_hardly_more_time_than_one() -> None:
    alone_us = simulated_us(S)
    assert alone_us == 101 * SECOND
    assert simulated_us(S, T) <= 1.2 * alone_us

"""What people are told, and when: what a WPG does, and what a call waits for."""

import pytest

from plexrl_slurm.core.explain import Asker
from plexrl_slurm.core.ids import CallId
from plexrl_slurm.core.messages import Activity
from tests.core.hand import Hand
from tests.core.tiers import CREATE, FB, A, B, calls_of
from tests.core.workloads import TRAIN


@pytest.fixture
def train() -> Hand:
    hand = Hand(TRAIN)
    hand.place(A, B)
    hand.up()
    return hand


def test_explain_names_the_seq_that_has_not_arrived(train: Hand) -> None:
    late = calls_of("a", CREATE, FB, FB)[2]
    train.arrive(*calls_of("a", CREATE), late)
    train.end(*calls_of("a", CREATE))
    assert train.core.explain(late.id).sentence == "seq 2 waits for seq 1, which has not arrived"


def test_explain_names_who_runs_and_who_is_ahead(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    train.arrive(*calls_of("a", FB, first=1))
    train.arrive(*calls_of("b", CREATE))
    said = train.core.explain(CallId("b/0")).sentence
    assert said == "train-0 is running forward_backward of job 1; it is next on train-0"
    train.arrive(*calls_of("a", FB, first=2))
    assert train.core.explain(CallId("a/2")).sentence.startswith("seq 2 waits for seq 1")


def test_explain_calls_jobs_what_their_users_call_them(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    train.arrive(*calls_of("a", FB, first=1))
    train.arrive(*calls_of("b", CREATE))
    asker = Asker(train.now, {1: "77_3", 2: "80"}.__getitem__)
    said = train.core.explain(CallId("b/0"), asker).sentence
    assert said == "train-0 is running forward_backward of job 77_3; it is next on train-0"


def test_how_long_a_wpg_is_kept_is_told_from_when_it_is_asked(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    train.work(*calls_of("a", FB, first=1))
    train.arrive(*calls_of("b", CREATE))

    def said(after_s: float) -> str:
        asker = Asker(train.now + int(after_s * 1_000_000))
        return train.core.explain(B.id, asker).sentence

    assert said(0) == "train-0 is kept for job 1 for at most 2.0 s"
    assert said(1.5) == "train-0 is kept for job 1 for at most 0.5 s"
    assert said(9) == "train-0 is kept for job 1 for at most 0.0 s"


def test_explain_says_that_a_wpg_is_down_and_why(train: Hand) -> None:
    train.arrive(*calls_of("a", CREATE))
    train.down("rank 1 was killed")
    said = train.core.explain(A.id).sentence
    assert said == "train-0 is down: restarting (rank 1 was killed)"
    assert "is not here" in train.core.explain(CallId("nobody")).sentence


def test_a_view_shows_what_a_wpg_does(train: Hand) -> None:
    train.arrive(*calls_of("a", CREATE, FB))
    train.arrive(*calls_of("b", CREATE))
    (view,) = train.core.views()
    assert (view.activity, view.jobs, view.call) == (Activity.BUSY, (1,), "a/0")
    assert (view.resident, view.running, view.queue_length) == ("a", 1, 2)
    assert view.waiting_jobs == (1, 2)


def test_a_drain_that_gives_nothing_back_says_what_it_is_for(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    train.drain("so that promised slowdowns are kept")
    for subject in (A.id, TRAIN.id):
        said = [reason.sentence for reason in train.core.explain(subject).reasons]
        assert any("drained for a moment so that promised slowdowns are kept" in s for s in said)
        assert not any("given back" in s for s in said)
    train.resume()
    train.drain()
    said = [reason.sentence for reason in train.core.explain(TRAIN.id).reasons]
    assert "train-0 is being given back" in said

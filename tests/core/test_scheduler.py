"""The scheduler fed by hand, one situation at a time."""

import pytest

from plexrl_slurm.core.ids import CallId, JobId
from plexrl_slurm.core.messages import Activity, Call, FunctionKind
from tests.core.hand import SECOND, Hand, short
from tests.core.workloads import ROLLOUT, TRAIN, call, sampled, trained

CREATE, FB, OPTIM = FunctionKind.CREATE, FunctionKind.FORWARD_BACKWARD, FunctionKind.OPTIM_STEP
FORWARD, PUBLISH, SAMPLE = FunctionKind.FORWARD, FunctionKind.PUBLISH, FunctionKind.SAMPLE
A, B = trained(1, "a"), trained(2, "b")
S, T = sampled(1, "s"), sampled(2, "t")


def calls_of(model: str, *kinds: FunctionKind, first: int = 0) -> list[Call]:
    deployment = {"a": A, "b": B}[model]
    return [call(deployment, kind, seq) for seq, kind in enumerate(kinds, first)]


def samples(snapshot: str, *seqs: int, tokens: int = 1, parts: int = 1) -> list[Call]:
    deployment = {"s": S, "t": T}[snapshot]
    return [call(deployment, SAMPLE, seq, tokens=tokens, parts=parts) for seq in seqs]


@pytest.fixture
def train() -> Hand:
    hand = Hand(TRAIN)
    hand.place(A, B)
    hand.up()
    return hand


@pytest.fixture
def rollout() -> Hand:
    hand = Hand(ROLLOUT)
    hand.place(S, T)
    hand.up()
    return hand


# -- order --------------------------------------------------------------------------------


def test_calls_run_by_seq_however_they_arrive(train: Hand) -> None:
    create, first, second = calls_of("a", CREATE, FB, OPTIM)
    assert train.arrive(second, first) == []
    assert short(train.arrive(create)) == ["run a/0"]
    assert short(train.end(create)) == ["finish a/0", "run a/1"]
    assert short(train.end(first)) == ["finish a/1", "run a/2"]


def test_a_repeat_is_run_once(train: Hand) -> None:
    (create,) = calls_of("a", CREATE)
    assert short(train.arrive(create, create)) == ["run a/0"]
    assert short(train.end(create)) == ["finish a/0"]
    assert train.arrive(create) == []


def test_another_call_cannot_take_a_seq(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    other = Call(id=CallId("x"), deployment=A.id, job=JobId(1), kind=FB, seq=0)
    assert short(train.arrive(other)) == ["fail x: seq 0 is already taken by call a/0"]


def test_a_doomed_call_fails_in_its_turn_and_occupies_nothing(train: Hand) -> None:
    create, last = call(A, CREATE, 0), call(A, OPTIM, 2)
    doomed = call(A, FB, 1, doomed=True)
    assert train.arrive(doomed, last) == []
    train.arrive(create)
    assert short(train.end(create)) == ["finish a/0", "fail a/1: its input is bad", "run a/2"]


def test_parts_run_one_by_one_and_are_answered_once(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    long = call(A, FB, 1, parts=2)
    assert short(train.arrive(long)) == ["run a/1"]
    assert short(train.end(long)) == ["run a/1 part 1"]
    assert short(train.end(long, part=1)) == ["finish a/1"]


def test_a_function_that_fails_consumes_its_seq_and_is_never_run_again(train: Hand) -> None:
    create, bad, good = calls_of("a", CREATE, FB, FB)
    train.work(create)
    train.arrive(bad, good)
    assert short(train.end(bad, ok=False)) == ["fail a/1", "run a/2"]
    train.down()
    assert short(train.up()) == ["replay a/0"]
    assert short(train.end(create)) == ["run a/2"]


def test_nothing_runs_on_what_could_not_be_created(train: Hand) -> None:
    create, step = calls_of("a", CREATE, FB)
    train.arrive(create, step)
    reason = "the deployment could not be created"
    assert short(train.end(create, ok=False)) == ["fail a/0", f"fail a/1: {reason}"]


def test_a_cancelled_training_call_is_passed_in_its_turn(train: Hand) -> None:
    create, first, second = calls_of("a", CREATE, FB, FB)
    train.arrive(create, first, second)
    assert train.cancel(first) == []
    assert short(train.end(create)) == ["finish a/0", "fail a/1: cancelled", "run a/2"]
    assert train.cancel(second) == [], "what runs ends as usual"
    assert short(train.end(second)) == ["finish a/2"]


# -- switches and images ------------------------------------------------------------------


def test_a_dirty_resident_is_saved_before_another_is_created(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    (create,) = calls_of("b", CREATE)
    assert short(train.arrive(create)) == ["save a at (1, 0)"]
    assert short(train.switched()) == ["forget a below (1, 0)", "run b/0"]
    train.end(create)
    assert short(train.arrive(*calls_of("a", FB, first=1))) == ["switch b -> a"]
    assert short(train.switched()) == ["forget b below (1, 0)", "run a/1"]


def test_a_clean_resident_is_dropped_not_saved(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    train.arrive(*calls_of("b", CREATE))
    train.switched()
    train.end(*calls_of("b", CREATE))
    train.arrive(*calls_of("a", FORWARD, first=1))
    train.switched()
    train.end(*calls_of("a", FORWARD, first=1))
    assert short(train.arrive(*calls_of("b", FORWARD, first=1))) == ["switch nothing -> b"]


def test_an_image_is_saved_after_enough_steps_when_nothing_waits() -> None:
    train = Hand(TRAIN, image_every=2)
    train.place(A)
    train.up()
    train.work(*calls_of("a", CREATE, FB, OPTIM, FB))
    assert short(train.work(*calls_of("a", OPTIM, first=4))) == ["finish a/4", "save a at (5, 0)"]
    assert short(train.switched()) == ["forget a below (5, 0)"]


def test_an_image_waits_for_a_pause_but_not_for_ever() -> None:
    train = Hand(TRAIN, image_every=1)
    train.place(A)
    train.up()
    todo = calls_of("a", CREATE, OPTIM, OPTIM, OPTIM)
    train.arrive(*todo)
    assert [short(train.end(one))[-1] for one in todo[:3]] == [
        "run a/1", "run a/2", "save a at (3, 0)",
    ]  # fmt: skip
    assert short(train.switched()) == ["forget a below (3, 0)", "run a/3"]


def test_a_failed_switch_goes_back_to_the_images(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    train.arrive(*calls_of("b", CREATE))
    train.switched()
    train.end(*calls_of("b", CREATE))
    train.arrive(*calls_of("a", FB, first=1))
    assert short(train.switched(ok=False)) == ["switch nothing -> a"]
    assert short(train.switched()) == ["run a/1"]


def test_a_state_that_cannot_be_brought_in_fails_its_calls(train: Hand) -> None:
    train.place(trained(3, "c"), image=(4, 0), applied=(4, 0))
    train.arrive(call(trained(3, "c"), FB, 4))
    train.switched(ok=False)
    train.switched(ok=False)
    reason = "its state could not be brought in 3 times (the image is damaged)"
    last = train.switched(ok=False, error="the image is damaged")
    assert short(last) == [f"fail c/4: {reason}"]


# -- losses -------------------------------------------------------------------------------


def test_calls_since_the_image_run_again_and_are_not_answered_again(train: Hand) -> None:
    create, micro, read, optim = calls_of("a", CREATE, FB, FORWARD, OPTIM)
    train.work(create, micro, read)
    train.arrive(optim)
    assert train.down() == []
    assert short(train.up()) == ["replay a/0"]
    assert short(train.end(create)) == ["replay a/1"]
    assert short(train.end(micro)) == ["run a/3"], "a read changed nothing and is skipped"
    assert short(train.end(optim)) == ["finish a/3"]


def test_a_loss_while_an_image_is_written_counts_the_older_image(train: Hand) -> None:
    train.work(*calls_of("a", CREATE))
    train.arrive(*calls_of("b", CREATE))
    train.switched()
    train.end(*calls_of("b", CREATE))
    train.arrive(*calls_of("a", FB, first=1))
    train.switched()
    train.end(*calls_of("a", FB, first=1))
    assert train.arrive(*calls_of("b", FB, first=1)) == []
    assert short(train.later(2).tick()) == ["switch a -> b"]
    train.down()
    assert short(train.up()) == ["switch nothing -> b"]
    train.switched()
    train.end(*calls_of("b", FB, first=1))
    train.arrive(*calls_of("a", OPTIM, first=2))
    train.later(2).tick()
    assert short(train.switched()) == ["forget b below (2, 0)", "replay a/1"]


def test_a_call_that_kills_its_ranks_three_times_fails(train: Hand) -> None:
    create, deadly, after = calls_of("a", CREATE, FB, OPTIM)
    train.work(create)
    train.arrive(deadly, after)
    for _ in range(2):
        assert train.down() == []
        train.up()
        assert short(train.end(create)) == ["run a/1"]
    assert short(train.down()) == ["fail a/1: its ranks died 3 times while it ran"]
    train.up()
    assert short(train.end(create)) == ["run a/2"]


def test_an_answered_call_that_cannot_run_again_breaks_the_deployment(train: Hand) -> None:
    create, micro = calls_of("a", CREATE, FB)
    train.work(create)
    train.arrive(micro)
    train.down()
    for _ in range(8):  # it has run well before, so it is not given up as quickly
        assert short(train.up()) == ["replay a/0"]
        assert train.down() == []
    train.up()
    reason = "its state cannot be rebuilt: its ranks died 9 times while seq 0 ran again"
    assert short(train.down()) == [f"fail a/1: {reason}"]


def test_a_replay_that_gets_on_is_never_given_up(train: Hand) -> None:
    """Ranks are killed again and again, and every call runs well in between."""
    create, first, second = calls_of("a", CREATE, FB, FB)
    train.work(create, first)
    train.arrive(second)
    train.down()
    for _ in range(5):
        assert short(train.up()) == ["replay a/0"]
        for _ in range(3):
            train.down()
            assert short(train.up()) == ["replay a/0"]
        assert short(train.end(create)) == ["replay a/1"]
        for _ in range(3):
            train.down()
            train.up()
            assert short(train.end(create)) == ["replay a/1"]
        assert short(train.end(first)) == ["run a/2"]
        train.down(blame=False)
    train.up()
    train.end(create)
    assert short(train.end(first)) == ["run a/2"]
    assert short(train.end(second)) == ["finish a/2"]


def test_a_call_that_runs_for_the_first_time_is_given_up_after_a_replay_too(train: Hand) -> None:
    create, deadly = calls_of("a", CREATE, FB)
    train.work(create)
    train.arrive(deadly)
    for _ in range(2):
        train.down()
        train.up()
        train.down()  # of what runs again
        train.up()
        assert short(train.end(create)) == ["run a/1"]
    assert short(train.down()) == ["fail a/1: its ranks died 3 times while it ran"]


def test_one_deadly_sample_does_not_fail_the_others(rollout: Hand) -> None:
    good, deadly = samples("s", 0, 1)
    rollout.arrive(good, deadly)
    rollout.switched()
    for _ in range(2):
        rollout.down()
        rollout.up()
        last = rollout.switched()
    assert short(last) == ["run s/0"], "on its last chance each runs alone"
    assert short(rollout.end(good)) == ["finish s/0", "run s/1"]
    assert short(rollout.down()) == ["fail s/1: its ranks died 3 times while it ran"]


def test_an_answer_from_before_the_loss_is_ignored(train: Hand) -> None:
    (create,) = calls_of("a", CREATE)
    train.arrive(create)
    train.down()
    assert train.end(create) == []


# -- sampling -----------------------------------------------------------------------------


def test_all_samples_of_the_resident_run_at_once_and_new_ones_join(rollout: Hand) -> None:
    assert short(rollout.arrive(*samples("s", 0, 1))) == ["switch nothing -> s"]
    assert short(rollout.switched()) == ["run s/0", "run s/1"]
    assert short(rollout.arrive(*samples("s", 2))) == ["run s/2"]


def test_equal_content_is_sampled_together_without_a_switch() -> None:
    rollout = Hand(ROLLOUT)
    one, two = sampled(1, "x", "base"), sampled(2, "y", "base")
    rollout.place(one, two)
    rollout.up()
    rollout.arrive(call(one, SAMPLE, 0, tokens=1))
    rollout.switched()
    assert short(rollout.arrive(call(two, SAMPLE, 0, tokens=2))) == ["run y/0"]
    rollout.later(1).end(call(one, SAMPLE, 0))
    shares = {c.job: c.gpu_us for c in rollout.charges if c.activity is Activity.BUSY}
    assert shares == {1: SECOND, 2: 2 * SECOND}


def test_a_stream_of_samples_stops_joining_when_another_has_waited_a_step(rollout: Hand) -> None:
    rollout.arrive(*samples("s", 0))
    rollout.switched()
    rollout.arrive(*samples("t", 0))
    assert short(rollout.later(1).arrive(*samples("s", 1))) == ["run s/1"]
    assert rollout.later(20).arrive(*samples("s", 2)) == [], "no more are admitted"
    rollout.end(*samples("s", 0))
    assert short(rollout.end(*samples("s", 1))) == ["finish s/1", "switch nothing -> t"]
    assert short(rollout.switched()) == ["run t/0"]


def test_whoever_was_brought_in_runs_before_anybody_else_is() -> None:
    rollout = Hand(ROLLOUT, policy="fifo")
    rollout.place(S, T)
    rollout.up()
    first, last = samples("t", 0, 1)
    assert short(rollout.arrive(first)) == ["switch nothing -> t"]
    rollout.later(1).arrive(*samples("s", 0))
    rollout.later(1).arrive(last)
    rollout.cancel(first)
    assert short(rollout.switched()) == ["run t/1"], "though s has now waited longer"


def test_a_cancelled_sample_goes_at_once(rollout: Hand) -> None:
    rollout.arrive(*samples("s", 0, 1))
    assert short(rollout.cancel(*samples("s", 1))) == ["fail s/1: cancelled"]
    assert short(rollout.switched()) == ["run s/0"]


def test_a_dropped_deployment_answers_what_waits_and_forgets_its_place(rollout: Hand) -> None:
    rollout.arrive(*samples("s", 0))
    rollout.switched()
    rollout.arrive(*samples("t", 0))
    assert short(rollout.drop(S)) == ["fail s/0: the job has ended"]
    assert short(rollout.end(*samples("s", 0))) == ["switch nothing -> t"]
    assert short(rollout.arrive(*samples("s", 3))) == [
        "fail s/3: deployment s is not here: its job has ended"
    ]


# -- the hold -----------------------------------------------------------------------------


def test_the_resident_is_waited_for_between_two_micro_steps(train: Hand) -> None:
    train.work(*calls_of("b", CREATE))
    train.arrive(*calls_of("a", CREATE))
    train.switched()
    train.end(*calls_of("a", CREATE))
    train.work(*calls_of("a", FB, first=1))
    assert train.arrive(*calls_of("b", FB, first=1)) == []
    assert train.wakes == [train.now + 2 * SECOND]
    assert "kept for job 1 for at most 2.0 s" in train.core.explain(B.id).sentence
    assert short(train.later(0.3).arrive(*calls_of("a", OPTIM, first=2))) == ["run a/2"]
    kept = [c for c in train.charges if c.activity is Activity.KEPT]
    assert [(c.job, c.stop_us - c.start_us) for c in kept] == [(1, 300_000)]


def test_the_hold_ends(train: Hand) -> None:
    train.work(*calls_of("b", CREATE))
    train.arrive(*calls_of("a", CREATE))
    train.switched()
    train.end(*calls_of("a", CREATE))
    train.work(*calls_of("a", FB, first=1))
    train.arrive(*calls_of("b", FB, first=1))
    assert short(train.later(2).tick()) == ["switch a -> b"]


def test_a_tick_that_comes_before_the_end_of_a_new_hold_asks_for_another(train: Hand) -> None:
    train.work(*calls_of("b", CREATE))
    train.arrive(*calls_of("a", CREATE))
    train.switched()
    train.end(*calls_of("a", CREATE))
    train.work(*calls_of("a", FB, first=1))
    train.arrive(*calls_of("b", FB, first=1))
    train.later(1.9).work(*calls_of("a", FB, first=2))
    assert len(train.wakes) == 1, "the tick for the first hold is still to come"
    assert train.later(0.1).tick() == []
    assert train.wakes[1] > train.now
    train.now = train.wakes[1]
    assert short(train.tick()) == ["switch a -> b"]


# -- the daemon comes back ----------------------------------------------------------------


def test_a_new_daemon_takes_over_what_runs(train: Hand) -> None:
    create, micro, optim = calls_of("a", CREATE, FB, OPTIM)
    train.work(create)
    train.arrive(micro)
    train.restart()
    train.place(A, applied=(1, 0))
    train.arrive(create, done=True)
    train.arrive(micro, optim)
    assert train.up(A, running=((micro.id, 0),)) == []
    assert short(train.later(1).end(micro)) == ["finish a/1", "run a/2"]


@pytest.mark.parametrize("ended_first", [False, True])
def test_a_call_may_be_heard_of_after_the_gang_that_runs_it(train: Hand, ended_first: bool) -> None:
    create, micro = calls_of("a", CREATE, FB)
    train.restart()
    train.place(A, applied=(1, 0))
    train.arrive(create, done=True)
    train.up(A, running=((micro.id, 0),))
    if ended_first:
        assert train.end(micro) == []
        assert short(train.arrive(micro)) == ["finish a/1"]
    else:
        assert train.arrive(micro) == []
        assert short(train.end(micro)) == ["finish a/1"]


def test_a_new_daemon_knows_what_could_not_be_created(train: Hand) -> None:
    train.restart()
    train.place(A, applied=(1, 0))
    train.arrive(call(A, CREATE, 0, doomed=True), done=True)
    train.up(A)
    reason = "the deployment could not be created"
    assert short(train.arrive(*calls_of("a", FB, first=1))) == [f"fail a/1: {reason}"]


@pytest.mark.parametrize("told", ["by the gang", "when placed"])
def test_a_replay_that_a_daemon_left_half_done_goes_on(train: Hand, told: str) -> None:
    create, micro, optim, more = calls_of("a", CREATE, FB, OPTIM, FB)
    train.restart()
    gang = told == "by the gang"
    train.place(A, applied=(3, 0) if gang else (1, 0))
    train.arrive(create, micro, optim, done=True)
    train.arrive(more)
    assert short(train.up(A, progress=(1, 0) if gang else None)) == ["replay a/1"]
    assert short(train.end(micro)) == ["replay a/2"]
    assert short(train.end(optim)) == ["run a/3"]


# -- charges ------------------------------------------------------------------------------


def test_samples_of_one_job_make_one_row_until_ten_seconds_have_passed(rollout: Hand) -> None:
    rollout.arrive(*samples("s", 0))
    rollout.switched()
    for seq in range(1, 50):
        rollout.later(0.1).arrive(*samples("s", seq))
        rollout.end(*samples("s", seq - 1))
    assert not [c for c in rollout.charges if c.activity is Activity.BUSY]
    rollout.later(6).tick()
    busy = [c for c in rollout.charges if c.activity is Activity.BUSY]
    assert [(c.job, c.call, c.gpu_us) for c in busy] == [(1, None, 3 * 10_900_000)]


def test_time_never_goes_back(train: Hand) -> None:
    (create,) = calls_of("a", CREATE)
    train.later(5).arrive(create)
    train.later(-3).end(create)
    train.later(4).down()
    stretches = [(c.start_us, c.stop_us) for c in train.charges]
    assert all(start < stop for start, stop in stretches)
    assert [stop for _, stop in stretches[:-1]] == [start for start, _ in stretches[1:]]

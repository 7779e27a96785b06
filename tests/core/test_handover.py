"""WPGs are given back and deployments move: nothing is lost, nothing runs twice at once."""

from dataclasses import replace

import pytest

from plexrl_slurm.core.errors import InvalidTransition
from plexrl_slurm.core.ids import CallId
from plexrl_slurm.core.messages import Activity
from tests.core.hand import SECOND, Hand, short
from tests.core.tiers import (
    CREATE,
    FB,
    OPTIM,
    SAMPLE,
    A,
    B,
    S,
    calls_of,
    durable,
    lost,
    samples,
    stepped,
)
from tests.core.workloads import ROLLOUT, ROLLOUT_1, TRAIN, TRAIN_1, call, sampled, trained

# -- a WPG is given back ------------------------------------------------------------------


def test_a_drain_saves_and_copies_what_is_dirty_then_says_so_once() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE, FB))
    assert short(train.drain()) == ["save a at (2, 0)"], "though its step is open"
    assert short(train.switched()) == ["persist a at (2, 0) from train-0"]
    said = short(train.persisted(A, (2, 0)))
    assert said == ["forget a below (2, 0)", "drained train-0"]
    assert train.drain() == []
    assert train.later(99).tick() == []


def test_a_drain_without_a_durable_tier_ends_with_the_host_image() -> None:
    train = Hand(TRAIN)
    train.place(A, B)
    train.up()
    train.work(*calls_of("a", CREATE))
    assert short(train.drain()) == ["save a at (1, 0)"]
    assert short(train.switched()) == ["forget a below (1, 0)", "drained train-0"]


def test_a_save_that_fails_in_a_drain_after_its_job_has_ended_is_not_tried_again() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE, FB))
    assert short(train.drain()) == ["save a at (2, 0)"]
    train.drop(A)
    assert short(train.switched(ok=False)) == ["drained train-0"]
    assert train.later(99).tick() == []


def test_a_drain_of_an_idle_wpg_ends_at_once() -> None:
    assert short(durable().drain()) == ["drained train-0"]
    clean = stepped(durable())
    assert short(clean.drain()) == ["drained train-0"]


def test_what_runs_ends_and_nothing_begins() -> None:
    train = durable()
    long = call(A, FB, 1, parts=3)
    train.work(*calls_of("a", CREATE))
    train.arrive(long, *calls_of("b", CREATE))
    assert train.drain() == []
    assert short(train.end(long)) == ["save a at (1, 1)"], "its other parts run elsewhere"
    assert short(train.switched()) == ["persist a at (1, 1) from train-0"]
    assert short(train.persisted(A, (1, 1))) == ["forget a below (1, 1)", "drained train-0"]
    train.move(A, TRAIN_1, image=(1, 1))
    train.at(TRAIN_1).held()
    train.up()
    assert short(train.switched()) == ["run a/1 part 1"]
    assert short(train.end(long, part=1)) == ["run a/1 part 2"]
    assert short(train.end(long, part=2)) == ["finish a/1"]


def test_a_switch_under_way_ends_and_whoever_came_in_waits() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    train.arrive(*calls_of("b", CREATE))
    assert train.drain() == [], "the image of a is being written for b"
    assert short(train.switched()) == ["persist a at (1, 0) from train-0"]
    assert short(train.persisted(A, (1, 0))) == ["forget a below (1, 0)", "drained train-0"]


def test_a_drain_copies_what_is_not_resident_too() -> None:
    train = durable(every=9)
    train.restart()
    train.place(A, image=(5, 0), applied=(5, 0), durable=(3, 0))
    train.place(B, image=(2, 0), applied=(2, 0), durable=(2, 0))
    train.arrive(*calls_of("a", FB, OPTIM, first=3), done=True)
    assert train.up() == []
    assert short(train.drain()) == ["persist a at (5, 0) from train-0"]
    assert short(train.persisted(A, (5, 0))) == ["forget a below (5, 0)", "drained train-0"]


def test_samples_that_run_end_and_no_more_are_admitted() -> None:
    rollout = Hand(ROLLOUT, durable_every=1)
    rollout.place(S)
    rollout.up()
    first, second, third = samples("s", 0, 1, 2)
    rollout.arrive(first, second)
    rollout.switched()
    assert rollout.drain() == []
    assert rollout.arrive(third) == []
    assert short(rollout.end(first)) == ["finish s/0"]
    assert short(rollout.end(second)) == ["finish s/1", "drained rollout-0"]
    assert rollout.core.explain(third.id).sentence == (
        "WPG rollout-0 is being given back; the deployment moves"
    )


def test_a_drain_that_is_called_off_goes_on_with_the_calls() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    assert short(train.drain()) == ["save a at (1, 0)"]
    assert train.arrive(*calls_of("a", FB, first=1)) == []
    assert train.resume() == [], "the image is still being written"
    assert short(train.switched()) == ["run a/1", "persist a at (1, 0) from train-0"]
    train.end(*calls_of("a", FB, first=1))
    train.persisted(A, (1, 0))
    assert short(train.drain()) == ["save a at (2, 0)"], "a new drain, from the beginning"


def test_a_drain_goes_on_when_the_wpg_is_up_again() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    train.drain()
    assert train.down() == []
    assert short(train.up()) == ["drained train-0"], "what was created is lost; its calls are not"


def test_a_copy_of_a_drain_outlives_the_ranks() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    train.drain()
    train.switched()
    train.down()
    assert train.up() == [], "the agent still copies"
    assert short(train.persisted(A, (1, 0))) == ["forget a below (1, 0)", "drained train-0"]


def test_a_drain_waits_for_a_copy_that_is_known_to_be_complete_but_has_not_ended() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    train.drain()
    train.switched()
    train.down()
    assert short(train.place(A, image=(1, 0), durable=(1, 0))) == ["forget a below (1, 0)"]
    assert train.up() == []
    assert short(train.persisted(A, (1, 0))) == ["drained train-0"]


def test_a_release_ends_a_drain() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    train.drain()
    assert short(train.release("the hold's time is over")) == ["drained train-0"]
    assert short(train.drain()) == ["drained train-0"], "there is nothing to wait for"


def test_a_wpg_that_nobody_knows_is_drained() -> None:
    assert short(Hand(TRAIN).at(TRAIN_1).drain()) == ["drained train-1"]


def test_a_drain_waits_for_a_copy_that_fails_and_says_so() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    train.drain()
    train.switched()
    train.arrive(*calls_of("a", FB, first=1))
    assert train.persisted(A, (1, 0), ok=False) == []
    assert train.core.explain(CallId("a/1")).sentence == (
        "WPG train-0 is being given back; the deployment moves when its state is durable; "
        "copying its state to the durable tier has failed (1 in a row) and is tried again in 5.0 s"
    )
    assert train.wakes[-1] == train.now + 5 * SECOND
    assert short(train.later(5).tick()) == ["persist a at (1, 0) from train-0"]
    train.persisted(A, (1, 0), ok=False)
    assert "(2 in a row)" in train.core.explain(A.id).sentence
    train.later(5).tick()
    assert short(train.persisted(A, (1, 0))) == ["forget a below (1, 0)", "drained train-0"]


def test_a_drain_waits_for_a_save_that_fails_and_does_not_hurry() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    train.drain()
    assert train.switched(ok=False) == []
    assert "saving its state has failed (1 in a row)" in train.core.explain(A.id).sentence
    assert short(train.later(5).tick()) == ["save a at (1, 0)"]
    assert short(train.switched()) == ["persist a at (1, 0) from train-0"]


def test_nobody_is_kept_waiting_for_on_a_wpg_that_is_given_back() -> None:
    train = durable()
    train.work(*calls_of("b", CREATE))
    train.arrive(*calls_of("a", CREATE))
    train.switched()
    train.end(*calls_of("a", CREATE))
    train.work(*calls_of("a", FB, first=1))
    train.arrive(*calls_of("b", FB, first=1))
    assert train.core.views()[0].kept_until_us is not None
    assert short(train.drain()) == ["save a at (2, 0)"]
    (view,) = train.core.views()
    assert (view.draining, view.activity, view.kept_until_us) == (True, Activity.SWITCH, None)
    assert train.core.explain(TRAIN.id).sentence.startswith("train-0 is being given back; ")


def test_a_broken_deployment_does_not_hold_a_drain_up() -> None:
    train = durable()
    create = call(A, CREATE, 0)
    train.arrive(create)
    assert train.drain() == []
    said = short(train.end(create, ok=False))
    assert said == ["fail a/0", "drained train-0"]


# -- moves --------------------------------------------------------------------------------


def test_a_planned_move_runs_nothing_again() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE, FB))
    train.arrive(*calls_of("a", OPTIM, first=2))
    train.drain()
    train.end(*calls_of("a", OPTIM, first=2))
    train.switched()
    train.persisted(A, (3, 0))
    train.arrive(*calls_of("a", FB, first=3))
    assert train.move(A, TRAIN_1, image=(3, 0)) == []
    assert train.core.explain(A.id).sentence == "its WPG is not there yet (train-1)"
    train.at(TRAIN_1).held()
    assert short(train.up()) == ["switch nothing -> a"]
    assert short(train.switched()) == ["run a/3"]


def test_a_move_to_a_wpg_that_is_up_sets_it_to_work() -> None:
    train = durable()
    train.at(TRAIN_1).held()
    train.up()
    train.at(TRAIN).down("lost", blame=False)
    train.later(9).arrive(*calls_of("a", CREATE))
    train.release("lost")
    assert short(train.later(-5).move(A, TRAIN_1)) == ["run a/0"]
    clocks = {train.core.clock_us(wpg.id) for wpg in (TRAIN, TRAIN_1)}
    assert clocks == {10 * SECOND}, "time does not go back for who moves"


def test_only_a_move_changes_a_home() -> None:
    train = Hand(TRAIN, image_every=1)
    train.place(A)
    train.up()
    train.work(*calls_of("a", CREATE, OPTIM))
    train.switched()
    train.down()
    assert train.place(replace(A, wpg=TRAIN_1.id), image=None) == []
    train.arrive(*calls_of("a", FB, first=2))
    assert short(train.up()) == ["switch nothing -> a"]


def test_a_move_is_a_line_of_the_story() -> None:
    train = stepped(durable())
    train.drain()
    train.move(A, TRAIN_1, image=(3, 0))
    train.move(A, TRAIN, image=(3, 0))
    assert train.core.story(A.id)[-3:] == (
        "[test] resident -> host: left clean, or the device was lost",
        "[test] moved from train-0 to train-1 with image (3, 0) (move 1)",
        "[test] moved from train-1 to train-0 with image (3, 0) (move 2)",
    )
    assert train.core.story(B.id) == ()


def test_a_deployment_does_not_leave_while_it_runs_or_moves_or_would_lose_changes() -> None:
    train = durable()
    (create,) = calls_of("a", CREATE)
    train.arrive(create)
    assert train.core.why_not_move(A.id) == "a call of it runs on train-0"
    with pytest.raises(InvalidTransition, match="a call of it runs on train-0"):
        train.move(A, TRAIN_1)
    with pytest.raises(InvalidTransition, match="train-0 still runs calls"):
        train.move(B, TRAIN_1)
    train.end(create)
    with pytest.raises(InvalidTransition, match="changes of it that are in no image"):
        train.move(A, TRAIN_1)
    train.drain()
    with pytest.raises(InvalidTransition, match="still moves state"):
        train.move(A, TRAIN_1)
    train.down()
    assert train.core.why_not_move(A.id) == ""
    assert train.move(A, TRAIN_1) == [], "nobody needs the leave of a WPG that is down"


def test_calls_that_wait_move_with_their_waiting_times() -> None:
    train = durable()
    train.place(trained(3, "c"))
    train.arrive(call(trained(3, "c"), CREATE, 0))
    train.later(1).arrive(*calls_of("a", CREATE))
    train.later(15).down("lost", blame=False)
    train.release("lost")
    train.move(A, TRAIN_1)
    train.at(TRAIN_1).held()
    train.move(B, TRAIN_1)
    train.later(1).arrive(*calls_of("b", CREATE))
    train.later(1).up()  # a ran for none of its 18 s
    tenant = train.core._books.homes[A.id][1]
    assert tenant.ready_us is None
    phase = train.core._books.lanes[TRAIN_1.id].phases["train a", A.job]
    assert phase.waited_us == 17 * SECOND
    assert short(train.end(*calls_of("a", CREATE)))[0] == "finish a/0"


def test_a_snapshot_moves_alone_though_others_of_its_content_stay() -> None:
    rollout = Hand(ROLLOUT)
    one, two = sampled(1, "x", "base"), sampled(2, "y", "base")
    rollout.place(one, two)
    mine, other, late = call(one, SAMPLE, 0), call(two, SAMPLE, 0), call(one, SAMPLE, 1)
    rollout.arrive(mine)
    rollout.later(1).arrive(other)
    rollout.later(1).arrive(late)
    assert rollout.move(one, ROLLOUT_1) == []
    assert short(rollout.up()) == ["switch nothing -> y"]
    assert short(rollout.switched()) == ["run y/0"]
    rollout.at(ROLLOUT_1).held()
    assert short(rollout.later(3).up()) == ["switch nothing -> x"]
    assert short(rollout.switched()) == ["run x/0", "run x/1"]
    phase = rollout.core._books.lanes[ROLLOUT_1.id].phases["", one.job]
    assert (phase.waited_us, phase.waiting, phase.running) == (5 * SECOND, 0, 2)


def test_samples_of_a_moved_snapshot_keep_their_order_among_those_that_are_there() -> None:
    rollout = Hand(ROLLOUT)
    here, there = sampled(1, "x", "base"), sampled(2, "y", "base")
    rollout.place(here)
    rollout.at(ROLLOUT_1).place(replace(there, wpg=ROLLOUT_1.id))
    rollout.arrive(call(here, SAMPLE, 0))
    rollout.later(1).arrive(call(there, SAMPLE, 0))
    rollout.later(1).arrive(call(here, SAMPLE, 1))
    rollout.move(here, ROLLOUT_1)
    rollout.held()
    rollout.up()
    assert short(rollout.switched()) == ["run x/0", "run y/0", "run x/1"]


def test_samples_lost_with_their_node_run_again_elsewhere() -> None:
    rollout = Hand(ROLLOUT)
    rollout.place(S)
    rollout.up()
    rollout.arrive(*samples("s", 0, 1))
    rollout.later(4).switched()
    rollout.end(*samples("s", 0))
    rollout.down("lost", blame=False)
    rollout.release("lost")
    rollout.move(S, ROLLOUT_1)
    rollout.at(ROLLOUT_1).held()
    assert short(rollout.later(3).up()) == ["switch nothing -> s"]
    assert short(rollout.switched()) == ["run s/1"]
    phase = rollout.core._books.lanes[ROLLOUT_1.id].phases["", S.job]
    assert phase.waited_us == (4 + 3) * SECOND


def test_a_wpg_of_the_same_name_can_take_its_deployments_again() -> None:
    train = stepped(durable(every=5), steps=2)
    train.arrive(*calls_of("a", FB, first=5))
    train.down("lost", blame=False)
    train.release("lost")
    assert train.move(A, TRAIN, image=(3, 0)) == []
    assert train.core.explain(A.id).sentence.endswith("its WPG is not there yet (train-0)")
    train.held()
    assert short(train.up()) == ["switch nothing -> a"]
    assert short(train.switched()) == ["replay a/3"]


def test_who_lives_on_a_wpg_that_is_gone_waits_and_is_told_why() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE))
    train.arrive(*calls_of("a", FB, first=1))
    train.down("node n1 was lost", blame=False)
    train.release("node n1 was lost")
    said = "its WPG train-0 is gone (node n1 was lost); it waits for another WPG"
    rebuilt = "its state is being rebuilt: 1 earlier calls run again first; "
    assert train.core.explain(CallId("a/1")).sentence == rebuilt + said
    assert train.core.explain(B.id).sentence == said
    assert train.core.explain(TRAIN.id).sentence == "train-0 is gone (node n1 was lost)"
    assert train.core.views() == ()


def test_a_move_of_what_is_not_here_is_nothing() -> None:
    train = durable()
    train.drop(A)
    assert train.move(A, TRAIN_1) == []
    assert train.persisted(A, (1, 0)) == []


def test_the_last_to_leave_a_released_wpg_takes_its_record_along() -> None:
    train = durable()
    train.release("lost")
    train.move(A, TRAIN_1)
    assert "train-0" in train.core._books.lanes
    train.drop(B)
    assert "train-0" not in train.core._books.lanes
    train.move(A, TRAIN)
    assert "train-1" not in train.core._books.lanes


def test_a_copy_that_ends_after_the_move_is_known_and_deletes_nothing() -> None:
    train = stepped(durable(every=2), steps=3)  # (7, 0) is being copied
    lost(train, (3, 0))
    assert train.persisted(A, (7, 0)) == [], "its new home still begins with (3, 0)"
    train.arrive(*calls_of("a", FB, first=7))
    train.up()
    assert short(train.switched()) == ["replay a/3"]

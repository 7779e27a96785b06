"""Calls are kept until a durable image has them; then a node can be lost with all it has."""

from dataclasses import replace

import pytest

from plexrl_slurm.core.messages import Activity
from plexrl_slurm.core.ordering import START, Entry, Program
from tests.core.hand import SECOND, Hand, short
from tests.core.tiers import (
    CREATE,
    FB,
    OPTIM,
    A,
    calls_of,
    durable,
    lost,
    stepped,
)
from tests.core.workloads import TRAIN, TRAIN_1

# -- durable images -----------------------------------------------------------------------


def test_the_first_image_is_copied_and_calls_are_kept_until_it_is_durable() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE, FB, OPTIM))
    assert short(train.switched()) == ["persist a at (3, 0) from train-0"]
    assert short(train.persisted(A, (3, 0))) == ["forget a below (3, 0)"]


def test_the_next_copy_is_made_when_enough_steps_are_in_no_durable_image() -> None:
    train = stepped(durable(every=2))
    train.work(*calls_of("a", FB, OPTIM, first=3))
    assert short(train.switched()) == [], "one step"
    train.work(*calls_of("a", FB, OPTIM, first=5))
    assert short(train.switched()) == ["persist a at (7, 0) from train-0"]
    assert short(train.persisted(A, (7, 0))) == ["forget a below (7, 0)"]


def test_while_a_copy_is_made_calls_go_on_and_no_other_begins() -> None:
    train = durable(every=1)
    train.work(*calls_of("a", CREATE, OPTIM))
    assert short(train.switched()) == ["persist a at (2, 0) from train-0"]
    assert short(train.work(*calls_of("a", OPTIM, first=2))) == ["finish a/2", "save a at (3, 0)"]
    assert short(train.switched()) == [], "one copy at a time"
    said = short(train.persisted(A, (2, 0)))
    assert said == ["forget a below (2, 0)", "persist a at (3, 0) from train-0"]


def test_a_copy_may_be_newer_than_what_was_asked_for() -> None:
    train = durable(every=1)
    train.work(*calls_of("a", CREATE, OPTIM))
    train.switched()
    train.work(*calls_of("a", OPTIM, first=2))
    train.switched()
    assert short(train.persisted(A, (3, 0))) == ["forget a below (3, 0)"], "and no second copy"


def test_a_copy_heard_of_before_its_image_forgets_nothing_too_early() -> None:
    train = durable(every=1)
    train.work(*calls_of("a", CREATE, OPTIM))
    train.switched()
    train.work(*calls_of("a", OPTIM, first=2))
    assert short(train.persisted(A, (3, 0))) == ["forget a below (2, 0)"]
    assert short(train.switched()) == ["forget a below (3, 0)"]


def test_an_older_copy_that_is_heard_of_late_changes_nothing() -> None:
    train = stepped(durable(every=2), steps=3)
    train.persisted(A, (7, 0))
    assert train.persisted(A, (3, 0)) == []
    assert short(train.drain()) == ["drained train-0"]


def test_steps_that_have_not_run_do_not_count() -> None:
    train = stepped(durable(every=3))
    todo = calls_of("a", *[OPTIM] * 5, first=3)
    train.arrive(*todo)
    assert short(train.end(todo[0])) == ["finish a/3", "run a/4"]
    assert short(train.end(todo[1])) == ["finish a/4", "save a at (5, 0)"]
    assert short(train.switched()) == ["run a/5"], "two steps are in no durable image"


def test_a_copy_that_went_with_its_agent_is_made_when_the_wpg_is_held_again() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE, OPTIM))
    assert short(train.switched()) == ["persist a at (2, 0) from train-0"]
    train.release()
    train.held()
    assert short(train.up()) == ["persist a at (2, 0) from train-0"]


def test_a_failed_copy_is_tried_again_after_a_while_and_not_before() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE, OPTIM))
    train.switched()
    assert train.persisted(A, (2, 0), ok=False) == []
    assert train.wakes == [train.now + 5 * SECOND]
    assert train.later(4).tick() == []
    assert short(train.later(1).tick()) == ["persist a at (2, 0) from train-0"]
    assert train.later(60).tick() == [], "it is under way"


def test_a_failed_copy_is_tried_again_with_the_next_image() -> None:
    train = durable()
    train.work(*calls_of("a", CREATE, OPTIM))
    train.switched()
    train.persisted(A, (2, 0), ok=False)
    train.work(*calls_of("a", OPTIM, first=2))
    assert short(train.switched()) == ["persist a at (3, 0) from train-0"]


def test_without_a_durable_tier_nothing_is_copied() -> None:
    train = Hand(TRAIN, image_every=1)
    train.place(A)
    train.up()
    train.work(*calls_of("a", CREATE, OPTIM))
    assert short(train.switched()) == ["forget a below (2, 0)"]


def test_a_new_daemon_copies_what_the_old_one_left_undone() -> None:
    train = durable(every=2)
    train.restart()
    train.place(A, image=(5, 0), applied=(5, 0), durable=(1, 0))
    done = calls_of("a", FB, OPTIM, FB, OPTIM, first=1)
    assert train.arrive(*done, done=True) == []
    assert short(train.up()) == ["persist a at (5, 0) from train-0"]
    assert short(train.persisted(A, (5, 0))) == ["forget a below (5, 0)"]


def test_a_home_loads_the_newer_of_its_host_image_and_the_durable_one() -> None:
    train = durable()
    train.restart()
    train.place(A, image=None, applied=(3, 0), durable=(3, 0))
    train.arrive(*calls_of("a", FB, first=3))
    assert short(train.up()) == ["switch nothing -> a"]
    assert short(train.switched()) == ["run a/3"]
    train.end(*calls_of("a", FB, first=3))
    train.down()
    train.place(A, image=(1, 0), durable=(3, 0))
    train.arrive(*calls_of("a", OPTIM, first=4))
    train.up()
    assert short(train.switched()) == ["replay a/3"]


def test_a_new_daemon_copies_nothing_before_it_is_due() -> None:
    train = durable(every=2)
    train.restart()
    train.place(A, image=(3, 0), applied=(3, 0), durable=(1, 0))
    train.arrive(*calls_of("a", FB, OPTIM, first=1), done=True)
    assert train.up() == []


# -- a node is lost -----------------------------------------------------------------------


def test_calls_after_the_durable_image_run_again_at_the_new_home() -> None:
    train = stepped(durable(every=5), steps=3)
    lost(train, (3, 0))
    (waits,) = calls_of("a", FB, first=7)
    assert train.arrive(waits) == []
    assert short(train.up()) == ["switch nothing -> a"]
    assert short(train.switched()) == ["replay a/3"]
    todo = calls_of("a", FB, OPTIM, FB, OPTIM, first=3)
    assert [short(train.end(one)) for one in todo] == [
        ["replay a/4"], ["replay a/5"], ["replay a/6"], ["save a at (7, 0)"],
    ]  # fmt: skip
    assert short(train.switched()) == ["run a/7"]
    assert short(train.end(waits)) == ["finish a/7"]


def test_a_call_that_ran_is_not_to_blame_for_a_lost_node() -> None:
    train = durable()
    (create,) = calls_of("a", CREATE)
    train.arrive(create)
    for _ in range(4):
        assert train.down("node n1 was lost", blame=False) == []
        assert short(train.up()) == ["run a/0"]
    assert short(train.end(create)) == ["finish a/0"]


def test_without_any_image_calls_run_again_from_create() -> None:
    train = durable(image_every=10)
    train.work(*calls_of("a", CREATE, FB))
    lost(train, None)
    train.arrive(*calls_of("a", OPTIM, first=2))
    assert short(train.up()) == ["replay a/0"]
    assert short(train.end(*calls_of("a", CREATE))) == ["replay a/1"]
    assert short(train.end(*calls_of("a", FB, first=1))) == ["run a/2"]


def test_a_host_image_without_a_durable_one_breaks_what_cannot_be_rebuilt() -> None:
    train = Hand(TRAIN, image_every=1)
    train.place(A)
    train.up()
    train.work(*calls_of("a", CREATE, OPTIM))
    train.switched()
    train.arrive(*calls_of("a", FB, first=2))
    train.release("lost")
    reason = (
        "its state is lost: its newest image is gone, and so are calls that no older one "
        "contains; start from a checkpoint"
    )
    assert short(train.move(A, TRAIN_1)) == [f"fail a/2: {reason}"]
    assert short(train.arrive(*calls_of("a", FB, first=3))) == [f"fail a/3: {reason}"]


def test_calls_that_the_image_has_are_answered_though_their_end_was_not_heard_of() -> None:
    train = durable()
    train.restart()
    train.place(A, applied=(1, 0))
    train.arrive(*calls_of("a", CREATE), done=True)
    train.arrive(*calls_of("a", FB, OPTIM, first=1))
    said = short(train.move(A, TRAIN_1, image=(3, 0)))
    assert said == ["finish a/1", "finish a/2", "forget a below (3, 0)"]


@pytest.mark.parametrize("restarted", [False, True])
def test_whether_a_step_is_open_is_a_matter_of_the_durable_image(restarted: bool) -> None:
    train = durable(every=5)
    train.work(*calls_of("a", CREATE, FB))
    (create,) = calls_of("b", CREATE)
    train.arrive(create)
    train.later(3).tick()  # a leaves in the middle of its step
    assert short(train.switched()) == ["run b/0", "persist a at (2, 0) from train-0"]
    train.end(create)
    train.persisted(A, (2, 0))
    train.arrive(*calls_of("a", OPTIM, first=2))
    train.later(30).tick()
    train.switched()
    train.end(*calls_of("a", OPTIM, first=2))
    train.switched()  # the host image (3, 0) has no open step
    program = train.core._books.homes[A.id][1].program
    assert program is not None and (program.image, program.open_step) == ((3, 0), False)
    lost(train, (2, 0))
    if restarted:
        train.restart()
        train.place(replace(A, wpg=TRAIN_1.id), image=(2, 0), durable=(1, 0), applied=(2, 0))
        train.arrive(*calls_of("a", FB, first=1), done=True)
        train.arrive(*calls_of("a", OPTIM, first=2), done=True)
        train.arrive(*calls_of("a", FB, first=3))
        train.up()
        train.switched()
        program = train.core._books.homes[A.id][1].program
    assert program is not None and (program.position, program.open_step) == ((2, 0), True)


def test_the_flag_of_an_open_step_follows_each_image_through_two_losses() -> None:
    program = Program(image=None, applied=START, tiered=True)
    entries = [Entry.of(one, at_us=0) for one in calls_of("a", CREATE, FB, OPTIM, FB)]
    for entry in entries:
        program.add(entry)
    for entry in entries[:2]:
        program.ended(entry, 0, ok=True)
    program.saved((2, 0))
    program.persisted((2, 0))
    for _ in range(2):
        assert (program.position, program.open_step) == ((2, 0), True)
        program.ended(entries[2], 0, ok=True)
        program.saved((3, 0))
        program.ended(entries[3], 0, ok=True)
        assert program.open_step
        program.rewind()
        assert (program.position, program.open_step) == ((3, 0), False), "the host image"
        program.moved((2, 0))
        program.rewind()
    assert (program.position, program.applied) == ((2, 0), (2, 0))
    assert program.open_step and not program.broken


def test_a_second_loss_before_the_next_durable_image_loses_nothing() -> None:
    train = stepped(durable(every=5), steps=2)
    lost(train, (3, 0))
    train.arrive(*calls_of("a", FB, first=5))
    train.up()
    train.switched()
    for one in calls_of("a", FB, OPTIM, first=3):
        train.end(one)
    assert train.down("node n2 was lost", blame=False) == []
    train.release("node n2 was lost")
    train.move(A, TRAIN, image=(3, 0))
    train.at(TRAIN).held()
    assert short(train.up()) == ["switch nothing -> a"]
    assert short(train.switched()) == ["replay a/3"]


def test_a_durable_image_whose_report_was_lost_is_used() -> None:
    train = stepped(durable(every=2), steps=3)
    lost(train, (7, 0))
    train.arrive(*calls_of("a", FB, first=7))
    train.up()
    assert short(train.switched()) == ["run a/7"]


def test_time_until_the_rebuilt_state_is_back_is_the_jobs() -> None:
    train = stepped(durable(every=5), steps=2)
    lost(train, (3, 0))
    train.arrive(*calls_of("a", FB, first=5))
    train.later(10).up()
    train.later(1).switched(moved_bytes=1)
    train.later(2).end(*calls_of("a", FB, first=3))
    train.later(3).end(*calls_of("a", OPTIM, first=4))
    spent: dict[Activity, int] = {}
    for row in train.charges:
        if row.wpg == TRAIN_1.id:
            spent[row.activity] = spent.get(row.activity, 0) + row.gpu_us
            assert row.job == (None if row.activity is Activity.DOWN else 1)
    assert spent == {
        Activity.DOWN: 20 * SECOND, Activity.SWITCH: 2 * SECOND, Activity.BUSY: 10 * SECOND,
    }  # fmt: skip


# -- durable images that turn out to be damaged -------------------------------------------------


def test_when_a_durable_image_is_found_damaged_another_copy_is_made() -> None:
    train = stepped(durable(every=10), steps=2)
    assert short(train.durable_lost(A, None)) == ["persist a at (5, 0) from train-0"]
    assert short(train.persisted(A, (5, 0))) == ["forget a below (5, 0)"]
    assert any("a durable image is damaged" in line for line in train.core.story(A.id))

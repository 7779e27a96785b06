"""Holds: their numbers, their life in Slurm, faults of their nodes, drained partitions."""

import pytest
from sqlalchemy.orm import Session

from plexrl_slurm.core.errors import NotFound
from plexrl_slurm.core.ids import SlurmId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.db import holds
from plexrl_slurm.db.models import HoldState

TRAIN = Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=2)


def open_one(session: Session, *, replaces: str = "") -> str:
    name = holds.next_hold_id(session)
    holds.open_hold(
        session,
        hold_id=name,
        partition="p",
        backend="slurm",
        slurm_id=SlurmId("7"),
        epoch="1",
        now_us=10,
        replaces=replaces,
    )
    return name


def test_holds_are_numbered_and_no_number_comes_back(session: Session) -> None:
    first = open_one(session)
    second = open_one(session, replaces=first)
    holds.end_hold(session, second, now_us=11)
    assert (first, second, holds.next_hold_id(session)) == ("h1", "h2", "h3")
    assert [row.id for row in holds.live_holds(session, "p")] == ["h1"]
    assert holds.get_hold(session, second).replaces == "h1"
    with pytest.raises(NotFound):
        holds.get_hold(session, "h9")


def test_a_hold_that_slurm_requeues_waits_and_has_no_wpgs(session: Session) -> None:
    name = open_one(session)
    holds.hold_runs(session, name, since_us=20)
    holds.hold_wpgs(session, name, [holds.Stay(wpg=TRAIN, held_us=20, node="n1")])
    (stay,) = holds.held_wpgs(session, name)
    assert (stay.name, stay.node, stay.slot, stay.held_us) == ("train-0", "n1", "train-0", 20)
    holds.hold_waits(session, name, reason="preempted", now_us=30)
    row = holds.get_hold(session, name)
    assert (row.state, row.running_us, row.reason) == (HoldState.WAITING, None, "preempted")
    assert holds.held_wpgs(session, name) == []
    holds.hold_runs(session, name, since_us=40)
    assert holds.get_hold(session, name).running_us == 40


def test_a_hold_may_drain_and_be_wanted_again(session: Session) -> None:
    name = open_one(session)
    holds.set_draining(session, name, on=True, reason="its limit is near")
    assert holds.get_hold(session, name).draining
    holds.set_draining(session, name, on=False, reason="")
    assert not holds.get_hold(session, name).draining


def test_faults_of_nodes_are_listed_since_an_instant(session: Session) -> None:
    for at_us, node in ((1, "n1"), (5, "n2"), (9, "n1")):
        holds.node_failed(session, partition="p", node=node, reason="DOWN", now_us=at_us)
    holds.node_failed(session, partition="other", node="n3", reason="DOWN", now_us=9)
    found = holds.node_faults(session, partition="p", since_us=5)
    assert [(fault.node, fault.at_us) for fault in found] == [("n2", 5), ("n1", 9)]


def test_what_an_admin_said_of_a_partition_is_remembered(session: Session) -> None:
    assert not holds.partition_draining(session, "p")
    for on in (True, True, False):
        holds.set_partition_draining(session, "p", on=on)
        assert holds.partition_draining(session, "p") is on


def test_the_newest_epoch_is_that_of_the_holds_that_live(session: Session) -> None:
    assert holds.newest_epoch(session, "p") == 0
    first, second = open_one(session), open_one(session)
    holds.set_hold_epoch(session, first, "9")
    holds.set_hold_epoch(session, second, "10")
    assert holds.newest_epoch(session, "p") == 10
    assert holds.newest_epoch(session, "another") == 0
    holds.end_hold(session, second, now_us=11)
    assert holds.newest_epoch(session, "p") == 9

"""What jobs have been like: written over, and read newest last."""

from typing import Any

from plexrl_slurm.db import profiles
from plexrl_slurm.db.engine import Session


def save(session: Session, **changes: Any) -> None:
    values: dict[str, Any] = {
        "partition": "rlvr",
        "user": "ada",
        "name": "grpo",
        "model": "tiny",
        "gpus": 8,
        "learned": {"steps": 5},
        "run_steps": 0,
        "run_us": 0,
        "now_us": 10,
    }
    profiles.save(session, **(values | changes))


def test_a_second_time_the_same_row_is_written_over(session: Session) -> None:
    save(session)
    save(session, learned={"steps": 20}, run_steps=20, run_us=7, now_us=20)
    save(session, gpus=16)
    first, second = profiles.newest(session, partition="rlvr")
    assert (first.gpus, first.learned, first.updated_us) == (16, {"steps": 5}, 10)
    assert (second.gpus, second.learned) == (8, {"steps": 20})
    assert (second.run_steps, second.run_us, second.updated_us) == (20, 7, 20)


def test_another_partitions_rows_are_not_read(session: Session) -> None:
    save(session, partition="other")
    assert profiles.newest(session, partition="rlvr") == []
    assert len(profiles.newest(session, partition="other")) == 1

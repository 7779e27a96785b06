"""What squeue 22.05 was seen to say of a job that has just been queued."""

import pytest

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.slurm.port import SlurmState
from plexrl_slurm.slurm.queued import queued_jobs


def test_a_job_has_its_owner_account_and_name() -> None:
    ((number, status),) = queued_jobs(b"464|1001|plxalice|research|PENDING|x|\n").items()
    assert (number, status.state, status.uid) == ("464", SlurmState.PENDING, 1001)
    assert (status.user, status.account, status.name) == ("plxalice", "research", "x")
    assert (status.array_id, status.array_task) == (None, None)


def test_an_array_is_its_tasks_and_a_name_may_have_bars() -> None:
    found = queued_jobs(b"463_1|0|root|root|PENDING|a|b c|\n463_2|0|root|root|ODD|a|b c|\n")
    assert [(number, each.array_id, each.array_task) for number, each in found.items()] == [
        ("463_1", "463", 1),
        ("463_2", "463", 2),
    ]
    assert {each.name for each in found.values()} == {"a|b c"}
    assert [each.state for each in found.values()] == [SlurmState.PENDING, SlurmState.UNSURE]


def test_nothing_is_nothing_and_garbage_is_no_answer() -> None:
    assert queued_jobs(b"") == {}
    assert queued_jobs(b"7+0|0|root|root|PENDING|x|\n7+1|0|root|root|PENDING|x|\n") == {}
    with pytest.raises(SlurmUnavailable, match="cannot be read: 'hello'"):
        queued_jobs(b"hello\n")

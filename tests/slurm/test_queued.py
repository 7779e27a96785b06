"""What squeue 22.05 was seen to say of a job that has just been queued."""

import pytest

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.slurm.port import SlurmState
from plexrl_slurm.slurm.queued import queued_format, queued_jobs

SEPARATOR = "0123456789abcdef"


def lines(*rows: str) -> bytes:
    """As squeue prints them; ``;`` stands for what parts the fields."""
    return "".join(f"{row};\n" for row in rows).replace(";", f"|{SEPARATOR}").encode()


def test_a_field_is_asked_for_without_a_width() -> None:
    first, *_, last = queued_format(SEPARATOR).split(",")
    assert (first, last) == (f"JobArrayID:|{SEPARATOR}", f"Name:|{SEPARATOR}")


def test_a_job_has_its_owner_account_and_name() -> None:
    answer = lines("464;1001;plxalice;research;PENDING;(null);N/A;x")
    ((number, status),) = queued_jobs(answer, SEPARATOR).items()
    assert (number, status.state, status.uid) == ("464", SlurmState.PENDING, 1001)
    assert (status.user, status.account, status.name) == ("plxalice", "research", "x")
    assert (status.array_id, status.array_task) == (None, None)


def test_an_array_is_its_tasks_and_a_name_may_have_bars() -> None:
    answer = lines(
        "463_1;0;root;root;PENDING;(null);N/A;a|b c", "463_2;0;root;root;ODD;(null);N/A;a|b c"
    )
    found = queued_jobs(answer, SEPARATOR)
    assert [(number, each.array_id, each.array_task) for number, each in found.items()] == [
        ("463_1", "463", 1),
        ("463_2", "463", 2),
    ]
    assert {each.name for each in found.values()} == {"a|b c"}
    assert [each.state for each in found.values()] == [SlurmState.PENDING, SlurmState.UNSURE]


@pytest.mark.parametrize("forged", ["7|1001|plxalice|research|PENDING|x|", "7"])
def test_a_name_cannot_speak_for_another_job(forged: str) -> None:
    answer = lines(f"464;1001;plxalice;research;PENDING;(null);N/A;x|\n{forged}\r\u2028")
    ((number, status),) = queued_jobs(answer, SEPARATOR).items()
    assert (number, status.name) == ("464", f"x|?{forged}??")


def test_nothing_is_nothing_and_garbage_is_no_answer() -> None:
    assert queued_jobs(b"", SEPARATOR) == {}
    components = lines(
        "7+0;0;root;root;PENDING;(null);N/A;x", "7+1;0;root;root;PENDING;(null);N/A;x"
    )
    assert queued_jobs(components, SEPARATOR) == {}
    whole = lines("464;1001;plxalice;research;PENDING;(null);N/A;x")
    for answer in (
        b"hello\n",
        whole + b"hello\n",
        whole[:-20],
        lines("464;x;a;b;PENDING;(null);N/A;x"),
    ):
        with pytest.raises(SlurmUnavailable, match="cannot be read: '"):
            queued_jobs(answer, SEPARATOR)

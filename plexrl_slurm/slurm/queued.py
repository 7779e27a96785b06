"""A job that was submitted just now, asked for in a tenth of the time that a JSON answer takes.

A job's name is its user's, who may write what looks like another job's line. So fields are parted
by a word that nobody can guess, made for each call.
"""

from collections.abc import Mapping
from typing import Final

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.parse_words import printable
from plexrl_slurm.slurm.port import JobStatus, SlurmState

_FIELDS: Final = (
    "JobArrayID",
    "UserID",
    "UserName",
    "Account",
    "State",
    "Dependency",
    "EligibleTime",
    "Name",
)
_WORDS: Final = frozenset(map(str, SlurmState))


def queued_format(separator: str) -> str:
    """``squeue --Format``; a width would begin with a digit, so a bar comes first."""
    return ",".join(f"{field}:|{separator}" for field in _FIELDS)


def queued_jobs(output: bytes, separator: str) -> Mapping[SlurmId, JobStatus]:
    """The job, or each task of the array; nothing of a heterogeneous job."""
    text = output.decode(errors="replace")
    *values, rest = text.split(f"|{separator}")
    count = len(_FIELDS)
    if len(values) % count or rest.strip():
        raise _unreadable(text)
    found: dict[SlurmId, JobStatus] = {}
    for at in range(0, len(values), count):
        number, uid, user, account, word, dependency, eligible, name = values[at : at + count]
        number = number.strip()
        if not uid.isdecimal():
            raise _unreadable(text)
        array, _, task = number.partition("_")
        if not (array + task).isdecimal():  # 7+1: a component is no job of its own
            continue
        found[SlurmId(number)] = JobStatus(
            state=SlurmState(word) if word in _WORDS else SlurmState.UNSURE,
            word=word,
            uid=int(uid),
            user=user,
            account=account,
            name=printable(name),
            dependency="" if dependency == "(null)" else dependency,
            eligible_us=int(eligible) * 1_000_000 if eligible.isdecimal() else None,
            array_id=SlurmId(array) if task else None,
            array_task=int(task) if task.isdecimal() else None,
        )
    return found


def _unreadable(text: str) -> SlurmUnavailable:
    return SlurmUnavailable(f"squeue's answer cannot be read: {text[:80]!r}")

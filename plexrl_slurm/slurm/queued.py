"""A job that was submitted just now, asked for in a tenth of the time that a JSON answer takes."""

from collections.abc import Mapping
from typing import Final

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.port import JobStatus, SlurmState

#: For ``squeue --Format``; the name is last, because it may have any letter in it.
FORMAT: Final = ",".join(
    f"{field}:|" for field in ("JobArrayID", "UserID", "UserName", "Account", "State", "Name")
)
_WORDS: Final = frozenset(map(str, SlurmState))


def queued_jobs(output: bytes) -> Mapping[SlurmId, JobStatus]:
    """The job, or each task of the array; nothing of a heterogeneous job."""
    found: dict[SlurmId, JobStatus] = {}
    for line in output.decode(errors="replace").splitlines():
        parts = [part.strip() for part in line.split("|", 5)]
        if len(parts) < 6 or not parts[1].isdecimal():
            raise SlurmUnavailable(f"squeue's answer cannot be read: {line[:80]!r}")
        number, uid, user, account, word, name = parts
        array, _, task = number.partition("_")
        if not (array + task).isdecimal():  # 7+1: a component is no job of its own
            continue
        found[SlurmId(number)] = JobStatus(
            state=SlurmState(word) if word in _WORDS else SlurmState.UNSURE,
            word=word,
            uid=int(uid),
            user=user,
            account=account,
            name=name.removesuffix("|"),
            array_id=SlurmId(array) if task else None,
            array_task=int(task) if task.isdecimal() else None,
        )
    return found

"""``sacct``'s records.

Their texts are the users', who may write what looks like a record. So fields are parted by a
word that nobody can guess, made for each call.
"""

import itertools
from collections import defaultdict

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.parse import forgotten, state_of
from plexrl_slurm.slurm.parse_words import exit_pair, hosts, printable, tasks, tres_gpus
from plexrl_slurm.slurm.port import ENDED, JobStatus, PastJob, SlurmState

#: ``--format``. The comments come last: only they may have line breaks.
FIELDS = (
    "JobIDRaw",
    "JobID",
    "State",
    "User",
    "UID",
    "Account",
    "Start",
    "End",
    "Submit",
    "ElapsedRaw",
    "AllocTRES",
    "ReqTRES",
    "NodeList",
    "ExitCode",
    "JobName",
    "Partition",
    "SystemComment",
    "AdminComment",
    "Comment",
)


def _rows(output: bytes, separator: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    held = ""
    for line in output.decode(errors="replace").split("\n"):
        held = f"{held}\n{line}" if held else line
        missing = len(FIELDS) - 1 - held.count(separator)
        if missing > 0:
            continue
        if missing < 0:
            raise SlurmUnavailable(f"sacct printed a line that is no record ({line[:80]!r})")
        rows.append(dict(zip(FIELDS, held.split(separator), strict=True)))
        held = ""
        # A comment's later lines have no separator, so they land in front of the next record.
    if rows and held.strip():
        rows[-1]["Comment"] += f"\n{held.rstrip()}"
    elif held.strip():
        raise SlurmUnavailable(f"sacct printed something that is no record ({held[:80]!r})")
    for before, row in itertools.pairwise(rows):
        tail, _, first = row["JobIDRaw"].rpartition("\n")
        before["Comment"] += f"\n{tail}" if tail else ""
        row["JobIDRaw"] = first
    return rows


def _ids(row: dict[str, str]) -> list[tuple[SlurmId, SlurmId | None, int | None]]:
    """``(id, array's id, task)`` of the record, or of each waiting task in it."""
    raw, shown = row["JobIDRaw"], row["JobID"]
    if not raw.isdecimal():
        raise SlurmUnavailable(f"sacct printed a record without a number ({raw[:80]!r})")
    array, bar, task = shown.partition("_")
    if not bar:
        return [(SlurmId(raw), None, None)]
    try:
        indices = tasks(task)
    except ValueError:
        raise SlurmUnavailable(f"sacct printed a task that is none ({shown[:80]!r})") from None
    return [(SlurmId(f"{array}_{index}"), SlurmId(array), index) for index in indices]


def past(output: bytes, separator: str) -> dict[SlurmId, tuple[PastJob, ...]]:
    """``sacct --duplicates``: every incarnation, oldest first."""
    found: defaultdict[SlurmId, list[PastJob]] = defaultdict(list)
    for row in _rows(output, separator):
        word, state = state_of(row["State"])
        # An incarnation that was requeued has ended; the job has not.
        state = SlurmState.FAILED if word == "REQUEUED" else state
        for job, _, _ in _ids(row):
            found[job].append(
                PastJob(
                    id=job,
                    state=state,
                    word=word,
                    user=row["User"],
                    account=row["Account"],
                    start_us=_moment(row["Start"]),
                    end_us=_moment(row["End"]),
                    elapsed_us=_whole(row["ElapsedRaw"]) * 1_000_000,
                    gpus=tres_gpus(row["AllocTRES"]),
                    nodes=hosts(row["NodeList"]),
                    exit_code=exit_pair(row["ExitCode"]) if state in ENDED else None,
                    comment=row["Comment"],
                    admin_comment=row["AdminComment"],
                    system_comment=row["SystemComment"],
                )
            )
    return {job: tuple(sorted(many, key=_begun)) for job, many in found.items()}


def ended(output: bytes, separator: str) -> dict[SlurmId, JobStatus]:
    """Jobs that slurmctld has forgotten, as accounting has them."""
    found: dict[SlurmId, JobStatus] = {}
    for row in _rows(output, separator):
        word, state = state_of(row["State"])
        leader, plus, offset = row["JobID"].partition("+")
        for job, array, task in _ids(row):
            status = JobStatus(
                state=state,
                exit_code=exit_pair(row["ExitCode"]) if state in ENDED else None,
                uid=_whole(row["UID"]) if row["UID"].isdecimal() else None,
                word=word,
                name=printable(row["JobName"]),
                user=row["User"],
                account=row["Account"],
                partition=row["Partition"],
                comment=row["Comment"],
                admin_comment=row["AdminComment"],
                nodes=hosts(row["NodeList"]),
                gpus=tres_gpus(row["AllocTRES"] or row["ReqTRES"]),
                submit_us=_moment(row["Submit"]),
                start_us=_moment(row["Start"]),
                end_us=_moment(row["End"]),
                leader=SlurmId(leader) if plus and offset != "0" else None,
                array_id=array,
                array_task=task,
            )
            found[job] = forgotten(status)
    return found


def _begun(job: PastJob) -> tuple[int, int]:
    """A record that never started is the newest."""
    return (1, 0) if job.start_us is None else (0, job.start_us)


def _moment(text: str) -> int | None:
    return int(text) * 1_000_000 if text.isdecimal() and int(text) else None


def _whole(text: str) -> int:
    return int(text) if text.isdecimal() else 0

"""What Slurm's programs print, as values of the port. Pure: bytes in, values out.

Takes 22.05's JSON (plain numbers, the state a word) and that of 23.02 and later (numbers with
``set`` and ``infinite``, the state a list with flags). What cannot be read is ``UNSURE`` where it
is one job's state, else the whole answer is no answer: ``SlurmUnavailable``.
"""

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from plexrl_slurm.core.errors import SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.parse_words import (
    exit_code,
    gres_gpus,
    hosts,
    number,
    printable,
    seconds,
    tasks,
    tres_gpus,
)
from plexrl_slurm.slurm.port import ENDED, JobStatus, NodeStatus, SlurmState

_WORDS = {
    "PENDING": SlurmState.PENDING,
    "REQUEUED": SlurmState.PENDING,
    "REQUEUE_FED": SlurmState.PENDING,
    "REQUEUE_HOLD": SlurmState.PENDING,
    "RESV_DEL_HOLD": SlurmState.PENDING,
    "SPECIAL_EXIT": SlurmState.PENDING,
    "RUNNING": SlurmState.RUNNING,
    "CONFIGURING": SlurmState.RUNNING,
    "RESIZING": SlurmState.RUNNING,
    "SIGNALING": SlurmState.RUNNING,
    "STOPPED": SlurmState.RUNNING,
    "SUSPENDED": SlurmState.RUNNING,
    "COMPLETING": SlurmState.COMPLETING,
    "STAGE_OUT": SlurmState.COMPLETING,
    "COMPLETED": SlurmState.COMPLETED,
    "CANCELLED": SlurmState.CANCELLED,
    "TIMEOUT": SlurmState.TIMEOUT,
} | dict.fromkeys(
    (
        "BOOT_FAIL",
        "DEADLINE",
        "FAILED",
        "LAUNCH_FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "RECONFIG_FAIL",
        "REVOKED",
    ),
    SlurmState.FAILED,
)
#: In a list of words: these say more than the state that they stand beside.
_FLAGS = (
    "STAGE_OUT",
    "COMPLETING",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "REQUEUED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
    "CONFIGURING",
)
#: A job, or a task of an array.
ID = re.compile(r"[0-9]+(_[0-9]+)?")
_HELD = ("JobHeldUser", "JobHeldAdmin")
_NODE_GONE = {"DOWN", "ERROR", "UNKNOWN", "FUTURE", "FAIL", "DRAIN", "DRAINED", "DRAINING"}
_NODE_FLAGS = {
    "DRAIN",
    "FAIL",
    "INVALID_REG",
    "MAINTENANCE",
    "NOT_RESPONDING",
    "NO_RESPOND",
    "POWERING_DOWN",
    "REBOOT_ISSUED",
    "REBOOT_REQUESTED",
}


def document(output: bytes, what: str, key: str) -> list[dict[str, Any]] | None:
    """List ``key`` of a JSON answer; ``None`` if it has none.

    ``squeue --json`` ends with 0 and an empty list when it got no answer at all; its ``errors``
    say so.
    """
    try:
        # A job's name may have any bytes, and everybody's job is in the answer.
        whole = json.loads(output.decode(errors="replace"))
        errors, items = whole.get("errors"), whole.get(key)
    except (ValueError, AttributeError):
        raise SlurmUnavailable(_unreadable(what, output)) from None
    if errors:
        raise SlurmUnavailable(
            f"{what} got no answer ({_first_error(errors)}): see that slurmctld runs "
            f"(`scontrol ping`) and that all hosts have the same munge.key"
        )
    if items is None:
        return None
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise SlurmUnavailable(_unreadable(what, output))
    return items


def _unreadable(what: str, output: bytes) -> str:
    start = output[:80].decode(errors="replace")
    return f"{what} printed something that is no answer ({start!r}): run it by hand to see why"


def _first_error(errors: Any) -> str:
    first = errors[0] if isinstance(errors, list) else errors
    if not isinstance(first, dict):
        return str(first)[:200]
    words = (first.get(key) for key in ("description", "error"))
    return ", ".join(word for word in words if isinstance(word, str) and word) or str(first)[:200]


def jobs(output: bytes, what: str = "squeue") -> dict[SlurmId, JobStatus]:
    """``squeue --json``: components folded into their leader, arrays expanded to tasks."""
    items = document(output, what, "jobs")
    if items is None:
        raise SlurmUnavailable(_unreadable(what, output))
    found: dict[SlurmId, JobStatus] = {}
    offsets: defaultdict[SlurmId, dict[int, SlurmId]] = defaultdict(dict)
    try:
        for item in items:
            raw, status = _raw_id(item), _job(item)
            if leader := number(item.get("het_job_id")):
                head, offset = SlurmId(str(leader)), number(item.get("het_job_offset")) or 0
                offsets[head][offset] = raw
                if head != raw:
                    status = dataclasses.replace(status, leader=head)
            found |= _tasks(item, raw, status)
    except (ValueError, TypeError) as error:
        raise SlurmUnavailable(f"{what}'s answer cannot be read: {error}") from error
    for leader_id, members in offsets.items():
        if leader_id in found:
            ordered = tuple(raw for _, raw in sorted(members.items()))
            found[leader_id] = dataclasses.replace(found[leader_id], components=ordered)
    return found


def _raw_id(item: Mapping[str, Any]) -> SlurmId:
    raw = number(item.get("job_id"))
    if raw is None:
        raise ValueError("a job without a number")
    return SlurmId(str(raw))


def _tasks(
    item: Mapping[str, Any], raw: SlurmId, status: JobStatus
) -> Iterator[tuple[SlurmId, JobStatus]]:
    """The record itself, or each array task that it stands for."""
    array = number(item.get("array_job_id"))
    if not array:
        yield raw, status
        return
    index = number(item.get("array_task_id"))
    waiting = str(item.get("array_task_string") or "")
    if not waiting and index is None and status.state in ENDED:
        # `scancel --user` has cancelled every task that waited: it says no more which they were.
        yield raw, dataclasses.replace(status, array_id=SlurmId(str(array)))
        return
    for task in tasks(waiting) if waiting else () if index is None else (index,):
        key = SlurmId(f"{array}_{task}")
        yield (
            key,
            dataclasses.replace(status, array_id=SlurmId(str(array)), array_task=task),
        )


def _job(item: Mapping[str, Any]) -> JobStatus:
    word, state = state_of(item.get("job_state"))
    reason, nodes = _text(item, "state_reason"), hosts(_text(item, "nodes"))
    waits = state is SlurmState.PENDING
    minutes = number(item.get("time_limit"))
    unlimited = minutes is None and state not in ENDED
    code = exit_code(item.get("exit_code")) if state in ENDED else None
    return JobStatus(
        state=state,
        # A job that never started has Slurm's own 1 there, which is no signal.
        exit_code=1 if code == 129 and not nodes else code,
        reason="" if reason == "None" else reason,
        uid=number(item.get("user_id")),
        word=word,
        name=printable(_text(item, "name")),
        user=_text(item, "user_name"),
        account=_text(item, "account"),
        partition=_text(item, "partition"),
        comment=_text(item, "comment"),
        admin_comment=_text(item, "admin_comment"),
        dependency=_text(item, "dependency") if waits else "",
        eligible_us=seconds(item.get("eligible_time")) if waits else None,
        limit_us=minutes * 60_000_000 if minutes else None,
        held=waits and (reason in _HELD or number(item.get("priority")) == 0),
        nodes=() if waits else nodes,
        batch_node="" if waits or state in ENDED else _text(item, "batch_host"),
        gpus=tres_gpus(_text(item, "tres_alloc_str") or _text(item, "tres_req_str")),
        submit_us=seconds(item.get("submit_time")),
        start_us=None if waits else seconds(item.get("start_time")),
        end_us=None if waits or unlimited else seconds(item.get("end_time")),
        restarts=number(item.get("restart_cnt")) or 0,
    )


def state_of(value: Any) -> tuple[str, SlurmState]:
    """``(word, state)`` of Slurm's word for it, or of its list of words."""
    words = value if isinstance(value, list) else [value]
    if not words or not all(isinstance(word, str) for word in words):
        return "", SlurmState.UNSURE
    # sacct says "CANCELLED by 1001".
    words = [word.strip().partition(" ")[0].rstrip("+").upper() for word in words]
    word = next((flag for flag in _FLAGS if flag in words), words[0])
    state = _WORDS.get(word, SlurmState.UNSURE)
    if state in ENDED and any(other not in _WORDS for other in words):
        return word, SlurmState.UNSURE
    return word, state


def _text(item: Mapping[str, Any], key: str) -> str:
    value = item.get(key)
    return value if isinstance(value, str) else ""


def whole_array(array: SlurmId, found: Mapping[SlurmId, JobStatus]) -> JobStatus | None:
    """An array asked for by its own id: the task that has the most before it."""
    members = [status for status in found.values() if status.array_id == array]
    order = [SlurmState.RUNNING, SlurmState.COMPLETING, SlurmState.PENDING, SlurmState.UNSURE]
    order += [SlurmState.FAILED, SlurmState.TIMEOUT, SlurmState.CANCELLED, SlurmState.COMPLETED]
    return min(members, key=lambda status: order.index(status.state), default=None)


def with_forgotten(
    wanted: Iterable[SlurmId],
    known: Mapping[SlurmId, JobStatus],
    ask: Callable[[list[SlurmId]], Mapping[SlurmId, JobStatus]],
) -> dict[SlurmId, JobStatus]:
    """``known``, and of those that slurmctld has forgotten what accounting answers to ``ask``.

    A job is left out only if both answered, neither knows it, and it is no task of an array that
    one of them knows.
    """
    found: dict[SlurmId, JobStatus] = {}
    missing: list[SlurmId] = []
    for job in wanted:
        status = known.get(job) or whole_array(job, known)
        if status is not None:
            found[job] = status
        elif ID.fullmatch(job):
            missing.append(job)
    if not missing:
        return found
    try:
        ended = dict(ask(missing))
        # A task that never started is in its array's record, which is found by the array's number.
        arrays = {job.partition("_")[0] for job in missing if "_" in job and job not in ended}
        arrays -= {status.array_id or "" for status in known.values()}
        if arrays:
            ended |= ask([SlurmId(array) for array in sorted(arrays, key=int)])
    except SlurmUnavailable as error:
        words = f"slurmctld has forgotten it, and {error.sentence}"
        return found | dict.fromkeys(missing, JobStatus(state=SlurmState.UNSURE, reason=words))
    heard_of = {status.array_id for status in (*known.values(), *ended.values())} - {None}
    for job in missing:
        array, _, task = job.partition("_")
        status = ended.get(job) or whole_array(job, ended)
        if status is None and array in heard_of and task:
            status = _never_started(SlurmId(array), int(task))
        if status is not None:
            found[job] = status
    return found


def _never_started(array: SlurmId, task: int) -> JobStatus:
    """A task that was cancelled while it waited: Slurm takes it out of its array, without trace."""
    return JobStatus(
        state=SlurmState.CANCELLED, word="CANCELLED", exit_code=0, array_id=array, array_task=task
    )


def forgotten(status: JobStatus) -> JobStatus:
    """What accounting says of a job that slurmctld has forgotten.

    One that it calls alive is ``UNSURE``: slurmctld knows better, and does not know it.
    """
    if status.state in ENDED:
        return status
    words = f"accounting says {status.word}, slurmctld has forgotten it"
    return dataclasses.replace(status, state=SlurmState.UNSURE, reason=words, held=False)


def with_command(output: bytes, script: str) -> SlurmId | None:
    """Lowest id of a job in ``squeue --json`` whose script was the file ``script``."""
    ids = [
        number(item.get("array_job_id")) or number(item.get("het_job_id")) or number(item["job_id"])
        for item in document(output, "squeue", "jobs") or ()
        if f"{_text(item, 'command')} ".startswith(f"{script} ")
    ]
    return min((SlurmId(str(raw)) for raw in ids), key=int, default=None)


def nodes(output: bytes, what: str = "sinfo") -> dict[str, NodeStatus] | None:
    """``sinfo --json`` of 22.05, ``scontrol show nodes --json`` of later ones.

    ``None`` if the answer has no nodes in it: later ones' ``sinfo`` prints sums.
    """
    items = document(output, what, "nodes")
    if items is None:
        return None
    try:
        return {_text(item, "name"): _node(item) for item in items}
    except (ValueError, TypeError) as error:
        raise SlurmUnavailable(f"{what}'s answer cannot be read: {error}") from error


def _node(item: Mapping[str, Any]) -> NodeStatus:
    state = item.get("state")
    words = [state] if isinstance(state, str) else [str(word) for word in state or ("UNKNOWN",)]
    base, *flags = (word.upper() for word in words)
    flags += [str(flag).upper() for flag in item.get("state_flags") or ()]
    gpus, gpu_type = gres_gpus(_text(item, "gres"))
    used = tres_gpus(_text(item, "tres_used")) or gres_gpus(_text(item, "gres_used"))[0]
    return NodeStatus(
        state=base.rstrip("*~#!%$@^-"),
        usable=base in ("IDLE", "MIXED", "ALLOCATED", "COMPLETING")
        if not (base in _NODE_GONE or _NODE_FLAGS & set(flags))
        else False,
        reason=_text(item, "reason"),
        gpus=gpus,
        gpus_used=used,
        gpu_type=gpu_type,
        partitions=_names(item.get("partitions")),
        features=_names(item.get("features")),
        address=_text(item, "address"),
    )


def _names(value: Any) -> tuple[str, ...]:
    """A list of names, or one string with commas."""
    parts: Iterable[Any] = value.split(",") if isinstance(value, str) else value or ()
    return tuple(str(part) for part in parts if part)


def configuration(output: bytes) -> dict[str, str]:
    """``scontrol show config``."""
    lines = (line.partition("=") for line in output.decode(errors="replace").splitlines())
    return {key.strip(): value.strip() for key, sign, value in lines if sign and key.strip()}

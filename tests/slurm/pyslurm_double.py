"""Plays pyslurm (see pyslurm_surface.json), over the Slurm of ``FAKE_SLURM``'s folder.

It has what the adapter uses of pyslurm and nothing else, so an adapter that touches more fails.
"""

import os
import time
from pathlib import Path
from typing import Any, Self

from tests.slurm.fake_slurm import (
    CANCELLED,
    FINISHED,
    HELD,
    NO_JOB,
    REFUSALS,
    RELEASED,
    FakeSlurm,
)

__version__ = "25.11.2"


class RPCError(Exception):
    """Slurm said no, or nothing."""

    def __init__(self, errno: int = -1, msg: str | None = None) -> None:
        super().__init__(msg)
        self.errno, self.msg = errno, msg


def _slurm(*words: str) -> FakeSlurm:
    fake = FakeSlurm(Path(os.environ["FAKE_SLURM"]))
    fake.called("pyslurm", *words)
    mode = fake.mode()
    if mode == "hang":
        time.sleep(60)
    if mode in REFUSALS:
        raise RPCError(msg=REFUSALS[mode])
    if mode == "exit":
        os._exit(1)
    return fake


class JobSubmitDescription:
    """Changes of a job."""

    def __init__(self, **kwargs: Any) -> None:
        self.begin_time: int | None = None
        self.time_limit: int | None = None
        self.comment: str | None = None
        for name, value in kwargs.items():
            if name not in vars(self):
                raise AttributeError(name)
            setattr(self, name, value)


class Job:
    """A job of slurmctld; with ``Jobs.load`` its record."""

    def __init__(self, job_id: int) -> None:
        self._id = job_id
        self._record: dict[str, Any] = {}

    @classmethod
    def _of(cls, record: dict[str, Any]) -> Self:
        made = cls(record["job_id"])
        made._record = record
        return made

    def _must(self, refusal: str | None) -> None:
        if refusal is not None:
            raise RPCError(msg=refusal)

    def release(self) -> None:
        self._must(_slurm("release", str(self._id)).change(str(self._id), **RELEASED))

    def hold(self, mode: str | None = None) -> None:
        self._must(_slurm("hold", str(self._id)).change(str(self._id), **HELD))

    def cancel(self) -> None:
        refusal = _slurm("cancel", str(self._id)).change(str(self._id), **CANCELLED)
        self._must(None if refusal in (NO_JOB, FINISHED) else refusal)

    def modify(self, changes: JobSubmitDescription) -> None:
        names = {"begin_time": "start_time"}
        fields = {names.get(k, k): v for k, v in vars(changes).items() if v is not None}
        self._must(_slurm("modify", str(self._id)).change(str(self._id), **fields))

    @property
    def id(self) -> int:
        return self._id

    @property
    def name(self) -> str | None:
        return self._text("name")

    @property
    def user_id(self) -> int:
        return int(self._record["user_id"])

    @property
    def user_name(self) -> str | None:
        return self._text("user_name")

    @property
    def account(self) -> str | None:
        return self._text("account")

    @property
    def partition(self) -> str | None:
        return self._text("partition")

    @property
    def comment(self) -> str | None:
        return self._text("comment")

    @property
    def admin_comment(self) -> str | None:
        return self._text("admin_comment")

    @property
    def state(self) -> str | None:
        return self._text("job_state")

    @property
    def state_reason(self) -> str | None:
        return self._text("state_description") or self._text("state_reason")

    @property
    def priority(self) -> int | None:
        return self._number("priority", zero=0)

    @property
    def array_id(self) -> int | None:
        return self._number("array_job_id")

    @property
    def array_task_id(self) -> int | None:
        return self._number("array_task_id", zero=0)

    @property
    def array_tasks_waiting(self) -> str | None:
        text = self._text("array_task_string")
        return None if text is None else text.partition("%")[0]

    @property
    def heterogeneous_id(self) -> int | None:
        return self._number("het_job_id")

    @property
    def heterogeneous_offset(self) -> int | None:
        return self._number("het_job_offset")

    @property
    def allocated_nodes(self) -> str | None:
        return self._text("nodes")

    @property
    def batch_host(self) -> str | None:
        return self._text("batch_host")

    @property
    def time_limit(self) -> int | None:
        return self._number("time_limit")

    @property
    def submit_time(self) -> int | None:
        return self._number("submit_time")

    @property
    def start_time(self) -> int | None:
        return self._number("start_time")

    @property
    def end_time(self) -> int | None:
        return self._number("end_time")

    @property
    def requeue_count(self) -> int:
        return int(self._record["restart_cnt"])

    @property
    def exit_code(self) -> int:
        code = 0 if self.exit_code_signal else int(self._record["exit_code"]) >> 8
        return code - 128 if code >= 128 else code

    @property
    def exit_code_signal(self) -> int:
        return int(self._record["exit_code"]) & 0x7F

    @property
    def gpus(self) -> dict[str, "GPU"]:
        tres = self._text("tres_alloc_str") or self._text("tres_req_str") or ""
        pairs = (part.partition("=") for part in tres.split(",") if part.startswith("gres/gpu"))
        return {name.removeprefix("gres/"): GPU(int(count)) for name, _, count in pairs}

    def _text(self, key: str) -> str | None:
        return self._record.get(key) or None

    def _number(self, key: str, zero: int | None = None) -> int | None:
        value = self._record.get(key)
        return zero if value == 0 else value


class GPU:
    """A count of GPUs."""

    def __init__(self, count: int) -> None:
        self.count = count


class _Map(dict[Any, Any]):
    """pyslurm's collections, as far as they are one cluster's."""


class Jobs(_Map):
    """All jobs."""

    @staticmethod
    def load(preload_passwd_info: bool = False, frozen: bool = False) -> "Jobs":
        with _slurm("jobs").state() as state:
            return Jobs({record["job_id"]: Job._of(record) for record in state["jobs"]})


class Node:
    """A node's record."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record

    @property
    def name(self) -> str:
        return str(self._record["name"])

    @property
    def state(self) -> str:
        return "+".join([self._record["state"].upper(), *self._record["state_flags"]])

    @property
    def reason(self) -> str | None:
        return self._record["reason"] or None

    @property
    def configured_gres(self) -> dict[str, int]:
        return {"gpu": int(self._record["gres"].rpartition(":")[2])}

    @property
    def allocated_gres(self) -> dict[str, str]:
        return {"gpu": self._record["gres_used"].rpartition(":")[2]}

    @property
    def partitions(self) -> list[str]:
        return list(self._record["partitions"])

    @property
    def address(self) -> str | None:
        return self._record["address"] or None

    @property
    def available_features(self) -> list[str]:
        return [name for name in self._record["features"].split(",") if name]


class Nodes(_Map):
    """All nodes."""

    @staticmethod
    def load(preload_passwd_info: bool = False) -> "Nodes":
        with _slurm("nodes").state() as state:
            return Nodes({record["name"]: Node(record) for record in state["nodes"]})


class db:
    """``pyslurm.db``."""

    class JobFilter:
        """Which jobs."""

        def __init__(self, **kwargs: Any) -> None:
            self.ids: list[int] = []
            for name, value in kwargs.items():
                if name not in vars(self):
                    raise AttributeError(name)
                setattr(self, name, value)

    class Job:
        """A record of accounting."""

        def __init__(self, job_id: int = 0, cluster: str | None = None, **kwargs: Any) -> None:
            self._job = Job(job_id)

        @classmethod
        def _of(cls, record: dict[str, str]) -> Self:
            made = cls(int(record["JobIDRaw"]))
            array, bar, task = record["JobID"].partition("_")
            leader, plus, offset = record["JobID"].partition("+")
            code, _, signal = record["ExitCode"].partition(":")
            made._job = Job._of(
                {
                    "job_id": int(record["JobIDRaw"]),
                    "name": record["JobName"],
                    "user_id": int(record["UID"]),
                    "user_name": record["User"],
                    "account": record["Account"],
                    "partition": record["Partition"],
                    "comment": record.get("Comment"),
                    "admin_comment": record.get("AdminComment"),
                    "array_job_id": int(array) if bar else 0,
                    "array_task_id": int(task) if bar else None,
                    "het_job_id": int(leader) if plus else 0,
                    "het_job_offset": int(offset) if plus else 0,
                    "job_state": record["State"].partition(" ")[0],
                    "nodes": record["NodeList"],
                    "tres_alloc_str": record["AllocTRES"],
                    "restart_cnt": 0,
                    "exit_code": int(code) << 8 | int(signal),
                    "submit_time": int(record["Submit"]),
                    "start_time": int(record["Start"]),
                    "end_time": int(record["End"]),
                }
            )
            return made

        @property
        def nodelist(self) -> str | None:
            return self._job.allocated_nodes

    class Jobs(_Map):
        """Records, one of each number."""

        @staticmethod
        def load(
            db_filter: "db.JobFilter | None" = None, db_connection: object = None
        ) -> "db.Jobs":
            wanted = set() if db_filter is None else {str(job) for job in db_filter.ids}
            with _slurm("db").state() as state:
                if state.get("accounting") is False:
                    raise RPCError(msg="Failed to get Jobs from slurmdbd")
                if state.get("accounting") == "down":
                    raise RPCError(msg="Unable to contact slurmdbd: Connection refused")
                return db.Jobs(
                    {
                        int(record["JobIDRaw"]): db.Job._of(record)
                        for record in state["records"]
                        if {record["JobIDRaw"], record["JobID"].partition("_")[0]} & wanted
                    }
                )


#: What both kinds of jobs have.
_SHARED = """
id name user_id user_name account partition comment admin_comment array_id array_task_id
array_tasks_waiting heterogeneous_id heterogeneous_offset requeue_count submit_time
start_time end_time exit_code exit_code_signal state gpus
"""


def _of_the_job(name: str) -> property:
    return property(lambda self: getattr(self._job, name))


for _name in _SHARED.split():
    setattr(db.Job, _name, _of_the_job(_name))

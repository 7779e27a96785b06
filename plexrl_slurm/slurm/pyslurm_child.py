"""The process that pyslurm works in: ``python -m plexrl_slurm.slurm.pyslurm_child MODULE``.

pyslurm ends its process where there is no slurm.conf, and its calls keep the interpreter's lock
until Slurm has answered, so no thread beside them could end a wait. Here both cost a child. One
question a line on stdin, one answer a line on what was stdout: pyslurm prints there too.
Jobs and nodes are said in the shape of Slurm's own JSON, so one parser reads them all.
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def main(module_name: str) -> None:
    """Answer until stdin ends."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            sys.exit(f"{module_name} cannot be imported: {error}")
        for line in sys.stdin:
            answers.write(json.dumps(answer(module, json.loads(line))) + "\n")
            answers.flush()


def answer(pyslurm: Any, question: Mapping[str, Any]) -> dict[str, Any]:
    """``{"value": ...}`` or ``{"error": Slurm's words}``."""
    try:
        return {"value": _ask(pyslurm, question["do"], question)}
    except pyslurm.RPCError as error:
        return {"error": str(error)}


def _ask(pyslurm: Any, verb: str, question: Mapping[str, Any]) -> Any:
    match verb:
        case "version":
            return pyslurm.__version__
        case "jobs":
            return {"errors": [], "jobs": [_job(job) for job in pyslurm.Jobs.load().values()]}
        case "ended":
            wanted = pyslurm.db.JobFilter(ids=question["jobs"])
            found = pyslurm.db.Jobs.load(wanted).values()
            return {"errors": [], "jobs": [_ended(job) for job in found]}
        case "nodes":
            return {"errors": [], "nodes": [_node(node) for node in pyslurm.Nodes.load().values()]}
    job = pyslurm.Job(question["job"])
    match verb:
        case "release":
            job.release()
        case "hold":
            job.hold()
        case "cancel":
            job.cancel()
        case "start_now":
            job.modify(pyslurm.JobSubmitDescription(begin_time=int(time.time())))
        case "time_limit":
            job.modify(pyslurm.JobSubmitDescription(time_limit=question["minutes"]))
        case "comment":
            job.modify(pyslurm.JobSubmitDescription(comment=question["text"]))
        case _:
            raise ValueError(f"no such verb: {verb}")
    return None


def _job(job: Any) -> dict[str, Any]:
    return _common(job) | {
        "job_state": job.state,
        "state_reason": job.state_reason,
        "array_task_string": job.array_tasks_waiting,
        "priority": job.priority,
        "nodes": job.allocated_nodes,
        "batch_host": job.batch_host,
        "time_limit": job.time_limit,
    }


def _ended(job: Any) -> dict[str, Any]:
    return _common(job) | {
        "job_state": job.state,
        "array_task_string": job.array_tasks_waiting,
        "nodes": job.nodelist,
    }


def _common(job: Any) -> dict[str, Any]:
    """What jobs of slurmctld and of slurmdbd have alike."""
    return {
        "job_id": job.id,
        "name": job.name,
        "user_id": job.user_id,
        "user_name": job.user_name,
        "account": job.account,
        "partition": job.partition,
        "comment": job.comment,
        "admin_comment": job.admin_comment,
        "array_job_id": job.array_id,
        "array_task_id": job.array_task_id,
        "het_job_id": job.heterogeneous_id,
        # Of the leader it is None.
        "het_job_offset": job.heterogeneous_offset or 0,
        "restart_cnt": job.requeue_count,
        "submit_time": job.submit_time,
        "start_time": job.start_time,
        "end_time": job.end_time,
        "exit_code": {
            "return_code": job.exit_code,
            "signal": {"id": job.exit_code_signal},
        },
        "tres_req_str": _tres((name, gpu.count) for name, gpu in job.gpus.items()),
    }


def _node(node: Any) -> dict[str, Any]:
    return {
        "name": node.name,
        "state": node.state.split("+"),
        "reason": node.reason,
        "gres": ",".join(f"{name}:{count}" for name, count in _counts(node.configured_gres)),
        "tres_used": _tres(_counts(node.allocated_gres)),
        "partitions": node.partitions,
        "features": node.available_features,
        "address": node.address,
    }


def _tres(counts: Iterable[tuple[str, int]]) -> str:
    return ",".join(f"gres/{name}={count}" for name, count in counts)


def _counts(gres: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """pyslurm gives a number, a number in a string, or one beside the devices' indices."""
    for name, count in gres.items():
        yield name, int(count["count"] if isinstance(count, dict) else count)


if __name__ == "__main__":
    main(sys.argv[1])

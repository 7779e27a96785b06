"""A Slurm that is a file: what stands behind the fake programs and the double of pyslurm.

Run under the name of one of Slurm's programs it plays that program; it then needs nothing but
the standard library, as it is started without this repository. Answers have the recorded shape.
"""

import fcntl
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What scontrol and pyslurm say of a number that nobody has.
NO_JOB = "Invalid job id specified"
FINISHED = "Job has already finished"
#: ``mode`` file: what every program does, instead of answering.
REFUSALS = {
    "down": "Unable to contact slurm controller (connect failure)",
    "munge": 'Munge encode failed: Failed to access "/run/munge/munge.socket.2": '
    "No such file or directory (Did you start munged?)",
    "key": "Zero Bytes were transmitted or received",
}


class FakeSlurm:
    """State in ``folder``: ``state.json``, ``mode`` and ``calls``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def mode(self) -> str:
        path = self.folder / "mode"
        return path.read_text().strip() if path.exists() else ""

    @contextmanager
    def state(self) -> Iterator[dict[str, Any]]:
        """Read, change, and it is written."""
        with (self.folder / "state.json").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.load(file)
            yield state
            file.seek(0)
            file.truncate()
            json.dump(state, file)
            file.flush()

    def called(self, *words: str) -> None:
        with (self.folder / "calls").open("a") as file:
            file.write(json.dumps(words) + "\n")

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def submit(self, **fields: Any) -> str:
        with self.state() as state:
            number = max((job["job_id"] for job in state["jobs"]), default=0) + 1
            array = fields.pop("array", "")
            more = {"array_job_id": number, "array_task_string": array} if array else {}
            state["jobs"].append(state["blank"] | fields | more | {"job_id": number})
            return str(number)

    def change(self, job: str, **fields: Any) -> str | None:
        """The refusal, if there is one. A leader's number means its components too."""
        with self.state() as state:
            whole, _, task = job.partition("_")
            found = [
                entry
                for entry in state["jobs"]
                if str(entry["job_id"]) == whole or str(entry["het_job_id"]) == whole
            ]
            if not found:
                return NO_JOB
            if task:
                return self._change_task(state, found[0], int(task), fields)
            for entry in found:
                if refusal := _changed(entry, fields):
                    return refusal
        return None

    def _change_task(
        self, state: dict[str, Any], array: dict[str, Any], task: int, fields: dict[str, Any]
    ) -> str | None:
        """Splits the task from what waits, as slurmctld does."""
        for entry in state["jobs"]:
            if entry["array_job_id"] == array["job_id"] and entry["array_task_id"] == task:
                return _changed(entry, fields)
        waiting = [int(text) for text in array["array_task_string"].split(",") if text]
        if task not in waiting:
            return NO_JOB
        array["array_task_string"] = ",".join(str(k) for k in waiting if k != task)
        if fields == CANCELLED:
            return None
        number = max(entry["job_id"] for entry in state["jobs"]) + 1
        split = array | {"job_id": number, "array_task_id": task, "array_task_string": ""}
        state["jobs"].append(split)
        return _changed(split, fields)


def _changed(entry: dict[str, Any], fields: dict[str, Any]) -> str | None:
    ended = entry["job_state"] in ("COMPLETED", "FAILED", "CANCELLED")
    if ended and fields.get("job_state") != "CANCELLED":
        return FINISHED
    if not ended:
        entry.update(fields)
    if "time_limit" in fields and entry["start_time"]:
        entry["end_time"] = entry["start_time"] + 60 * fields["time_limit"]
    return None


RELEASED = {"priority": 1, "state_reason": "None", "job_state": "RUNNING", "nodes": "n1"}
HELD = {"priority": 0, "state_reason": "JobHeldAdmin"}
CANCELLED = {"job_state": "CANCELLED", "exit_code": 15}


def _sbatch(fake: FakeSlurm, words: list[str]) -> int:
    options = [word for word in words if word.startswith("--")]
    if "--qos=nope" in options:
        return _refuse("sbatch: error: Batch job submission failed: Invalid qos specification")
    given = dict(word[2:].partition("=")[::2] for word in options)
    script = next(word for word in words if not word.startswith("--"))
    fields: dict[str, Any] = {
        "name": given["job-name"],
        "command": " ".join(words[words.index(script) :]),
    }
    if "time" in given:
        fields["time_limit"] = int(given["time"])
    if "array" in given:
        fields["array"] = given["array"]
    if "hold" in given:
        fields |= {"priority": 0, "state_reason": "JobHeldUser"}
    number = fake.submit(**fields)
    fake.called("script", Path(script).read_text(), Path(given["export-file"]).read_text())
    if fake.mode() == "late":
        time.sleep(60)
    sys.stdout.write(f"{number};cluster\n")
    return 0


def _scontrol(fake: FakeSlurm, words: list[str]) -> int:
    match words:
        case ["show", "config"]:
            sys.stdout.write("Configuration data as of now\nSlurmUser               = slurm\n")
            return 0
        case ["show", "nodes", "--json"]:
            with fake.state() as state:
                sys.stdout.write(json.dumps({"errors": [], "nodes": state["nodes"]}))
            return 0
        case ["release", job]:
            refusal = fake.change(job, **RELEASED)
        case ["hold", job]:
            refusal = fake.change(job, **HELD)
        case ["update", job, change]:
            job, (name, _, value) = job.removeprefix("JobId="), change.partition("=")
            changes: dict[str, Any] = {
                "TimeLimit": {"time_limit": int(value)} if value.isdigit() else {},
                "Comment": {"comment": value},
                "StartTime": {"start_time": int(time.time())},
                "AdminComment": {"admin_comment": value},
            }
            refusal = fake.change(job, **changes[name])
        case _:
            refusal = "invalid keyword"
    return 0 if refusal is None else _refuse(f"{refusal} for job {words[1]}")


def _refuse(words: str) -> int:
    sys.stderr.write(words + "\n")
    return 1


def _sacct(fake: FakeSlurm, words: list[str]) -> int:
    given = dict(word[2:].partition("=")[::2] for word in words)
    with fake.state() as state:
        if state.get("accounting") is False:
            return _refuse("Slurm accounting storage is disabled")
        if state.get("accounting") == "down":
            return _refuse("sacct: error: Problem talking to the database: Connection refused")
        wanted = given["jobs"].split(",")
        for record in state["records"]:
            known = {record["JobIDRaw"], record["JobID"], record["JobID"].partition("_")[0]}
            if known & set(wanted):
                fields = (record.get(name, "") for name in given["format"].split(","))
                sys.stdout.write(given["delimiter"].join(fields) + "\n")
    return 0


def main(program: str, words: list[str], fake: FakeSlurm) -> int:
    fake.called(program, *words)
    mode = fake.mode()
    if mode == "hang" or (mode == "children" and program == "squeue"):
        time.sleep(60)
    if mode in REFUSALS:
        if program in ("squeue", "sinfo"):
            # So it is: no error code, no jobs.
            errors = [{"description": "Failed while looking", "error": "Unspecified error"}]
            sys.stdout.write(json.dumps({"errors": errors, "jobs": [], "nodes": []}))
            sys.stderr.write(f"{program}: error: {REFUSALS[mode]}\n" if mode == "munge" else "")
            return 0
        return _refuse(f"{program}: error: {REFUSALS[mode]}")
    if mode == "garbage":
        sys.stdout.write("<html>")
        return 0
    match program:
        case "sbatch":
            return _sbatch(fake, words)
        case "scontrol":
            return _scontrol(fake, words)
        case "scancel":
            fake.change(words[0], **CANCELLED)
            return 0
        case "sacct":
            return _sacct(fake, words)
        case "sacctmgr":
            with fake.state() as state:
                if state.get("accounting") is False:
                    return _refuse(
                        "Only 'accounting_storage/slurmdbd' is supported.\nYou are not "
                        "running a supported accounting_storage plugin"
                    )
                if state.get("operator") is False:
                    return _refuse(
                        "sacctmgr: error: Your user doesn't have privilege to perform "
                        "this action\n Error with request: Access/permission denied"
                    )
            return 0
    with fake.state() as state:
        key = "jobs" if program == "squeue" else "nodes"
        if mode == "newer" and program == "sinfo":
            state = {"sinfo": []}
            key = "sinfo"
        sys.stdout.write(json.dumps({"errors": [], key: state[key]}))
        sys.stdout.write("\n")
    return 0


if __name__ == "__main__":
    here = Path(sys.argv[0])
    sys.exit(main(here.name, sys.argv[1:], FakeSlurm(here.parent.parent)))

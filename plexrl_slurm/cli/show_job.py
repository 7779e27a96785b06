"""``plexrl show job``: everything that is known of a job, as ``scontrol show job`` has it."""

from collections.abc import Mapping
from typing import Any

import click

from plexrl_slurm.cli import show as text
from plexrl_slurm.cli.app import App, shared
from plexrl_slurm.cli.jobids import JobNumber, as_numbers


@click.group(name="show")
def show() -> None:
    """Show everything that is known of something."""


@show.command()
@click.argument("numbers", metavar="JOBID", callback=as_numbers)
@shared
@click.pass_obj
def job(app: App, numbers: list[JobNumber]) -> None:
    """Show JOBID, one KEY=VALUE after the other; of an array, each task."""
    with app.client() as client:
        jobs = client.jobs(ended=True)
    found = [job for number in numbers for job in number.among(jobs)]
    app.answer({"jobs": found}, lambda: "\n\n".join(_record(job) for job in found))


def _record(job: Mapping[str, Any]) -> str:
    reason = str(job.get("reason_word") or "") or "None"
    promised = job.get("max_slowdown")
    lines = (
        (("JobId", job["slurm_id"]), ("JobName", job["name"]), ("RowId", job["job_id"])),
        (
            ("UserId", job["user"]),
            ("Account", job["account"]),
            ("Partition", job["partition"]),
            ("Priority", job.get("priority", 1)),
        ),
        (
            ("JobState", text.long_state(job["state"])),
            ("Reason", reason),
            ("Why", job["reason"] or "None"),
        ),
        (
            ("SubmitTime", _time(job["submitted_us"])),
            ("StartTime", _time(job["started_us"])),
            ("EndTime", _time(job["ended_us"])),
        ),
        (
            ("Models", ",".join(job["models"]) or "(null)"),
            ("MaxSlowdown", "N/A" if promised is None else f"{promised:.2f}"),
            ("Seed", job.get("seed", 0)),
        ),
        (
            ("Steps", job["steps"]),
            ("BusyTime", text.elapsed(job["gpu_us"]["busy"])),
            ("SwitchTime", text.elapsed(job["gpu_us"]["switch"])),
        ),
        (("WPGs", ",".join(job["wpgs"]) or "(null)"), ("Command", job["script"])),
    )
    return "\n   ".join(" ".join(f"{key}={value}" for key, value in line) for line in lines)


def _time(instant_us: int | None) -> str:
    return "Unknown" if instant_us is None else text.iso(instant_us)

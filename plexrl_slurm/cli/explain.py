"""``plexrl explain``: why a job waits, and how it got here."""

from collections.abc import Mapping
from typing import Any

import click

from plexrl_slurm.cli import show
from plexrl_slurm.cli.app import App, shared
from plexrl_slurm.cli.jobids import JobNumber, as_numbers


@click.command()
@click.argument("numbers", metavar="JOBID", callback=as_numbers)
@shared
@click.pass_obj
def explain(app: App, numbers: list[JobNumber]) -> None:
    """Say why JOBID waits, and tell its story; of an array, each task's."""
    with app.client() as client:
        jobs = client.jobs(ended=True)
        chosen = [job for number in numbers for job in number.among(jobs)]
        found = {str(job["slurm_id"]): client.explain(int(job["job_id"])) for job in chosen}
    answer = next(iter(found.values())) if len(found) == 1 else {"jobs": list(found.values())}
    app.answer(answer, lambda: "\n\n".join(_text(number, each) for number, each in found.items()))


def _believed(job: Mapping[str, Any], habits: Mapping[str, Any] | None) -> list[str]:
    """What placement goes by."""
    if habits is None:
        return []
    step_us = max(1, habits["step_us"])
    said = (
        f"A step alone takes {step_us / 1e6:.3g} s: {habits['train_us'] / step_us:.0%} on its "
        f"training WPG, {habits['sample_us'] / step_us:.0%} on its rollout WPG"
        f"{', both at once' if habits['overlaps'] else ''} (by {habits['from']})."
    )
    if (promised := job.get("max_slowdown")) is not None:
        said += f" It was promised at most {promised:.2f} times that."
    if (slowed := habits.get("slowed")) is not None:
        said += f" So far its steps have taken {slowed:.2f} times that"
        allowed = habits.get("allowed")
        said += "." if allowed is None else f", and from now on they may take {allowed:.2f} times."
    return ["", said]


def _text(number: str, found: Mapping[str, Any]) -> str:
    job = found["job"]
    lines = [f"Job {number} ({job['name']}) is {show.long_state(job['state'])}."]
    lines += [str(sentence) for sentence in found["sentences"]]
    lines += _believed(job, found.get("habits"))
    if found["deployments"]:
        lines += ["", "Deployments:"]
        lines += [
            "  "
            + ", ".join(
                f"{name} {value}"
                for name, value in each.items()
                if value is not None and name != "images"
            )
            for each in found["deployments"]
        ]
    moved = [(each["id"], line) for each in found["deployments"] for line in each.get("images", ())]
    if moved:
        lines += ["", "Images:"]
        lines += [
            f"  {show.local_time(line['at_us'])} {name} {line['text']}" for name, line in moved
        ]
    if found["story"]:
        lines += ["", "Story:"]
        lines += [
            f"  {show.local_time(each['at_us'])} {each['kind']}: {each['text']}"
            for each in found["story"]
        ]
    return "\n".join(lines)

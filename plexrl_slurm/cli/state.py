"""``plexrl state``: where a job's models are, what it saved, whether it is whole; its export."""

import os
import pwd
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from plexrl_slurm.cli import show
from plexrl_slurm.cli.app import App, shared, waiting
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.jobids import JobNumber, as_numbers, job_numbers
from plexrl_slurm.cli.state_size import size
from plexrl_slurm.core.errors import BadInput, NotFound

#: A training deployment's id begins with that of its job.
_DEPLOYMENT: Final = re.compile(r"s(\d+)-\d+:train:\d+")
#: A checkpoint is read whole before the answer comes.
_VERIFY_S: Final = 3600.0
_IMAGES: Final = ("IMAGE", "KIND", "MODEL", "WPG", "TIER", "PROGRESS", "BYTES", "LASTUSE")
_SAVED: Final = ("NAME", "KIND", "STEP", "BYTES", "SAVED", "URI")


@click.group()
def state() -> None:
    """Look at models that jobs train and have saved; verify, evict, export and import them."""


state.add_command(size)


@state.command("show")
@click.argument("numbers", metavar="[JOBID]", required=False, callback=as_numbers)
@click.option("-h", "--noheader", is_flag=True, help="No first line.")
@shared
@click.pass_obj
def show_state(app: App, numbers: list[JobNumber] | None, noheader: bool) -> None:
    """Show the images of JOBID by tier, its checkpoints and its sampler weights.

    Without JOBID, of all your jobs that wait or run.
    """
    with app.client() as client:
        if numbers is None:
            me = pwd.getpwuid(os.getuid()).pw_name
            chosen: list[Mapping[str, Any]] = list(client.jobs(user=me))
        else:
            jobs = client.jobs(ended=True)
            chosen = [job for number in numbers for job in number.among(jobs)]
        found = [client.job_state(int(job["job_id"])) for job in chosen]
    answer = found[0] if numbers is not None and len(found) == 1 else {"jobs": found}
    app.answer(answer, lambda: "\n\n".join(_text(each, header=not noheader) for each in found))


@state.command()
@click.argument("numbers", metavar="JOBID", callback=as_numbers)
@click.argument("name", required=False)
@shared
@click.pass_obj
def verify(app: App, numbers: list[JobNumber], name: str | None) -> None:
    """Read what JOBID saved, or only NAME of it, and compare it with its checksums.

    NAME is a checkpoint's name or its tinker:// URI. Exits with 65 unless all is fine.
    """
    with Client(app.site(), timeout_s=_VERIFY_S) as client:
        job, wanted = _saved_of(client, numbers, name)
        if not wanted:
            number = str(job["slurm_id"])
            if name is not None:
                raise NotFound(f"checkpoint or sampler weights of job {number} named", name)
            raise NotFound("checkpoint of job", number)
        found = []
        with waiting(f"verifying {len(wanted)} checkpoints") as say:
            for each in wanted:
                say(f"verifying {each['uri']}")
                found.append(client.verify_state(int(job["job_id"]), each["uri"]))
    app.answer({"job": job["slurm_id"], "checkpoints": found}, lambda: _verdicts(found))
    bad = [each for each in found if not each["fine"]]
    if bad:
        more = (
            f" (nor {'is' if len(bad) == 2 else 'are'} {len(bad) - 1} more)" if len(bad) > 1 else ""
        )
        raise BadInput(
            f"{bad[0]['uri']} is not known to be whole{more}: use another one, or save it again"
        )


@state.command()
@click.argument("numbers", metavar="JOBID", callback=as_numbers)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--name", metavar="NAME", help="Sampler weights of that name, not the newest.")
@shared
@click.pass_obj
def export(app: App, numbers: list[JobNumber], folder: Path, name: str | None) -> None:
    """Write sampler weights of JOBID as a Hugging Face model folder, the new folder DIR.

    They are the newest that save_weights_for_sampler(NAME) made, or those of --name.
    """
    from plexrl_slurm.cli import state_export

    state_export.check_target(folder)
    with app.client() as client:
        job, saved = _saved_of(client, numbers, name)
        weights = [each for each in saved if each["kind"] == "sampler_weights"]
        if not weights:
            what = f"sampler weights named {name!r}" if name else "named sampler weights"
            raise BadInput(
                f"job {job['slurm_id']} has no {what}: save_weights_for_sampler(name) makes them, "
                f"and `plexrl state show {job['slurm_id']}` lists them"
            )
        newest = max(weights, key=lambda each: int(each["created_us"]))
        with waiting(f"exporting {newest['uri']}") as say:
            size = state_export.export(client, int(job["job_id"]), newest["uri"], folder, say=say)
    facts = {"job": job["slurm_id"], "uri": newest["uri"], "path": str(folder), "bytes": size}
    app.answer(facts, lambda: f"{folder}: {newest['uri']}, {show.gib(size)}")


@state.command()
@click.argument("subject", metavar="JOBID|DEPLOYMENT")
@click.option(
    "--to",
    type=click.Choice(["nvme", "durable"]),
    default="nvme",
    show_default=True,
    help="The tier that has it then.",
)
@shared
@click.pass_obj
def evict(app: App, subject: str, to: str) -> None:
    """Give back the host memory of the images of JOBID, or of DEPLOYMENT only.

    Only what has, or gets, a complete copy elsewhere leaves. The next switch brings it back.
    """
    with Client(app.site(), timeout_s=_VERIFY_S) as client:
        job_id, deployment = _meant(client, subject)
        with waiting(f"evicting {subject}"):
            done = client.evict_state(job_id, deployment=deployment, to=to)
    rows = [[each["id"], each["node"], each["to"], each["bytes"]] for each in done["evicted"]]
    app.answer(done, lambda: show.fitted(("IMAGE", "NODE", "TO", "BYTES"), rows))


def _meant(client: Client, subject: str) -> tuple[int, str]:
    """A job, and one deployment of it; "": all."""
    if found := _DEPLOYMENT.fullmatch(subject):
        return int(found[1]), subject
    try:
        numbers = job_numbers(subject)
    except ValueError as error:
        raise BadInput(f"{subject!r} is neither a job nor a deployment ({error})") from None
    return int(_one_of(client, numbers)["job_id"]), ""


@state.command("import")
@click.argument("numbers", metavar="JOBID", callback=as_numbers)
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--model", metavar="MODEL", default="", help="Base model that they are weights of.")
@click.option("--name", metavar="NAME", default="", help="Of the checkpoint; else DIR's name.")
@shared
@click.pass_obj
def import_state(app: App, numbers: list[JobNumber], folder: Path, model: str, name: str) -> None:
    """Make the weights in DIR, a Hugging Face model folder, a checkpoint of JOBID.

    Any of your jobs may start from it: create_training_client_from_state(URI), or load_state(URI).
    JOBID may have ended. It has no optimizer state.
    """
    from plexrl_slurm.cli import state_import

    with Client(app.site(), timeout_s=_VERIFY_S) as client:
        job = _one_of(client, numbers)
        with waiting(f"importing {folder}") as say:
            made = state_import.import_folder(
                client, int(job["job_id"]), folder, model=model, name=name, say=say
            )
    facts = {"job": job["slurm_id"], "path": str(folder), **made}
    app.answer(facts, lambda: f"{made['uri']}: {made['model']}, {show.gib(made['bytes'])}")


def _one_of(client: Client, numbers: Sequence[JobNumber]) -> Mapping[str, Any]:
    jobs = client.jobs(ended=True)
    chosen = [job for number in numbers for job in number.among(jobs)]
    if len(chosen) != 1:
        raise BadInput(f"{len(chosen)} jobs are meant: write the number of one, such as 12 or 12_3")
    return chosen[0]


def _saved_of(
    client: Client, numbers: Sequence[JobNumber], name: str | None
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """The one job that is meant and what it saved under ``name``, or all of it."""
    job = _one_of(client, numbers)
    saved = client.job_state(int(job["job_id"]))["checkpoints"]
    return job, [each for each in saved if name in (None, each["name"], each["uri"])]


def image_rows(images: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One line for each tier that an image is in."""
    rows = []
    for image in images:
        names = [image["id"], image["kind"], image["model"], image["wpg"]]
        for tier in image["tiers"] or [None]:
            facts = ["-", "-", "-"] if tier is None else _tier(tier)
            used = (tier or {}).get("last_used_us") or image["last_used_us"]
            rows.append([*names, *facts, show.iso(used) if used else "-"])
    return rows


def _tier(tier: Mapping[str, Any]) -> list[str]:
    progress = "-" if tier["seq"] is None else f"{tier['seq']}.{tier['part']}"
    return ["resident" if tier["tier"] == "device" else tier["tier"], progress, str(tier["bytes"])]


def partition_text(found: Mapping[str, Any], *, header: bool) -> str:
    """``plexrl sinfo --state``."""
    images = [
        [image["user"], image["slurm_id"], *row]
        for image in found["images"]
        for row in image_rows([image])
    ]
    tiers = [
        [each["tier"], each["where"] or "-", show.gib(each["used"]), _limit(each)]
        for each in found["tiers"]
    ]
    return "\n".join(
        (
            show.fitted(("USER", "JOBID", *_IMAGES), images, header=header),
            show.fitted(("TIER", "WHERE", "USED", "LIMIT"), tiers, header=header),
            *map(fault_line, found.get("faults", ())),
        )
    ).strip("\n")


def fault_line(fault: Mapping[str, Any]) -> str:
    """A damaged copy, in one sentence."""
    then = "it was deleted, as the image is complete elsewhere"
    kept = "it is kept, because no other copy is as new"
    progress = f"{fault['seq']}.{fault['part']}"
    if fault.get("aside"):
        return (
            f"The durable image of {fault['id']} at {progress} is damaged ({fault['reason']}): it "
            f"is set aside, as {fault['aside']}."
        )
    return (
        f"The copy of {fault['id']} at {progress} on the disk of {fault['node']} is damaged "
        f"({fault['reason']}): {then if fault['dropped'] else kept}."
    )


def _limit(tier: Mapping[str, Any]) -> str:
    if tier["limit"] is not None:
        return show.gib(tier["limit"])
    return "-" if tier["free"] is None else f"{show.gib(tier['free'])} free"


def _text(found: Mapping[str, Any], *, header: bool) -> str:
    number, state_word = found["slurm_id"], show.long_state(found["state"])
    parts = [f"Job {number} ({found['name']}) is {state_word}."]
    rows = image_rows(found["images"])
    known = {image["id"] for image in found["images"]}
    rows += [
        [each["id"], "training", each["model"], *["-"] * 5]
        for each in found["deployments"]
        if each["id"] not in known
    ]
    if rows:
        parts.append(show.fitted(_IMAGES, rows, header=header))
    parts += map(fault_line, found.get("faults", ()))
    saved = [
        [
            each["name"],
            "checkpoint" if each["kind"] == "weights" else "sampler",
            "-" if each["step"] is None else each["step"],
            each["bytes"],
            show.iso(each["created_us"]),
            each["uri"],
        ]
        for each in found["checkpoints"]
    ]
    if saved:
        parts.append(show.fitted(_SAVED, saved, header=header))
    if not rows and not saved:
        parts.append("It has no model, and has saved nothing.")
    return "\n".join(parts)


def _verdicts(found: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [each["name"], file["state"], file["bytes"], file["file"] or "-", file["reason"] or "-"]
        for each in found
        for file in each["files"]
    ]
    return show.fitted(("NAME", "STATE", "BYTES", "FILE", "REASON"), rows)

"""``plexrl admin install``: what a site needs, written where it may be and printed where not."""

import os
import pwd
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plexrl_slurm.cli.app import App, note, shared
from plexrl_slurm.cli.site import places
from plexrl_slurm.core.errors import BadConfig, BadInput, Denied
from plexrl_slurm.slurm.site_files import (
    DEFAULT_CONF,
    OURS,
    Line,
    SiteFile,
    account_commands,
    conf_lines,
    example_settings,
    site_files,
)

if TYPE_CHECKING:
    from plexrl_slurm.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What becomes of one file."""

    file: SiteFile
    #: Below the prefix.
    target: Path
    #: ``written``, ``replaced``, ``unchanged``, ``kept`` (the site's own) or ``beside`` it.
    state: str


@click.group()
def admin() -> None:
    """Set a site up."""


@admin.command()
@click.option(
    "--prefix",
    metavar="DIR",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("/"),
    show_default=True,
    help="Write below DIR, to look at it or to copy it.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; write nothing.")
@shared
@click.pass_obj
def install(app: App, prefix: Path, dry_run: bool) -> None:
    """Write units, job_submit.lua and TaskProlog; print the lines for Slurm.

    Without a settings file an example is written first. All settings files beside it that name
    the same slurm.conf are served by the same job_submit.lua. Run it again after a change of the
    catalogue: what is right already stays as it is.
    """
    path = _settings_path(app)
    prefix = prefix.absolute()
    existing = path if path.exists() else _below(prefix, path)
    if not existing.exists():
        first = example_settings(path, name=app.partition or "rlvr")
        steps = _carry_out([_step(first, prefix)], dry_run=dry_run)
        again = f"edit it, then run this again: plexrl admin install --config {path}"
        _report(app, steps, (), (), [again], dry_run=dry_run)
        return
    partitions = partitions_beside(existing)
    settings = partitions[0]
    assert settings.slurm is not None
    user = settings.slurm.service_user or pwd.getpwuid(os.getuid()).pw_name
    notes: list[str] = []
    trusted = trusted_numbers(partitions, notes)
    conf = conf_of(settings)
    programs = Path(sys.executable).parent
    wanted = site_files(
        partitions,
        folder=path.parent,
        conf=conf,
        programs=programs,
        user=user,
        trusted=trusted,
    )
    steps = _carry_out([_step(file, prefix) for file in wanted], dry_run=dry_run)
    lines = conf_lines(_text(conf), conf.with_name("plexrl_task_prolog.sh"))
    for step in steps:
        if step.state == "beside":
            notes.append(
                f"{step.file.path} is the site's own and was left alone: add these lines above "
                f"its last one:\n{step.file.merge}"
            )
    for program in ("python", "plexrl"):
        if (closed := closed_to_others(programs / program)) is not None:
            notes.append(
                f"users and the service cannot run {programs / program}, because only its owner "
                f"may enter {closed}: install PlexRL, and its Python, where all may read"
            )
    if not settings.slurm.controller_partition:
        notes.append(
            "[slurm] controller_partition is not set, so that Slurm needs a partition "
            f"{settings.slurm.partition} of its own, without GPUs, for users' scripts"
        )
    notes.append(
        f"start it: systemctl daemon-reload && systemctl enable --now plexrl-partitiond@{path.stem}"
    )
    if not all(line.present for line in lines):
        notes.append(
            "after a change of slurm.conf: scontrol reconfigure, and for AccountingStorage* "
            "restart slurmctld"
        )
    plugin = conf.with_name("plexrl_spank.so")
    source = files("plexrl_slurm.slurm") / "spank" / "plexrl.c"
    notes.append(
        f"if users shall write sbatch --plexrl-model=NAME instead of #PLEXRL lines: gcc -O2 "
        f"-shared -fPIC -o {plugin} {source}, and in plugstack.conf: optional {plugin}"
    )
    _report(app, steps, lines, account_commands(settings, user), notes, dry_run=dry_run)


# ---- what is there ------------------------------------------------------------------------------


def _settings_path(app: App) -> Path:
    if app.config is not None:
        return app.config.absolute()
    name = app.partition or "rlvr"
    found = [file for file in places() if app.partition is None or file.stem == name]
    return found[0].absolute() if found else Path("/etc/plexrl") / f"{name}.toml"


def partitions_beside(path: Path) -> list["Settings"]:
    """The settings in ``path``, and of every other partition of the same cluster beside it."""
    from plexrl_slurm.settings import read
    from plexrl_slurm.tomlcheck import load

    first = read(path)
    if first.slurm is None:
        raise BadInput(
            f'{path}: [hold] backend is "local", which needs nothing of Slurm: write '
            f'backend = "slurm", or start it with `plexrl partition up`'
        )
    found = [first]
    for other in sorted(path.parent.glob("*.toml")):
        if other == path:
            continue
        data, _ = load(other)
        hold = data.get("hold")
        if "partition" in data and isinstance(hold, dict) and hold.get("backend") == "slurm":
            settings = read(other)
            if settings.slurm is not None and settings.slurm.conf == first.slurm.conf:
                found.append(settings)
    names = Counter(each.slurm.partition for each in found if each.slurm is not None)
    for name, times in names.items():
        if times > 1:
            problem = f"{times} settings files here have the Slurm partition {name!r}: rename one"
            raise BadConfig(str(path.parent), (problem,))
    return found


def trusted_numbers(partitions: Sequence["Settings"], notes: list[str]) -> list[int]:
    """Uids of the service users."""
    found = []
    for name in sorted({each.slurm.service_user for each in partitions if each.slurm}):
        try:
            found.append(pwd.getpwnam(name).pw_uid if name else os.getuid())
        except KeyError:
            notes.append(
                f"there is no user {name}: useradd --system --create-home {name}, on all nodes "
                f"with the same number, then run this again"
            )
    return found


def conf_of(settings: "Settings") -> Path:
    """The cluster's slurm.conf."""
    assert settings.slurm is not None
    return settings.slurm.conf or Path(os.environ.get("SLURM_CONF", DEFAULT_CONF))


def closed_to_others(program: Path) -> Path | None:
    """The first folder on the way to ``program`` that not everybody may enter."""
    ways = (program.absolute(), program.resolve())
    folders = (folder for way in ways for folder in reversed(way.parents))
    return next((each for each in folders if each.exists() and not each.stat().st_mode & 1), None)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# ---- writing ------------------------------------------------------------------------------------


def _below(prefix: Path, path: Path) -> Path:
    return prefix / path.relative_to("/")


def _step(file: SiteFile, prefix: Path) -> Step:
    target = _below(prefix, file.path)
    present = _text(target)
    if not target.exists():
        return Step(file=file, target=target, state="written")
    if present == file.text and target.stat().st_mode & 0o777 == file.mode:
        return Step(file=file, target=target, state="unchanged")
    if OURS in present[:400]:
        return Step(file=file, target=target, state="replaced")
    if file.merge and all(line in present for line in file.merge.splitlines()):
        return Step(file=file, target=target, state="kept")
    return Step(file=file, target=target.with_name(f"{target.name}.plexrl"), state="beside")


def _carry_out(steps: list[Step], *, dry_run: bool) -> list[Step]:
    writing = [step for step in steps if step.state in ("written", "replaced", "beside")]
    if dry_run:
        return steps
    for step in writing:
        _check_writable(step.target)
    for step in writing:
        if step.state != "beside" or _text(step.target) != step.file.text:
            _write(step.target, step.file)
    changed = any(step.target.name == "plexrl.lua" for step in writing)
    for step in steps:
        loader = step.target.with_name("job_submit.lua")
        if changed and step.file.merge and "plexrl.lua" in _text(loader):
            _touch(loader)
    return steps


def _touch(loader: Path) -> None:
    """Make slurmctld read its script again.

    It looks at this file's time only, in whole seconds, and wants one after its last look.
    """
    stamp = int(max(time.time(), loader.stat().st_mtime)) + 1
    os.utime(loader, (stamp, stamp))


def _check_writable(target: Path) -> None:
    place = target if target.exists() else target.parent
    while not place.exists():
        place = place.parent
    if not os.access(place, os.W_OK):
        raise Denied(
            f"you may not write {target}: run this as root, or give --prefix DIR and copy the "
            f"files from there; nothing was written"
        )


def _write(target: Path, file: SiteFile) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", dir=target.parent, prefix=f".{target.name}.", delete=False, encoding="utf-8"
    ) as stream:
        stream.write(file.text)
    fresh = Path(stream.name)
    fresh.chmod(file.mode)
    fresh.replace(target)


# ---- saying -------------------------------------------------------------------------------------


def _report(
    app: App,
    steps: Sequence[Step],
    lines: Sequence[Line],
    commands: Sequence[Line],
    notes: Sequence[str],
    *,
    dry_run: bool,
) -> None:
    changed = any(step.state in ("written", "replaced") for step in steps)
    facts: dict[str, Any] = {
        "dry_run": dry_run,
        "changed": changed and not dry_run,
        "files": [
            {"path": str(step.target), "state": step.state, "purpose": step.file.purpose}
            for step in steps
        ],
        "slurm_conf": [
            {"line": line.text, "purpose": line.purpose, "present": line.present} for line in lines
        ],
        "commands": [{"command": line.text, "purpose": line.purpose} for line in commands],
        "notes": list(notes),
    }
    app.answer(facts, lambda: _as_text(steps, lines, commands, notes))
    if dry_run:
        note("nothing was written (--dry-run)")
    elif not changed:
        note("everything was in place already; nothing was changed")


def _as_text(
    steps: Sequence[Step], lines: Sequence[Line], commands: Sequence[Line], notes: Sequence[str]
) -> str:
    said = ["Files:"]
    said += [f"  {step.state:9} {step.target}  # {step.file.purpose}" for step in steps]
    missing = [line for line in lines if not line.present]
    if missing:
        said += ["", "Lines for slurm.conf:"]
        said += [f"  {line.text}  # {line.purpose}" for line in missing]
    if commands:
        said += ["", "Once, as Slurm's administrator:"]
        said += [f"  {line.text}  # {line.purpose}" for line in commands]
    for each in notes:
        said += ["", each]
    return "\n".join(said)

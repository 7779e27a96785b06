"""``plexrl partition``: start, stop, check and drain a partition's daemon."""

from pathlib import Path

import click

from plexrl_slurm.cli import daemon, show
from plexrl_slurm.cli.app import App, Number, note, shared, waiting
from plexrl_slurm.core.errors import BadConfig, SlurmRejected, SlurmUnavailable
from plexrl_slurm.settings import Settings, check


@click.group()
def partition() -> None:
    """Start, stop, check and drain a partition."""


@partition.command()
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=Number(1),
    default=900.0,
    show_default=True,
    help="How long the WPGs may take to start.",
)
@click.option("--no-wait", is_flag=True, help="Return when the daemon answers.")
@shared
@click.pass_obj
def up(app: App, timeout: float, no_wait: bool) -> None:
    """Start the partition's daemon and wait until its WPGs are up."""
    site = app.site()
    _checked(app)
    with waiting(f"starting the daemon of partition {site.partition}") as say:
        found = daemon.start(site, timeout_s=timeout, wait_for_wpgs=not no_wait, say=say)
    facts = {
        "partition": site.partition,
        "address": found.address,
        "socket": str(site.socket),
        "pid": found.pid,
        "log": str(daemon.log_file(site)),
        "started": found.started,
    }
    words = "is up" if found.started else "was up already"
    app.answer(
        facts, f"Partition {site.partition} {words} at {found.address} (log: {facts['log']})"
    )


@partition.command()
@click.option(
    "--release/--no-release",
    default=True,
    show_default=True,
    help="Give the held GPUs back and end all jobs, or leave them running.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=Number(1),
    default=120.0,
    show_default=True,
    help="How long it may take.",
)
@shared
@click.pass_obj
def down(app: App, release: bool, timeout: float) -> None:
    """Stop the partition's daemon."""
    site = app.site()
    with waiting(f"stopping the daemon of partition {site.partition}"):
        stopped = daemon.stop(site, release=release, timeout_s=timeout)
    facts = {"partition": site.partition, "stopped": stopped, "released": release and stopped}
    if not stopped:
        app.answer(facts, f"Partition {site.partition} was down already")
    else:
        rest = "its hold is released" if release else "its hold is kept"
        app.answer(facts, f"Partition {site.partition} is down; {rest}")


@partition.command("check")
@shared
@click.pass_obj
def check_command(app: App) -> int:
    """Find every mistake in the settings file."""
    path = daemon.settings_file(app)
    findings = check(path)
    for warning in findings.warnings:
        note(f"warning: {path}: {warning}")
    facts = {
        "file": str(path),
        "problems": list(findings.problems),
        "warnings": list(findings.warnings),
    }
    if findings.settings is None:
        if not app.json:
            raise BadConfig(str(path), findings.problems)
        app.answer(facts, "")
        return BadConfig.exit_code
    settings = findings.settings
    if never := _infeasible(path, settings):
        facts["problems"] = list(never)
        if not app.json:
            raise BadConfig(str(path), never)
        app.answer(facts, "")
        return BadConfig.exit_code
    app.answer(facts, lambda: _summary(settings))
    return 0


def _infeasible(path: Path, settings: Settings) -> tuple[str, ...]:
    """What Slurm, where it answers, could never start."""
    if settings.slurm is None:
        return ()
    from plexrl_slurm.cli.doctor_facts import Facts
    from plexrl_slurm.slurm.feasible import examine

    seen = Facts(path)
    try:
        found = examine(settings.hold, seen.partitions, seen.nodes, seen.asker)
    except (SlurmRejected, SlurmUnavailable) as error:
        note(f"warning: {path}: not compared with Slurm: {error}")
        return ()
    for sentence in found.not_now:
        note(f"warning: {path}: {sentence}")
    return found.never


@partition.command()
@shared
@click.pass_obj
def drain(app: App) -> None:
    """Admit no more jobs; those that run go on."""
    _set_drain(app, on=True)


@partition.command()
@shared
@click.pass_obj
def resume(app: App) -> None:
    """Admit jobs again."""
    _set_drain(app, on=False)


def _set_drain(app: App, *, on: bool) -> None:
    site = app.site()
    with app.client() as client:
        answer = client.drain(on=on)
    words = "admits no more jobs" if on else "admits jobs again"
    app.answer(answer, f"Partition {site.partition} {words}")


def _checked(app: App) -> None:
    path = daemon.settings_file(app)
    findings = check(path)
    for warning in findings.warnings:
        note(f"warning: {path}: {warning}")
    if findings.settings is None:
        raise BadConfig(str(path), findings.problems)


def _summary(settings: Settings) -> str:
    rows = [
        [
            wpg.pool,
            wpg.engine,
            wpg.count,
            wpg.gpus,
            wpg.nodes,
            ", ".join([*wpg.options, *([f"shared ({wpg.shared})"] if wpg.shared else [])]) or "-",
        ]
        for wpg in settings.wpgs
    ]
    models = [
        [
            model.name,
            f"{model.parameters:,}",
            model.dtype,
            model.max_context_length,
            show.gib(model.train_bytes),
        ]
        for model in settings.models.values()
    ]
    return "\n".join(
        (
            f"{settings.path}: partition {settings.partition} has no mistakes",
            show.fitted(("POOL", "ENGINE", "WPGS", "GPUS", "NODES", "OPTIONS"), rows),
            show.fitted(("MODEL", "PARAMETERS", "DTYPE", "CONTEXT", "IMAGE"), models),
        )
    )

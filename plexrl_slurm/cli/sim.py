"""``plexrl sim``: the daemon's scheduler on a trace, without a cluster."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plexrl_slurm.cli import show
from plexrl_slurm.cli.app import App, Number, shared, waiting
from plexrl_slurm.cli.jobids import JobNumber, as_numbers
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.whereabouts import POLICIES

if TYPE_CHECKING:
    from plexrl_slurm.core.messages import Wpg
    from plexrl_slurm.core.tails import TailRules
    from plexrl_slurm.sim.report import Figures
    from plexrl_slurm.sim.run import Ran
    from plexrl_slurm.sim.trace import TraceJob
    from plexrl_slurm.sim.world import World

_HOUR_US = 3_600_000_000
_MOST_DAYS = 36_500
_PLACEMENTS = ("isolated", "isolated_backfill", "pack", "spread", "spread_backfill", "fit")
_FILE = click.Path(path_type=Path)


@click.group()
def sim() -> None:
    """Run traces through the daemon's own scheduler: what would sharing save?"""


def _hardware(command: Any) -> Any:
    for option in (
        click.option("--gpus", type=int, default=1024, show_default=True, help="Of both pools."),
        click.option(
            "--split", default="2:1", show_default=True, metavar="T:R",
            help="Training to rollout GPUs.",
        ),
        click.option(
            "--node-memory", type=Number(1), default=1500.0, show_default=True,
            metavar="GB", help="Host memory of a node of 8 GPUs.",
        ),
        click.option(
            "--bandwidth", type=Number(0.01), default=50.0, show_default=True,
            metavar="GB/S", help="Between one GPU and host memory.",
        ),
        click.option(
            "--shared-bandwidth", type=Number(0.01), default=5.0, show_default=True,
            metavar="GB/S", help="Between one node and the shared file system.",
        ),
        click.option(
            "--node-nvme", type=Number(0), default=0.0, show_default=True, metavar="GB",
            help="Disks of a node for images beyond its memory; what comes back is waited for.",
        ),
        click.option(
            "--nvme-bandwidth", type=Number(0.01), default=6.0, show_default=True,
            metavar="GB/S", help="From the disks of a node to its memory.",
        ),
        click.option(
            "--prices", default="1:1", show_default=True, metavar="T:R",
            help="Of an hour of a training GPU to one of a rollout GPU.",
        ),
        click.option(
            "--compress", type=Number(0.001), default=1.0,
            show_default=True, help="Jobs arrive so many times as fast.",
        ),
        click.option("--seed", type=click.IntRange(0), default=1, show_default=True),
        click.option(
            "--guess-sigma", type=Number(0, 10), default=0.5, show_default=True,
            help="Error of what is known of a job before its first steps; 0: none.",
        ),
        click.option(
            "--guard-hours", type=Number(0), default=72.0, show_default=True,
            help="Nobody goes before a job that has waited so long.",
        ),
        click.option(
            "--node-loss-hours", type=Number(0), default=0.0, show_default=True,
            help="Mean time between losses of a node; 0: none is lost.",
        ),
        click.option(
            "--hold-hours", type=Number(0), default=0.0, show_default=True,
            help="Time limit of a hold, which begins again on the same nodes; 0: it has none.",
        ),
        click.option(
            "--renew-minutes", type=Number(0), default=5.0, show_default=True,
            help="From the end of a hold to its engines' start in the next.",
        ),
        click.option(
            "--margin", type=Number(0, 2), default=0.9, show_default=True,
            help="Share of a promised slowdown that fit lets a prediction use.",
        ),
        click.option(
            "--most", type=click.IntRange(1), default=6, show_default=True, metavar="JOBS",
            help="On one training WPG.",
        ),
        click.option(
            "--widest", type=Number(1), default=2.0, show_default=True, metavar="TIMES",
            help="A job may train on a WPG so many times as large as it asked; 1: on no other.",
        ),
        click.option(
            "--scaling", type=Number(0, 1), default=0.8, show_default=True,
            help="Share of a training phase that gets shorter with more GPUs.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


@sim.command()
@click.argument("trace", type=_FILE)
@click.option("--policy", type=click.Choice(POLICIES), default="atc_h", show_default=True)
@click.option("--placement", type=click.Choice(_PLACEMENTS), default="fit", show_default=True)
@click.option("--plots", type=_FILE, metavar="DIR", help="Write pictures there.")
@click.option("--jobs", is_flag=True, help="A line for every job too.")
@click.option(
    "--held",
    is_flag=True,
    help="On the WPGs of the partition's configuration, both pools shared, instead of --gpus, "
    "--split and --placement.",
)
@click.option(
    "--tails",
    type=click.Choice(("none", "wait", "pause", "beside")),
    default="none",
    show_default=True,
    help="With --held: what becomes of tails of rollouts that others wait for; none: there are "
    "none, a rollout is one call.",
)
@click.option(
    "--tail-slowdown",
    type=click.IntRange(0, 1000),
    default=20,
    show_default=True,
    metavar="PERCENT",
    help="By which two rollouts at once slow each other down.",
)
@_hardware
@shared
@click.pass_obj
def run(
    app: App,
    /,
    trace: Path,
    policy: str,
    placement: str,
    plots: Path | None,
    jobs: bool,
    held: bool,
    tails: str,
    tail_slowdown: int,
    **given: Any,
) -> None:
    """Run TRACE once."""
    if tails != "none" and not held:
        raise BadInput(f"--tails {tails}: without --held no two jobs share a rollout WPG: add it")
    given["wpgs"] = _held_wpgs(app) if held else ()
    given |= {"tails": tails, "tail_slowdown": tail_slowdown}
    ran = _runs(trace, [(policy, placement)], chart=plots is not None, given=given)
    if plots is not None:
        _draw(ran, plots)
    from plexrl_slurm.sim.report import per_job

    found = ran[0].figures.as_json()
    each = per_job(ran[0].world) if jobs else []
    if jobs:
        from dataclasses import asdict

        found = {**found, "per_job": [asdict(job) for job in each]}
    lines = [_one(ran[0].figures)]
    if tails != "none":
        counts = {name: getattr(ran[0].world, name) for name in ("pauses", "besides")}
        found = {**found, "tails": tails, **counts}
        lines.append(f"tails: {counts['pauses']:,} calls paused, {counts['besides']:,} times "
                     "somebody came in beside one")  # fmt: skip
    if each:
        names = ("JOB", "MODEL", "MODE", "STEPS", "WPG", "QUEUED_H", "RUN_H", "SLOWDOWN")
        lines.append(
            show.fitted(
                names,
                [
                    (
                        job.id,
                        job.model,
                        job.mode,
                        job.steps,
                        job.train_wpg,
                        f"{(job.start_us - job.submit_us) / _HOUR_US:.2f}",
                        f"{(job.end_us - job.start_us) / _HOUR_US:.2f}",
                        f"{job.slowdown:.3f}",
                    )
                    for job in each
                ],
            )
        )
    app.answer(found, "\n\n".join(lines))


@sim.command()
@click.argument("trace", type=_FILE)
@click.option(
    "--policies", default="atc_h,hrrs,drain_first,fifo", show_default=True, metavar="NAMES"
)
@click.option(
    "--placements", default="isolated,pack,spread_backfill,fit", show_default=True, metavar="NAMES"
)
@click.option("--plots", type=_FILE, metavar="DIR", help="Write pictures there.")
@_hardware
@shared
@click.pass_obj
def compare(
    app: App, /, trace: Path, policies: str, placements: str, plots: Path | None, **given: Any
) -> None:
    """Run TRACE under each of several policies and placements."""
    from plexrl_slurm.core.policy import find_policy
    from plexrl_slurm.sim.cluster import find

    orders = list(dict.fromkeys(name.strip() for name in policies.split(",")))
    for name in orders:
        find_policy(name)
    homes = list(dict.fromkeys(name.strip() for name in placements.split(",")))
    for name in homes:
        find(name)
    pairs = []
    for placement in homes:
        # Alone on its WPG no job has to be ordered.
        alone = placement.startswith("isolated")
        pairs += [(policy, placement) for policy in orders][: 1 if alone else None]
    runs = _runs(trace, pairs, chart=plots is not None, given=given)
    if plots is not None:
        _draw(runs, plots)
    app.answer([ran.figures.as_json() for ran in runs], _table([ran.figures for ran in runs]))


@sim.command()
@click.argument("path", metavar="FILE", type=_FILE)
@click.option("--jobs", type=click.IntRange(1, 1_000_000), default=200, show_default=True)
@click.option("--days", type=Number(0.01, _MOST_DAYS), default=7.0, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--async-share", type=Number(0, 1), default=0.57, show_default=True)
@click.option("--agentic-share", type=Number(0, 1), default=0.21, show_default=True)
@shared
@click.pass_obj
def generate(
    app: App, path: Path, jobs: int, days: float, seed: int, async_share: float,
    agentic_share: float,
) -> None:  # fmt: skip
    """Write a synthetic trace to FILE."""
    from plexrl_slurm.sim.generate import generate as generated
    from plexrl_slurm.sim.trace import write_trace

    with waiting(f"making {jobs:,} jobs") as say:

        def progress(made: int) -> None:
            say(f"making {jobs:,} jobs: {made - made % 10_000:,} are made")

        found = generated(
            jobs=jobs, days=days, seed=seed, overlapping=async_share, agentic=agentic_share,
            progress=progress,
        )  # fmt: skip
        say(f"writing {path}")
        write_trace(path, found)
    steps = sum(job.length for job in found)
    app.answer(
        {"file": str(path), "jobs": len(found), "steps": steps, "seed": seed},
        f"{path}: {len(found)} jobs, {steps:,} steps",
    )


@sim.command("trace")
@click.argument("path", metavar="FILE", type=_FILE)
@click.option("--from-ledger", is_flag=True, required=True, help="Of the partition's own database.")
@click.option("--days", type=Number(0, _MOST_DAYS, min_open=True), default=7.0, show_default=True)
@click.option(
    "--jobs", metavar="ID,...", callback=as_numbers,
    help="Only these, as squeue numbers them: 12, 12_3, 12_[1-3].",
)  # fmt: skip
@shared
@click.pass_obj
def write_trace_of(
    app: App, path: Path, from_ledger: bool, days: float, jobs: list[JobNumber] | None
) -> None:
    """Write the partition's own history to FILE, as a trace."""
    from plexrl_slurm.cli import history
    from plexrl_slurm.sim.trace import write_trace

    with waiting("reading the ledger"):
        found, left_out = history.trace_of(app.site(), days=days, only=jobs)
    if not found:
        why = "; ".join(f"job {job}: {reason}" for job, reason in left_out.items())
        raise BadInput(f"no job of the last {days:g} days makes a trace: {why or 'there is none'}")
    write_trace(path, found)
    lines = [f"{path}: {len(found)} jobs, {sum(job.steps for job in found):,} steps"]
    lines += [f"left out: job {job}, {reason}" for job, reason in left_out.items()]
    app.answer({"file": str(path), "jobs": len(found), "left_out": left_out}, "\n".join(lines))


@sim.command()
@click.argument("journal", type=_FILE)
@shared
@click.pass_obj
def replay(app: App, journal: Path) -> None:
    """Decide again what a daemon's JOURNAL says, and compare, event for event."""
    from plexrl_slurm.journal import replay as decided

    lines = 0
    with waiting(f"deciding {journal} again") as say:
        for number in decided(journal):
            lines = number - 1
            if lines % 10_000 == 0:
                say(f"deciding {journal} again: {lines:,} lines agree")
    app.answer(
        {"journal": str(journal), "lines": lines, "agrees": True},
        f"{journal}: all {lines:,} lines agree",
    )


def _held_wpgs(app: App) -> "list[Wpg]":
    """As the partition's configuration names them."""
    from collections import Counter

    from plexrl_slurm.core.ids import WpgId
    from plexrl_slurm.core.messages import Pool, Wpg
    from plexrl_slurm.settings import read

    found, numbers = [], Counter[str]()
    for table in read(app.site().path).wpgs:
        for _ in range(table.count):
            name = WpgId(f"{table.pool}-{numbers[table.pool]}")
            numbers[table.pool] += 1
            two = table.second_slot_bytes > 0
            pool = Pool(table.pool)
            found.append(Wpg(id=name, pool=pool, gpus=table.gpus, second_slot=two))
    return found


def _runs(
    path: Path, pairs: Sequence[tuple[str, str]], *, chart: bool, given: dict[str, Any]
) -> "list[Ran]":
    from dataclasses import replace

    from plexrl_slurm.core.grouping import Rules
    from plexrl_slurm.sim.cluster import Plan, prices, split
    from plexrl_slurm.sim.run import simulate, simulate_held
    from plexrl_slurm.sim.trace import compressed, read_trace

    train_price, rollout_price = prices(given["prices"])
    jobs = compressed(read_trace(path), given["compress"])
    cluster = replace(
        split(given["gpus"], given["split"]),
        train_price=train_price,
        rollout_price=rollout_price,
        node_bytes=int(given["node_memory"] * 1e9),
        gpu_bytes_per_s=int(given["bandwidth"] * 1e9),
        shared_bytes_per_s=int(given["shared_bandwidth"] * 1e9),
        nvme_bytes=int(given["node_nvme"] * 1e9),
        nvme_bytes_per_s=int(given["nvme_bandwidth"] * 1e9),
    )
    runs = []
    for number, (policy, placement) in enumerate(pairs, 1):
        plan = Plan(
            policy=policy,
            rules=Rules(margin=given["margin"], most=given["most"]),
            guard_us=int(given["guard_hours"] * _HOUR_US),
            guess_sigma=given["guess_sigma"],
            node_loss_hours=given["node_loss_hours"],
            hold_limit_us=int(given["hold_hours"] * _HOUR_US),
            renew_us=int(given["renew_minutes"] * 60_000_000),
            widest=given["widest"],
            scaling=given["scaling"],
            seed=given["seed"],
            tails=_tails(given.get("tails", "none"), given.get("tail_slowdown", 0)),
            slowdown=given.get("tail_slowdown", 0),
        )
        wpgs = given.get("wpgs", ())
        name = f"{'held' if wpgs else placement} + {policy} ({number} of {len(pairs)})"
        with waiting(name) as say:
            progress = _progress(name, jobs, say)
            if wpgs:
                runs.append(
                    simulate_held(jobs, wpgs, cluster, plan=plan, chart=chart, progress=progress)
                )
                continue
            runs.append(
                simulate(
                    jobs,
                    cluster,
                    placement=placement,
                    plan=plan,
                    chart=chart,
                    progress=progress,
                )
            )
    return runs


def _tails(name: str, slowdown: int) -> "TailRules | None":
    from plexrl_slurm.core.tails import TailRules

    if name == "none":
        return None
    return TailRules(pause=name != "wait", co_resident=name == "beside", slowdown=slowdown)


def _progress(
    name: str, jobs: "list[TraceJob]", say: Callable[[str], None]
) -> "Callable[[World], None]":
    def show_it(world: "World") -> None:
        ended = sum(record.end_us >= 0 for record in world.records.values())
        hours = world.now_us / _HOUR_US
        say(f"{name}: hour {hours:,.0f}, {ended} of {len(jobs)} jobs have ended")

    return show_it


def _draw(runs: "Sequence[Ran]", folder: Path) -> None:
    from plexrl_slurm.sim.plots import draw

    try:
        for path in draw(runs, folder):
            click.echo(f"plexrl: wrote {path}", err=True)
    except OSError as error:
        raise BadInput(f"--plots {folder}: cannot be written ({error.strerror})") from error


def _one(found: "Figures") -> str:
    slow = found.slowdown
    return show.fitted(
        ("WHAT", "FIGURE"),
        [
            ("cluster", f"{found.train_gpus} training + {found.rollout_gpus} rollout GPUs"),
            ("order, placement", f"{found.policy}, {found.placement}"),
            ("jobs, steps", f"{found.jobs:,}, {found.steps:,}"),
            ("work per GPU-hour", f"{found.efficiency:.3f} x isolated"),
            *_priced(found),
            ("GPU-hours per step", f"{-found.gpu_hours_per_step_saving_percent:+.2f} %"),
            ("slowdown", f"mean {slow.mean:.3f}, median {slow.p50:.3f}, p95 {slow.p95:.3f}, "
                         f"worst {slow.max:.3f}"),
            ("promises missed", f"{found.promises_missed_percent:.1f} %"),
            ("held GPU time", f"busy {found.busy_percent:.1f} %, switch "
                              f"{found.switch_percent:.2f} %, kept {found.kept_percent:.2f} %, "
                              f"idle {found.idle_percent:.1f} %, down {found.down_percent:.2f} %"),
            ("held of the cluster", f"{found.held_percent:.1f} %"),
            ("mean completion", f"{found.mean_completion_us / _HOUR_US:,.2f} h, of it queued "
                                f"{found.mean_queued_us / _HOUR_US:,.2f} h"),
            ("makespan", f"{found.makespan_us / _HOUR_US:,.1f} h"),
            ("decisions, events", f"{found.decisions:,}, {found.events:,} "
                                  f"in {found.wall_seconds:,.1f} s"),
        ],
    )  # fmt: skip


def _priced(found: "Figures") -> list[tuple[str, str]]:
    """A row, if the price of a GPU-hour depends on the pool."""
    if found.train_price == found.rollout_price:
        return []
    prices = f"{found.train_price:g} and {found.rollout_price:g} a GPU-hour"
    return [("work for its price", f"{found.cost_efficiency:.3f} x isolated ({prices})")]


def _table(found: "Sequence[Figures]") -> str:
    priced = any(one.train_price != one.rollout_price for one in found)
    names = (
        "PLACEMENT", "POLICY", "WORK/GPU-H", *["WORK/PRICE"] * priced, "SAVED_%", "MEAN",
        "P95", "WORST", "MISSED_%", "SWITCH_%", "COMPLETION_H", "MAKESPAN_H",
    )  # fmt: skip
    return show.fitted(
        names,
        [
            (
                one.placement,
                one.policy,
                f"{one.efficiency:.3f}",
                *[f"{one.cost_efficiency:.3f}"] * priced,
                f"{one.gpu_hours_per_step_saving_percent:.2f}",
                f"{one.slowdown.mean:.3f}",
                f"{one.slowdown.p95:.3f}",
                f"{one.slowdown.max:.3f}",
                f"{one.promises_missed_percent:.1f}",
                f"{one.switch_percent:.2f}",
                f"{one.mean_completion_us / _HOUR_US:,.2f}",
                f"{one.makespan_us / _HOUR_US:,.1f}",
            )
            for one in found
        ],
    )

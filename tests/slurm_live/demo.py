"""``make demo-slurm``: the demo's jobs on a real Slurm, by several users, while a node is lost.

Builds a private Slurm cluster, installs PlexRL on it, runs a partition as the service user, and
submits three GRPO jobs as three users with ``plexrl sbatch`` and one with plain ``sbatch``: each
alone, then all together while the hold is renewed and one of its nodes is lost. Ends with 0 only
if all learned, bit by bit, what they learn alone.
"""

import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import click

from plexrl_slurm.cli import demo_figures, demo_runs, ledger, timeline
from plexrl_slurm.cli.app import note, waiting
from plexrl_slurm.cli.demo_figures import JobRun, SharedRun
from plexrl_slurm.cli.demo_runs import Submission
from plexrl_slurm.cli.demo_screen import Screen
from plexrl_slurm.core.errors import PlexError
from tests.slurm_live import demo_books, demo_site, demo_story, python
from tests.slurm_live.cluster import Cluster, ClusterError
from tests.slurm_live.demo_events import Events, Facts
from tests.slurm_live.demo_site import USERS, DemoPartition

EXAMPLES = python.ROOT / "examples"
#: What a job that has them for itself takes: a WPG of one GPU in each pool.
ALONE_GPUS = 2
SHARED_GPUS = sum(demo_site.SHAPE.values())
REPORTS = ("savings", "usage_by_job", "usage_by_user", "hold_summary", "reconcile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The demo's knobs."""

    out: Path
    steps: int
    tool_multiple: float
    seed: int
    lose: str
    renewal: str
    fake: bool
    undisturbed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One of the demo's jobs, in every run of it."""

    name: str
    user: str
    seed: int
    steps: int
    #: With plain ``sbatch``.
    native: bool = False


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("demo/slurm"), show_default=True,
    help="Folder for the report and the logs; it is emptied first.",
)  # fmt: skip
@click.option("--steps", type=click.IntRange(8), default=10, show_default=True)
@click.option(
    "--tool-multiple", type=click.FloatRange(0), default=2.0, show_default=True,
    help="Length of a tool call in measured step times.",
)  # fmt: skip
@click.option("--seed", type=int, default=1, show_default=True)
@click.option(
    "--lose", type=click.Choice(["train", "batch"]), default="train", show_default=True,
    help="Lose a training node; with batch, the one that runs the hold's script too.",
)  # fmt: skip
@click.option(
    "--renewal", type=click.Choice(["auto", "replace"]), default="auto", show_default=True,
    help="Of the hold: a longer limit, or another hold.",
)  # fmt: skip
@click.option("--fake", is_flag=True, help="Engines that only pretend: a minute instead of many.")
@click.option(
    "--undisturbed/--no-undisturbed", default=True, show_default=True,
    help="Also run all jobs together while nothing happens.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def demo(as_json: bool, **knobs: Any) -> None:
    """Show PlexRL on a real Slurm: users share a hold that is renewed and loses a node."""
    knobs["out"] = knobs["out"].resolve()
    plan = Plan(**knobs)
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    try:
        demo_site.check_access(
            [EXAMPLES, *map(Path, python.environment()["PYTHONPATH"].split(":"))]
        )
        with site(plan) as partition:
            report, lines = run(plan, partition)
    except Exception as error:
        logs = plan.out / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        (logs / "failure.txt").write_text(traceback.format_exc(), encoding="utf-8")
        note(f"the demo failed: {_why(error)}")
        note(f"everything that was logged, and where it failed: {logs}")
        raise SystemExit(getattr(error, "exit_code", 70)) from None
    report["seconds"] = time.monotonic() - began
    (plan.out / "report.json").write_text(demo_story.as_json(report) + "\n", encoding="utf-8")
    troubles = demo_story.trouble(report)
    if as_json:
        click.echo(demo_story.as_json(report))
    else:
        words = [
            *demo_runs.closing_table(report),
            "",
            *demo_story.closing(report, lines),
            "",
            demo_story.reconciled(report["reconcile"]),
            "",
            f"{report['seconds'] / 60:.1f} minutes; everything is in {plan.out}: report.json, "
            "timeline.png, ledger.db, reports/, logs/",
        ]
        click.echo("\n".join(words))
    for trouble in troubles:
        note(f"NOT as it should be: {trouble}")
    if troubles:
        raise SystemExit(1)


def _why(error: Exception) -> str:
    if isinstance(error, PlexError):
        return error.explain()
    return str(error) if isinstance(error, ClusterError) else repr(error)


def _interrupt(_number: int, _frame: Any) -> NoReturn:
    raise KeyboardInterrupt


# ---- the site -----------------------------------------------------------------------------------


@contextmanager
def site(plan: Plan) -> Iterator[DemoPartition]:
    """A cluster with a partition that is up; nothing of both is left afterwards but the logs."""
    if plan.out.exists():
        shutil.rmtree(plan.out)
    plan.out.mkdir(parents=True)
    cluster = demo_site.make_cluster()
    partition: DemoPartition | None = None
    try:
        note(f"a private Slurm cluster in {cluster.folder}: {len(cluster.nodes)} nodes")
        with waiting("starting MariaDB, slurmdbd, slurmctld and every slurmd"):
            cluster.start()
        model = _model(cluster)
        demo_site.make_folders(cluster)
        if not plan.fake:
            with waiting("giving the service user DeepSpeed's compiled parts"):
                demo_site.give_compiled_parts(cluster)
        partition = DemoPartition(
            cluster,
            model,
            fake=plan.fake,
            renewal=plan.renewal,
        )
        demo_site.install(cluster, partition.config)
        note("plexrl admin install: job_submit.lua and TaskProlog are in place")
        engines = "engines that only pretend" if plan.fake else "DeepSpeed and vLLM come up once"
        with waiting(f"the daemon, as plxsvc, asks Slurm for a hold: {engines}, for all jobs"):
            partition.start(seconds=400)
        ((name, hold),) = partition.holds().items()
        note(f"hold {name} (Slurm job {hold['slurm_id']}) is up on {', '.join(hold['nodes'])}")
        yield partition
    finally:
        with waiting("ending everything"):
            try:
                if partition is not None:
                    partition.close()
            finally:
                cluster.stop()
                _keep(plan.out, cluster)
                shutil.rmtree(cluster.folder, ignore_errors=True)


def _model(cluster: Cluster) -> Path:
    """The tiny model where all may read it."""
    made = python.ROOT / "models" / "tiny"
    if not (made / "config.json").exists():
        raise demo_site.SiteUnusable(f"there is no model in {made}", "run scripts/setup.sh tiny")
    copy = Path(shutil.copytree(made, cluster.folder / "models" / "tiny"))
    for path in copy.iterdir():
        path.chmod(0o644)
    return copy


def _keep(out: Path, cluster: Cluster) -> None:
    """Logs, the books and what the jobs said."""
    logs, partition = out / "logs", cluster.folder / "partition"
    logs.mkdir(exist_ok=True)
    places = (
        (cluster.folder / "log", "slurm", "*"),
        (partition, "", "daemon.log"),
        (partition, "", "plexrl.toml"),
        (partition / "state" / "ranks", "ranks", "*.log"),
        (partition / "state" / "holds", "holds", "*"),
        *((cluster.home(user), f"jobs/{user}", "*") for user in USERS),
    )
    for folder, name, pattern in places:
        for path in sorted(folder.glob(pattern)):
            if path.is_file():
                (logs / name).mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, logs / name / path.name)
    for path in partition.glob("ledger.db*"):
        shutil.copyfile(path, out / path.name)


# ---- the runs -----------------------------------------------------------------------------------


def run(plan: Plan, partition: DemoPartition) -> tuple[dict[str, Any], list[str]]:
    """All runs, their figures and their story."""
    jobs = [
        Job(name=f"count-{n + 1}", user=user, seed=plan.seed + n, steps=plan.steps)
        for n, user in enumerate(USERS)
    ]
    # The event that comes last begins at its third step.
    short = max(4, plan.steps // 2)
    jobs.append(Job(name="count-4", user=USERS[0], seed=plan.seed + 3, steps=short, native=True))
    first = Job(name="count-0", user=USERS[0], seed=plan.seed, steps=4)
    ((measured,), _) = run_jobs(plan, partition, "measure", [first], tool_s=0.0)
    step = demo_figures.step_s(measured)
    tool_s = plan.tool_multiple * step
    note(f"a step takes {step:.2f} s here; tool pauses will take {tool_s:.2f} s")
    alone = [
        run_jobs(plan, partition, f"alone-{job.name}", [job], tool_s=tool_s)[0][0] for job in jobs
    ]
    rows: dict[str, SharedRun] = {}
    label = f"{len(jobs)} users' jobs"
    if plan.undisturbed:
        together, _ = run_jobs(plan, partition, "shared-undisturbed", jobs, tool_s=tool_s)
        rows[f"{label}, undisturbed"] = SharedRun(jobs=together, stretches=(), several_holds=True)
    together, facts = run_jobs(plan, partition, "shared", jobs, tool_s=tool_s, disturb=True)
    rows[f"{label}, a node lost"] = SharedRun(jobs=together, stretches=(), several_holds=True)
    with waiting("giving the holds back"):
        partition.release()
        demo_books.close(partition)
    return figures(plan, partition, rows, alone, facts, step=step)


def figures(
    plan: Plan,
    partition: DemoPartition,
    runs: dict[str, SharedRun],
    alone: Sequence[JobRun],
    facts: Facts,
    *,
    step: float,
) -> tuple[dict[str, Any], list[str]]:
    """The report from closed books, and the lines of the story."""
    pools = {f"{wpg}": str(pool) for wpg, pool in partition.query(demo_story.POOLS)}
    rows = {}
    for name, bare in runs.items():
        begin, end = bare.window_us
        found = demo_story.stretches(
            partition.query(demo_story.STRETCHES.format(begin=begin, end=end))
        )
        shared = SharedRun(jobs=bare.jobs, stretches=found, several_holds=True)
        rows[name] = demo_figures.compare(
            shared, alone, gpus=ALONE_GPUS, shared_gpus=SHARED_GPUS, pools=pools
        )
        # The last one stays: the one in which something happened.
        timeline.draw(found, plan.out / "timeline.png", title=name)
    story = demo_story.Story(
        holds=partition.query(demo_story.HOLDS),
        stays=partition.query(demo_story.STAYS),
        faults=partition.query(demo_story.FAULTS),
        moves=partition.query(demo_story.MOVES),
        said=facts.said,
    )
    books = ledger.run_report(partition.site, "reconcile")
    report = {
        "learning_identical": all(row["learning_identical"] for row in rows.values()),
        "step_seconds": step,
        "tool_seconds": plan.tool_multiple * step,
        "tool_multiple": plan.tool_multiple,
        "seed": plan.seed,
        "engines": "fake" if plan.fake else "real",
        "rows": rows,
        "events": {
            "lost_node": facts.lost_node,
            "lost_batch": facts.lost_batch,
            "renewed": facts.renewed,
            "refused_agent": facts.refused_agent,
            "recovered_us": facts.recovered_us,
        },
        "story": story.facts(),
        "reconcile": [dict(zip(books.columns, row, strict=True)) for row in books.rows],
        "flaws": [str(flaw) for flaw in partition.flaws()],
    }
    demo_runs.leave(plan.out, partition.site, report, REPORTS)
    return report, story.lines()


def run_jobs(
    plan: Plan,
    partition: DemoPartition,
    run_name: str,
    jobs: Sequence[Job],
    *,
    tool_s: float,
    disturb: bool = False,
) -> tuple[list[JobRun], Facts]:
    """Submit, show, wait, collect; ``disturb``: events happen meanwhile."""
    submissions = [submit(plan, partition, run_name, job, tool_s) for job in jobs]
    with (
        Screen(run_name, steps=max(job.steps for job in jobs)) as screen,
        partition.client() as client,
    ):
        happens = Events(partition, submissions, screen.say, lose_batch=plan.lose == "batch")
        try:
            if disturb:
                happens.start()
            rows = demo_runs.watch(client, screen, submissions, happens.look)
            facts = happens.finish()
        finally:
            happens.stop()
    return [demo_runs.collect(partition.site, job, rows[job.name]) for job in submissions], facts


def submit(
    plan: Plan, partition: DemoPartition, run_name: str, job: Job, tool_s: float
) -> Submission:
    """As its user would: a script, and one command."""
    folder = partition.cluster.home(job.user)
    stem = f"{run_name}.{job.name}"
    lines, output = folder / f"{stem}.jsonl", folder / f"{stem}.out"
    exports = "\n".join(
        f"export {name}={shlex.quote(value)}" for name, value in python.environment().items()
    )
    script = (
        f"#!/bin/bash\n#SBATCH --job-name={job.name}\n#SBATCH --ntasks=1\n"
        f"#SBATCH --output={output}\n#PLEXRL --model=tiny --seed={job.seed}\n{exports}\n"
        "export OMP_NUM_THREADS=1\n"
        # Controllers give way to the pinned WPGs: on a real site they have nodes of their own.
        f"exec nice -n 10 {python.interpreter()} {EXAMPLES / 'grpo_count.py'} --steps {job.steps} "
        f"--seed {job.seed} --tool-seconds {tool_s!r} --out {lines}\n"
    )
    if job.native:
        slurm_id = partition.cluster.sbatch(job.user, "-p", "rlvr", script=script)
        note(f"{job.user}: sbatch -p rlvr: Submitted batch job {slurm_id} ({job.name})")
    else:
        slurm_id = partition.submit(job.user, script)
        note(f"{job.user}: plexrl sbatch: Submitted batch job {slurm_id} ({job.name})")
    # Where the output is kept: the cluster's folder goes with the cluster.
    kept = plan.out / "logs" / "jobs" / job.user / output.name
    return Submission(name=job.name, slurm_id=slurm_id, lines=lines, output=kept)


if __name__ == "__main__":
    sys.exit(demo())

"""``plexrl demo``: three GRPO jobs share two WPGs, then run alone; what did sharing save?"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from plexrl_slurm.cli import daemon, demo_figures, demo_memory, demo_runs, timeline
from plexrl_slurm.cli.app import App, Number, note, waiting
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.demo_figures import JobRun, SharedRun
from plexrl_slurm.cli.demo_runs import Submission
from plexrl_slurm.cli.demo_screen import Screen
from plexrl_slurm.cli.submit import Request, Submitted, environment_for, slurm_of, submit, wrapped
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.settings import Site
from plexrl_slurm.whereabouts import POLICIES

_CONFIG = """# Written by `plexrl demo`; made new each time.
[partition]
name = "demo"
state_dir = "state"
database_url = "sqlite:///{database}"
host_dir = "{host_dir}"
{memory}
listen = "127.0.0.1:0"
policy = "{policy}"

[hold]
backend = "local"

[sharing]  # these jobs train most of the time: they share all the same, and are told how slow
placement = "fit"
max_slowdown = {most_slowdown}
max_jobs = {jobs}
max_load = {jobs}

[[wpg]]
pool = "train"
engine = "deepspeed"
cores = {train_cores}

[[wpg]]
pool = "rollout"
engine = "vllm"
cores = {rollout_cores}

[wpg.options]
kv_cache_bytes = 134217728

[[model]]
name = "tiny"
path = "models/tiny"
dtype = "float32"
max_context_length = 256
"""

_AMPLE = 'host_bytes = "2GiB"'
#: Of controllers, which need the cores that the WPGs compute on.
MOST_JOBS = 12
#: Steps before anything is measured.
_WARM_UP = 2
_REPORTS = ("savings", "usage_by_job", "hold_summary")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The demo's knobs."""

    out: Path
    jobs: int
    steps: int
    tool_multiple: float
    tool_seconds: float | None
    seed: int
    policy: str
    #: Host memory that most images do not fit into; the others wait on a disk.
    small_memory: bool = False
    #: Folder with the example scripts.
    examples: Path


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("demo"), show_default=True,
    help="Folder for everything; it is emptied first.",
)  # fmt: skip
@click.option("--jobs", type=click.IntRange(2, MOST_JOBS), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(2), default=10, show_default=True)
@click.option(
    "--tool-multiple", type=Number(0), default=2.0, show_default=True,
    help="Length of a tool call in measured step times.",
)  # fmt: skip
@click.option("--tool-seconds", type=Number(0), help="Instead of --tool-multiple.")
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option(
    "--policy", default="atc_h", show_default=True,
    type=click.Choice(POLICIES),
)  # fmt: skip
@click.option(
    "--host-memory", type=click.Choice(["ample", "small"]), default="ample", show_default=True,
    help="small: for a quarter of the images; the others wait on the disk of --out.",
)  # fmt: skip
@click.option("--keep", is_flag=True, help="Leave the partition up afterwards.")
@click.pass_obj
def demo(
    app: App,
    out: Path,
    jobs: int,
    steps: int,
    tool_multiple: float,
    tool_seconds: float | None,
    seed: int,
    policy: str,
    host_memory: str,
    keep: bool,
) -> None:
    """Show what sharing saves: GRPO jobs with tool pauses, together and alone."""
    examples = Path(__file__).resolve().parents[2] / "examples"
    if not (examples / "grpo_count.py").exists():
        raise BadInput(f"the demo needs the example scripts in {examples}: run it in a checkout")
    plan = Plan(
        out=out.resolve(),
        jobs=jobs,
        steps=steps,
        tool_multiple=tool_multiple,
        tool_seconds=tool_seconds,
        seed=seed,
        policy=policy,
        small_memory=host_memory == "small",
        examples=examples,
    )
    if plan.small_memory:
        demo_memory.refuse_few(jobs)
    site = prepare(plan)
    try:
        report = run(plan, site)
    finally:
        if not keep:
            with waiting("giving the GPUs back"):
                daemon.stop(site, release=True, timeout_s=60)
    demo_runs.leave(plan.out, site, report, _REPORTS)
    words = [
        *demo_runs.closing_table(report),
        *demo_memory.sentences(report),
        f"everything is in {plan.out}: report.json, timeline.png, ledger.db, reports/",
    ]
    app.answer(report, "\n".join(words))


def prepare(plan: Plan) -> Site:
    """Settings, model, an empty folder, and the partition up."""
    if (plan.out / "plexrl.toml").exists():
        _clear(plan.out)
    plan.out.mkdir(parents=True, exist_ok=True)
    key = hashlib.sha256(str(plan.out).encode()).hexdigest()[:8]
    host_dir = Path("/dev/shm") / f"plexrl-demo-{os.getuid()}-{key}"
    host_dir.mkdir(mode=0o700, exist_ok=True)
    cores = sorted(os.sched_getaffinity(0))
    pinned = len(cores) >= 2
    model = _model(plan)
    config = plan.out / "plexrl.toml"
    memory = demo_memory.Budget.small(plan.jobs, model) if plan.small_memory else None
    config.write_text(
        _CONFIG.format(
            database=plan.out / "ledger.db",
            host_dir=host_dir,
            memory=memory.toml(plan.out) if memory else _AMPLE,
            policy=plan.policy,
            jobs=plan.jobs,
            most_slowdown=4 * plan.jobs,
            train_cores=[[cores[0]]] if pinned else [],
            rollout_cores=[[cores[1]]] if pinned else [],
        ),
        encoding="utf-8",
    )
    site = App(config=config).site()
    with waiting("starting the partition: DeepSpeed and vLLM come up once, for all jobs") as say:
        daemon.start(site, timeout_s=300, wait_for_wpgs=True, say=say)
    return site


def _model(plan: Plan) -> Path:
    model = plan.out / "models" / "tiny"
    if not model.exists():
        with waiting("making the tiny model"):
            model.parent.mkdir(exist_ok=True)
            subprocess.run(
                [sys.executable, str(plan.examples / "make_models.py"), str(model), "tiny"],
                check=True,
                capture_output=True,
            )
    return model


def _clear(out: Path) -> None:
    """End what an earlier demo left running here, and delete its files; models stay."""
    site = App(config=out / "plexrl.toml").site()
    if daemon.stop(site, release=True, timeout_s=60):
        note(f"an earlier demo was still up in {out}: it is down now")
    for path in out.iterdir():
        if path.name == "models":
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def run(plan: Plan, site: Site) -> dict[str, Any]:
    """All runs, and their figures."""
    with Client(site) as client:
        nodes = client.nodes()
        gpus = sum(int(wpg["gpus"]) for wpg in nodes["wpgs"])
        pools = {str(wpg["id"]): str(wpg["pool"]) for wpg in nodes["wpgs"]}
        # What engines compile at their first calls is nobody's step.
        run_jobs(replace(plan, steps=_WARM_UP), site, client, "warm-up", [0], tool_s=0.0)
        single = [
            run_jobs(plan, site, client, f"alone-{n + 1}-no-pause", [n], tool_s=0.0)[0]
            for n in range(plan.jobs)
        ]
        step = demo_figures.step_s(single[0])
        tool_s = plan.tool_multiple * step if plan.tool_seconds is None else plan.tool_seconds
        note(f"a step takes {step:.2f} s here; tool pauses will take {tool_s:.2f} s")
        everybody = list(range(plan.jobs))
        together = shared_run(plan, site, client, "shared-no-pause", everybody, tool_s=0.0)
        paused = shared_run(plan, site, client, "shared", everybody, tool_s=tool_s)
        alone = [
            run_jobs(plan, site, client, f"alone-{n + 1}", [n], tool_s=tool_s)[0]
            for n in range(plan.jobs)
        ]
    rows = {
        f"{plan.jobs} with pauses": demo_figures.compare(paused, alone, gpus=gpus, pools=pools),
        f"{plan.jobs} without": demo_figures.compare(together, single, gpus=gpus, pools=pools),
    }
    main = next(iter(rows.values()))
    begin, end = paused.window_us
    timeline.draw(
        [s for s in paused.stretches if s["stop_us"] > begin and s["start_us"] < end],
        plan.out / "timeline.png",
        title=f"{plan.jobs} GRPO jobs share two WPGs",
    )
    identical = all(row["learning_identical"] for row in rows.values())
    memory = demo_memory.Budget.small(plan.jobs, _model(plan)) if plan.small_memory else None
    return {
        **main,
        **({"host_memory": memory.row()} if memory else {}),
        "learning_identical": identical,
        "step_seconds": step,
        "tool_seconds": tool_s,
        "tool_multiple": tool_s / step,
        "policy": plan.policy,
        "seed": plan.seed,
        "rows": rows,
    }


def shared_run(
    plan: Plan, site: Site, client: Client, name: str, numbers: Sequence[int], *, tool_s: float
) -> SharedRun:
    """Jobs at the same time, and the timeline of their window."""
    before = demo_memory.moves(site.state_dir)
    jobs = run_jobs(plan, site, client, name, numbers, tool_s=tool_s)
    moved = (demo_memory.moves(site.state_dir) - before).row() if plan.small_memory else None
    begin = min(job.started_us for job in jobs)
    end = max(job.ended_us for job in jobs)
    stretches = client.timeline(since_us=begin, until_us=end)
    return SharedRun(jobs=jobs, stretches=stretches, nvme=moved)


def run_jobs(
    plan: Plan, site: Site, client: Client, name: str, numbers: Sequence[int], *, tool_s: float
) -> list[JobRun]:
    """Submit, show, wait, collect."""
    folder = plan.out / "runs" / name
    folder.mkdir(parents=True, exist_ok=True)
    jobs = []
    for number in numbers:
        label = f"count-{number + 1}"
        done = _submit(plan, site, client, folder, label, number, tool_s)
        jobs.append(
            Submission(
                name=label,
                slurm_id=done.slurm_id,
                lines=folder / f"{label}.jsonl",
                output=folder / f"{label}.out",
            )
        )
    with Screen(name, steps=plan.steps) as screen:
        rows = demo_runs.watch(client, screen, jobs)
    return [demo_runs.collect(site, job, rows[job.name]) for job in jobs]


def _submit(
    plan: Plan,
    site: Site,
    client: Client,
    folder: Path,
    name: str,
    number: int,
    tool_s: float,
) -> Submitted:
    seed = plan.seed + number
    # Controllers give way to the pinned ranks: on a real site they have nodes of their own.
    command = (
        f"exec nice -n 10 {sys.executable} {plan.examples / 'grpo_count.py'} --steps {plan.steps} "
        f"--seed {seed} --tool-seconds {tool_s!r} --out {folder / name}.jsonl"
    )
    return submit(
        client,
        slurm_of(site),
        Request(
            partition="demo",
            name=name,
            account="demo",
            models=("tiny",),
            seed=seed,
            priority=1,
            shown="wrap",
            script=wrapped(command),
            arguments=(),
            workdir=folder,
            environment=environment_for("ALL") | {"OMP_NUM_THREADS": "1"},
            output=str(folder / f"{name}.out"),
        ),
    )

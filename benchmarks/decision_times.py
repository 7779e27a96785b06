"""How long does deciding take, against what was promised? And how fast is the simulator?

``python -m benchmarks.decision_times [--trace FILE] [--gpus N] [--whole]``; no GPU, no daemon, one
core. CPU time, best of three, as others work too. ``--trace`` simulates the first jobs
of a trace too (all with ``--whole``: quarter takes ten minutes), for events a second and memory.
"""

import argparse
import random
import resource
from pathlib import Path
from statistics import median
from time import process_time, process_time_ns

from benchmarks.core_decision import CAUSE, decisions_us
from plexrl_slurm.core.backlog import Backlog, Waiting
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.grouping import Group, Home, Member, Pools, Rules, Why, place
from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    Call,
    CallArrived,
    Deployment,
    DeploymentPlaced,
    FunctionKind,
    Pool,
    Run,
    RunEnded,
    Wpg,
    WpgHeld,
    WpgUp,
)
from plexrl_slurm.core.policy import POLICIES
from plexrl_slurm.core.predict import Profile
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.sim.cluster import Plan, split
from plexrl_slurm.sim.run import simulate
from plexrl_slurm.sim.trace import read_trace

WPGS, JOBS_EACH = 500, 4
S = 1_000_000


def main() -> None:
    """Print one line for each promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--whole", action="store_true")
    given = parser.parse_args()
    print(f"{'what':<58}{'promised':>12}{'found':>26}")
    best = min(decisions_us("atc_h", 16)[0] for _ in range(3))
    tell("one decision, 16 candidates, median (atc_h)", "30 us", f"{best:.1f} us")
    calls, ends = min(plans_ms() for _ in range(3))
    what = f"plan over {WPGS} WPGs with {WPGS * JOBS_EACH:,} jobs"
    tell(f"{what}: a call came to each", "5 ms", f"{calls:.2f} ms")
    tell(f"{what}: a function ended on each", "", f"{ends:.2f} ms")
    each, passes = min(placements_ms() for _ in range(3))
    tell("placement decision, 2,000 jobs on 2,048 GPUs", "10, max 50 ms",
         f"{median(each):.3f}, max {max(each):.2f} ms")  # fmt: skip
    tell("queue pass (at most 64 decisions), same", "", f"{median(passes):.2f}, max "
         f"{max(passes):.2f} ms")  # fmt: skip
    if given.trace is not None:
        simulator(given.trace, given.gpus, whole=given.whole)


def tell(what: str, promised: str, found: str) -> None:
    """One line."""
    print(f"{what:<58}{promised:>12}{found:>26}", flush=True)


def plans_ms() -> tuple[float, float]:
    """One ``plan`` for a burst of facts about every WPG: calls that come while they work, then
    functions that end while the three others wait."""
    core = SchedulerCore(POLICIES["atc_h"], costs=SwitchCosts())
    for number in range(WPGS):
        wpg = Wpg(id=WpgId(f"train-{number}"), pool=Pool.TRAIN, gpus=8)
        core.handle(WpgHeld(wpg=wpg, at_us=0, cause=CAUSE))
        core.handle(WpgUp(wpg=wpg.id, at_us=0, cause=CAUSE))
        for mine in range(JOBS_EACH):
            job = JobId(number * JOBS_EACH + mine + 1)
            name = DeploymentId(f"model-{job}")
            deployment = Deployment(
                id=name, job=job, pool=Pool.TRAIN, wpg=wpg.id, image_bytes=2**30, content=name
            )
            core.handle(DeploymentPlaced(deployment=deployment, at_us=0, cause=CAUSE))
    calls_ms: list[float] = []
    ends_ms: list[float] = []
    running: list[Run] = []
    for mine in range(JOBS_EACH):
        for number in range(WPGS):
            ask(core, JobId(number * JOBS_EACH + mine + 1), 0, mine)
        begin = process_time_ns()
        said = core.plan(mine, CAUSE)
        if mine:  # at the first they begin, at the others they work
            calls_ms.append((process_time_ns() - begin) / 1e6)
        running += [order for order in said if isinstance(order, Run)]
    for run in running:
        job, at_us = JobId(int(run.call.partition("/")[0])), S
        core.handle(RunEnded(wpg=run.wpg, call=run.call, part=0, ok=True, at_us=at_us, cause=CAUSE))
        ask(core, job, 1, at_us)
    begin = process_time_ns()
    core.plan(S, CAUSE)
    ends_ms.append((process_time_ns() - begin) / 1e6)
    return median(calls_ms), median(ends_ms)


def ask(core: SchedulerCore, job: JobId, seq: int, at_us: int) -> None:
    """One call of a job."""
    call = Call(
        id=CallId(f"{job}/{seq}"), deployment=DeploymentId(f"model-{job}"), job=job, seq=seq,
        kind=FunctionKind.FORWARD_BACKWARD if seq else FunctionKind.CREATE,
    )  # fmt: skip
    core.handle(CallArrived(call=call, at_us=at_us, cause=CAUSE))


def placements_ms() -> tuple[list[float], list[float]]:
    """Every decision and every pass while 2,000 jobs share 2,048 GPUs with ``fit``, or wait."""
    rng = random.Random(1)
    train, rollout = 1360, 688
    pools = Pools(train_free=train, rollout_free=rollout, node_gpus=8, node_bytes=1500 * 10**9)
    backlog, rules = Backlog(), Rules()
    each: list[float] = []
    passes: list[float] = []
    homes: dict[JobId, int] = {}

    def decide(member: Member) -> Home | Why:
        begin = process_time_ns()
        found = place(member, pools, rules)
        each.append((process_time_ns() - begin) / 1e6)
        return found

    def take(member: Member, home: Home) -> None:
        number = home.group
        if number is None:
            number = max(pools.groups, default=0) + 1
            host_bytes = pools.host_bytes(member.train_gpus)
            pools.groups[number] = Group(
                number=number, gpus=member.train_gpus, host_bytes=host_bytes
            )
            pools.train_free -= member.train_gpus
        pools.groups[number].members[member.job] = member
        pools.rollout_free -= member.rollout_gpus
        homes[member.job] = number

    def look(at_us: int) -> None:
        begin = process_time_ns()
        backlog.run(at_us, decide, take)
        passes.append((process_time_ns() - begin) / 1e6)

    for number in range(1, 2_001):
        backlog.arrive(Waiting(member=drawn(rng, number), priority=1.0, since_us=number * S))
        if number > 1_500:
            look(number * S)
    for after in range(500):
        job = rng.choice(sorted(homes))
        group = pools.groups[homes.pop(job)]
        pools.rollout_free += group.members.pop(job).rollout_gpus
        if not group.members:
            pools.train_free += group.gpus
            del pools.groups[group.number]
        look((2_001 + after) * S)
    return each, passes


def drawn(rng: random.Random, number: int) -> Member:
    """A job like those of the traces."""
    overlaps = rng.random() < 0.57
    phase_us, step_us = rng.randint(20, 300) * S, rng.randint(200, 1500) * S
    return Member(
        job=JobId(number), train_gpus=rng.choice((8, 8, 16, 16, 16, 32)), rollout_gpus=rng.choice(
            (1, 2, 8)), image_bytes=rng.choice((112, 480)) * 10**9, max_slowdown=1.1,
        profile=Profile(
            step_us=step_us, phase_us=min(phase_us, step_us), function_us=phase_us // 6,
            switch_us=S // 2, overlaps=overlaps, spread_us=step_us // 10,
            slack_us=max(0, step_us - phase_us) if overlaps else 0,
        ),
    )  # fmt: skip


def simulator(trace: Path, gpus: int, *, whole: bool) -> None:
    """Events a second of CPU time, and the most memory the process ever had."""
    jobs = read_trace(trace)
    jobs = jobs if whole else jobs[:12]
    begin = process_time()
    ran = simulate(jobs, split(gpus, "2:1"), placement="fit", plan=Plan()).figures
    took_s = process_time() - begin
    name = f"simulator: {trace.stem}, {len(jobs):,} jobs, {ran.events:,} events"
    tell(name, "15,000 /s", f"{ran.events / took_s:,.0f} /s")
    tell("the whole of it", "week 300 s", f"{took_s:,.0f} s of CPU")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    tell("memory of the process", "1,024 MiB", f"{most:,.0f} MiB")


if __name__ == "__main__":
    main()

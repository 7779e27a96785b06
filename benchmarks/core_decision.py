"""How long does the core think? One decision with 2, 5 and 16 deployments waiting on a WPG.

``python benchmarks/core_decision.py``; no GPU, no daemon, one core.
"""

from statistics import median
from time import perf_counter_ns

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    Call,
    CallArrived,
    Deployment,
    DeploymentPlaced,
    FunctionKind,
    Pool,
    Run,
    RunEnded,
    SaveImage,
    Switch,
    SwitchEnded,
    Wpg,
    WpgHeld,
    WpgUp,
)
from plexrl_slurm.core.policy import POLICIES
from plexrl_slurm.core.scheduler import SchedulerCore

CAUSE = CauseId("benchmark")
WPG = Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=8)
DECISIONS = 4_000
KINDS = (FunctionKind.FORWARD_BACKWARD, FunctionKind.FORWARD_BACKWARD, FunctionKind.OPTIM_STEP)


def decisions_us(policy: str, waiters: int) -> tuple[float, float]:
    """Median microseconds of ``plan``, and of one whole function (its events and plans)."""
    core = SchedulerCore(POLICIES[policy], costs=SwitchCosts())
    core.handle(WpgHeld(wpg=WPG, at_us=0, cause=CAUSE))
    core.handle(WpgUp(wpg=WPG.id, at_us=0, cause=CAUSE))
    calls: dict[CallId, Call] = {}
    asked: dict[JobId, int] = {}

    def ask(job: JobId, at_us: int) -> None:
        seq = asked[job] = asked.get(job, -1) + 1
        kind = KINDS[seq % len(KINDS)] if seq else FunctionKind.CREATE
        name = DeploymentId(f"model-{job}")
        call = Call(id=CallId(f"{job}/{seq}"), deployment=name, job=job, kind=kind, seq=seq)
        calls[call.id] = call
        core.handle(CallArrived(call=call, at_us=at_us, cause=CAUSE))

    for number in range(1, waiters + 2):
        job = JobId(number)
        name = DeploymentId(f"model-{number}")
        deployment = Deployment(
            id=name, job=job, pool=Pool.TRAIN, wpg=WPG.id, image_bytes=2**30, content=name
        )
        core.handle(DeploymentPlaced(deployment=deployment, at_us=0, cause=CAUSE))
        ask(job, 0)
    at_us, spent = 0, 0
    plans: list[int] = []
    functions: list[int] = []
    while len(functions) < DECISIONS:
        begin = perf_counter_ns()
        todo = core.plan(at_us, CAUSE)
        took = perf_counter_ns() - begin
        plans.append(took)
        spent += took
        at_us += 50_000
        begin = perf_counter_ns()
        for order in todo:
            match order:
                case Run(call=call, part=part):
                    core.handle(
                        RunEnded(
                            wpg=WPG.id, call=call, part=part, ok=True, at_us=at_us, cause=CAUSE
                        )
                    )
                    ask(calls[call].job, at_us)
                    functions.append(spent + perf_counter_ns() - begin)
                    begin, spent = perf_counter_ns(), 0
                case Switch() | SaveImage():
                    core.handle(
                        SwitchEnded(
                            wpg=WPG.id, ok=True, moved_bytes=2**30, at_us=at_us, cause=CAUSE
                        )
                    )
                case _:
                    pass
        spent += perf_counter_ns() - begin if spent else 0
    return median(plans) / 1e3, median(functions) / 1e3


def main() -> None:
    """Print the table."""
    print(f"{'policy':<14}{'waiters':>8}{'plan us':>10}{'function us':>13}")
    for policy in POLICIES:
        for waiters in (2, 5, 16):
            plan_us, function_us = decisions_us(policy, waiters)
            print(f"{policy:<14}{waiters:>8}{plan_us:>10.1f}{function_us:>13.1f}")


if __name__ == "__main__":
    main()

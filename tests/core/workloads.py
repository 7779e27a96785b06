"""Jobs for the harness: what clients ask, in any order and at any time."""

import random

from plexrl_slurm.core.ids import CallId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import Call, Deployment, FunctionKind, Pool, Wpg
from tests.core.harness import World

TRAIN = Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=2)
ROLLOUT = Wpg(id=WpgId("rollout-0"), pool=Pool.ROLLOUT, gpus=3)
TRAIN_1 = Wpg(id=WpgId("train-1"), pool=Pool.TRAIN, gpus=2)
ROLLOUT_1 = Wpg(id=WpgId("rollout-1"), pool=Pool.ROLLOUT, gpus=3)


def trained(job: int, name: str = "") -> Deployment:
    """A training deployment of ``job``."""
    name = name or f"model-{job}"
    return Deployment(
        id=DeploymentId(name), job=JobId(job), pool=Pool.TRAIN, wpg=TRAIN.id,
        image_bytes=1_000_000 * job, content=name,
    )  # fmt: skip


def sampled(job: int, name: str, content: str = "") -> Deployment:
    """A snapshot of ``job``."""
    return Deployment(
        id=DeploymentId(name), job=JobId(job), pool=Pool.ROLLOUT, wpg=ROLLOUT.id,
        image_bytes=500_000, content=content or name,
    )  # fmt: skip


def call(
    deployment: Deployment, kind: FunctionKind, seq: int, *, tokens: int = 0, parts: int = 1,
    doomed: bool = False,
) -> Call:  # fmt: skip
    """One call."""
    return Call(
        id=CallId(f"{deployment.id}/{seq}"), deployment=deployment.id, job=deployment.job,
        kind=kind, seq=seq, tokens=tokens, parts=parts, doomed=doomed,
    )  # fmt: skip


def program(rng: random.Random, deployment: Deployment, steps: int) -> list[Call]:
    """The calls of a training deployment, in order."""
    kinds = [FunctionKind.CREATE]
    for _ in range(steps):
        if rng.random() < 0.5:
            kinds.append(FunctionKind.FORWARD)
        kinds += [FunctionKind.FORWARD_BACKWARD] * rng.randint(1, 3)
        kinds.append(FunctionKind.OPTIM_STEP)
        kinds += rng.sample([FunctionKind.PUBLISH, FunctionKind.SAVE_STATE], rng.randint(0, 2))
        if rng.random() < 0.1:
            kinds.append(FunctionKind.LOAD_STATE)
    split = {FunctionKind.FORWARD, FunctionKind.FORWARD_BACKWARD}
    return [
        call(
            deployment, kind, seq, parts=rng.choice((1, 1, 3)) if kind in split else 1,
            doomed=seq > 0 and rng.random() < 0.05,
        )
        for seq, kind in enumerate(kinds)
    ]  # fmt: skip


def ask(world: World, calls: list[Call], *, trouble: float, spread_us: int) -> None:
    """Submit in any order, some twice, some of them bad, deadly or cancelled."""
    rng, at_us = world.rng, 0
    for asked in calls:
        at_us += rng.choice((0, 0, rng.randint(0, spread_us)))
        fails = rng.random() < trouble
        deadly = rng.random() < trouble / 4 and asked.seq > 0
        # Calls overtake each other on their way.
        delays = [at_us + rng.randint(0, spread_us // 2) for _ in range(1 + (rng.random() < 0.2))]
        for delay in delays:
            world.after(delay, world.submit, asked, fails=fails, deadly=deadly)
        if rng.random() < trouble:
            world.after(rng.randint(0, 2 * at_us + 1), world.cancel, asked.id)


def crowd(world: World, *, trainers: int, samplers: int, steps: int, trouble: float) -> None:
    """Several jobs, each with a training deployment and snapshots, some of shared content."""
    rng, spread_us = world.rng, 40 * world.unit_us
    for job in range(1, trainers + 1):
        model = trained(job)
        calls = program(rng, model, steps)
        world.after(rng.randint(0, spread_us), world.place, model)
        ask(world, calls, trouble=trouble, spread_us=spread_us)
    for job in range(1, samplers + 1):
        for version in range(2):
            shared = "base" if rng.random() < 0.4 else ""
            snapshot = sampled(job, f"snapshot-{job}-{version}", shared)
            world.after(rng.randint(0, spread_us), world.place, snapshot)
            calls = [
                call(snapshot, FunctionKind.SAMPLE, seq, tokens=rng.randint(0, 9),
                     parts=rng.choice((1, 1, 1, 2)), doomed=rng.random() < 0.03)
                for seq in range(rng.randint(1, 12))
            ]  # fmt: skip
            ask(world, calls, trouble=trouble, spread_us=spread_us)


def train_loop(world: World, model: Deployment, *, steps: int, micro: int, gap_us: int,
               pause_us: int) -> None:  # fmt: skip
    """A client that waits for every answer: micro-steps, optim_step, publish, a long pause."""
    kinds = [FunctionKind.CREATE]
    for _ in range(steps):
        kinds += [FunctionKind.FORWARD_BACKWARD] * micro
        kinds += [FunctionKind.OPTIM_STEP, FunctionKind.PUBLISH]
    calls = [call(model, kind, seq) for seq, kind in enumerate(kinds)]

    def submit(index: int) -> None:
        asked = calls[index]
        if index + 1 < len(calls):
            ends = asked.kind in (FunctionKind.PUBLISH, FunctionKind.CREATE)
            rest = pause_us if ends else gap_us
            delay_us = world.rng.randint(rest // 2, rest)
            world.waiters[asked.id] = lambda: world.after(delay_us, submit, index + 1)
        world.submit(asked)

    world.place(model)
    submit(0)


def sample_stream(world: World, snapshot: Deployment, *, calls: int, every_us: int) -> None:
    """A client that never lets its sampler run dry."""
    world.place(snapshot)
    for seq in range(calls):
        asked = call(snapshot, FunctionKind.SAMPLE, seq, tokens=seq % 7)
        world.after(seq * every_us, world.submit, asked)

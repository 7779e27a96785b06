"""Any trace: every job ends, alone as if it were alone, and none trains on old weights."""

from collections import Counter, defaultdict
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.ids import CallId, JobId
from plexrl_slurm.core.messages import AnyInstruction, Call, Finish, FunctionKind, Run
from plexrl_slurm.core.policy import POLICIES
from plexrl_slurm.sim.cluster import PLACEMENTS, Cluster, Plan
from plexrl_slurm.sim.run import simulate
from plexrl_slurm.sim.trace import TraceJob
from plexrl_slurm.sim.world import World
from tests.core.effort import effort, tried
from tests.sim.traces import job

CLUSTER = Cluster(train_gpus=32, rollout_gpus=32)
#: By mode: how many versions old weights were.
LAGS: dict[str, set[int]] = {"sync": set(), "async1": set()}


def made(number: int, draw: tuple[str, int, int, int, float, float, int]) -> TraceJob:
    mode, steps, gpus, micro_steps, rollout_s, sigma, submit_us = draw
    return job(
        f"j{number}", mode=mode, steps=steps, seed=number, submit_us=submit_us, train__gpus=gpus,
        phases__fwdbwd_s__count=micro_steps, phases__rollout_s__median=rollout_s,
        phases__rollout_s__sigma=sigma, fail_step=None if steps % 3 else 2,
        phases__tool={"stalls": number % 3, "stall_s": 3.25},
    )  # fmt: skip


JOBS = st.tuples(
    st.sampled_from(["sync", "async1"]), st.integers(1, 9), st.sampled_from([8, 8, 16]),
    st.integers(1, 4), st.sampled_from([0.0, 5.0, 70.0]), st.sampled_from([0.0, 0.5]),
    st.integers(0, 900_000_000),
)  # fmt: skip
TRACES = st.lists(JOBS, min_size=1, max_size=7).map(
    lambda drawn: [made(number, each) for number, each in enumerate(drawn)]
)


class Watched(World):
    """Sees in what the core says, not in what controllers count, with which weights each rollout
    begins, and that it has ended before it is trained on."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        #: Of each job: publishes and whole rollouts that were answered.
        self.published: Counter[JobId] = Counter()
        self.sampled: Counter[JobId] = Counter()
        #: By call: the first and the last of a rollout, and its number.
        self.firsts: dict[CallId, int] = {}
        self.lasts: set[CallId] = set()
        self.begun: dict[JobId, list[int]] = defaultdict(list)
        #: Published when each rollout began to run.
        self.versions: dict[JobId, dict[int, int]] = defaultdict(dict)

    def call(self, job: JobId, kind: FunctionKind, seq: int, length_us: int) -> None:
        if kind is FunctionKind.SAMPLE:
            controller, name = self._controllers[job], CallId(f"rollout-{job}/{seq}")
            number = controller._begun - 1
            if number == len(self.begun[job]):
                self.firsts[name] = number
                self.begun[job].append(number)
            if not controller._parts:  # after the tools that it waited for last
                self.lasts.add(name)
        super().call(job, kind, seq, length_us)

    def _do(self, instructions: list[AnyInstruction]) -> None:
        for order in instructions:
            if isinstance(order, Run | Finish):
                self.see(order, self._calls[order.call][0])
            super()._do([order])

    def see(self, order: Run | Finish, call: Call) -> None:
        job, kind = call.job, call.kind
        if isinstance(order, Finish):
            self.published[job] += kind is FunctionKind.PUBLISH
            self.sampled[job] += call.id in self.lasts
        elif call.id in self.firsts:  # one that is lost with its node runs again
            self.versions[job].setdefault(self.firsts[call.id], self.published[job])
        elif kind is FunctionKind.FORWARD and not order.replay:
            assert self.sampled[job] > self.published[job], "it trains on what is not sampled"


@effort(25)
@given(
    trace=TRACES, policy=st.sampled_from(sorted(POLICIES)), seed=st.integers(0, 99),
    losses=st.sampled_from([0.0, 0.0, 0.5]), holds=st.sampled_from([0.0, 0.0, 0.05]),
)  # fmt: skip
def test_every_job_ends_and_trains_on_weights_one_step_old_at_most(
    trace: list[TraceJob], policy: str, seed: int, losses: float, holds: float
) -> None:
    plan = Plan(
        policy=policy,
        seed=seed,
        node_loss_hours=losses,
        restart_us=1_000_000,
        hold_limit_us=int(holds * 3_600_000_000),
        renew_us=1_000_000,
    )
    world = Watched(sorted(trace, key=lambda each: (each.submit_us, each.id)), CLUSTER, plan)
    world.run()
    for number, record in world.records.items():
        assert record.end_us >= record.start_us >= record.submit_us
        ahead = 1 if record.job.trace.overlaps else 0
        versions = world.versions[number]
        assert sorted(versions) == list(range(record.job.trace.length))
        assert all(0 <= rollout - version <= ahead for rollout, version in versions.items())
        LAGS[record.job.trace.mode] |= {rollout - version for rollout, version in versions.items()}
    assert sum(world.gpu_us.values()) == sum(world._group_us.values()) + sum(
        record.own_gpu_us for record in world.records.values()
    )
    tried("traces")


def test_those_that_sample_ahead_had_weights_one_step_old_and_others_never() -> None:
    if not LAGS["sync"]:
        test_every_job_ends_and_trains_on_weights_one_step_old_at_most()
    assert LAGS["sync"] == {0}
    assert LAGS["async1"] == {0, 1}


@effort(15)
@given(
    drawn=JOBS, policy=st.sampled_from(sorted(POLICIES)), placement=st.sampled_from([*PLACEMENTS])
)
def test_alone_a_job_takes_exactly_what_it_takes_alone(
    drawn: tuple[str, int, int, int, float, float, int], policy: str, placement: str
) -> None:
    ran = simulate(
        [made(1, drawn)], CLUSTER, placement=placement, plan=replace(Plan(), policy=policy)
    )
    (record,) = ran.world.records.values()
    assert record.end_us - record.start_us == record.job.alone_us()
    assert ran.figures.efficiency == 1.0
    tried("alone")

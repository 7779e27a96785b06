"""What is learned of a job is what it would be like alone, whatever it had to wait for."""

from collections.abc import Callable

import pytest

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.estimates import Estimates
from plexrl_slurm.core.ids import CallId, CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.learning import Learned, Learner, Quantiles
from plexrl_slurm.core.messages import (
    AnyEvent,
    AnyInstruction,
    Call,
    CallArrived,
    Deployment,
    DeploymentDropped,
    DeploymentPlaced,
    FunctionKind,
    Pool,
    Run,
    RunEnded,
    SaveImage,
    Switch,
    SwitchEnded,
    Tick,
    WakeAt,
    Wpg,
    WpgDown,
    WpgHeld,
    WpgUp,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore

S = 1_000_000
C = CauseId("test")
WPGS = {pool: WpgId(f"{pool}-0") for pool in Pool}


class Bench:
    """A core and a learner that hears all of it; functions take as long as they are told."""

    def __init__(self) -> None:
        self.core = SchedulerCore(find_policy("drain_first"), costs=SwitchCosts())
        self.learner = Learner()
        self.now, self.stepped = 0, 0
        self.lengths: dict[CallId, int] = {}
        self.timers: list[tuple[int, int, Callable[[], None]]] = []
        self.seqs: dict[DeploymentId, int] = {}
        self.switch_us = S // 2
        for pool, name in WPGS.items():
            self.feed(WpgHeld(at_us=0, cause=C, wpg=Wpg(id=name, pool=pool, gpus=1)))
            self.feed(WpgUp(at_us=0, cause=C, wpg=name))

    def feed(self, event: AnyEvent) -> None:
        out = self.core.handle(event)
        if self.learner.heard(event) is not None:
            self.stepped += 1
        self.said(out)
        self.said(self.core.plan(self.now, C))

    def said(self, out: list[AnyInstruction]) -> None:
        self.learner.said(self.now, out)
        for order in out:
            if isinstance(order, Run):
                self.after(self.lengths[order.call], self.ended, order)
            elif isinstance(order, Switch | SaveImage):
                self.after(self.switch_us, self.switched, order.wpg)
            elif isinstance(order, WakeAt):
                self.after(max(0, order.at_us - self.now), self.tick)

    def tick(self) -> None:
        self.feed(Tick(at_us=self.now, cause=C))

    def ended(self, order: Run) -> None:
        self.feed(
            RunEnded(
                at_us=self.now, cause=C, wpg=order.wpg, call=order.call, part=order.part, ok=True
            )
        )

    def switched(self, wpg: WpgId) -> None:
        self.feed(SwitchEnded(at_us=self.now, cause=C, wpg=wpg, ok=True, moved_bytes=1))

    def after(self, length_us: int, action: Callable[..., None], *args: object) -> None:
        entry = (self.now + length_us, len(self.timers), lambda: action(*args))
        self.timers.append(entry)

    def run(self, until_us: int) -> None:
        while due := [timer for timer in self.timers if timer[0] <= until_us]:
            first = min(due, key=lambda timer: timer[:2])
            self.timers.remove(first)
            self.now = first[0]
            first[2]()
        self.now = until_us

    def place(self, job: int) -> None:
        for pool in Pool:
            name = DeploymentId(f"{pool}-{job}")
            deployment = Deployment(
                id=name, job=JobId(job), pool=pool, wpg=WPGS[pool], image_bytes=1, content=name
            )
            self.feed(DeploymentPlaced(at_us=self.now, cause=C, deployment=deployment))
        self.call(job, FunctionKind.CREATE, S // 10)

    def call(self, job: int, kind: FunctionKind, length_us: int, tokens: int = 0) -> CallId:
        pool = Pool.ROLLOUT if kind is FunctionKind.SAMPLE else Pool.TRAIN
        name = DeploymentId(f"{pool}-{job}")
        seq = self.seqs[name] = self.seqs.get(name, -1) + 1
        call = Call(
            id=CallId(f"{name}/{seq}"),
            deployment=name,
            job=JobId(job),
            kind=kind,
            seq=seq,
            tokens=tokens,
        )
        self.lengths[call.id] = length_us
        self.feed(CallArrived(at_us=self.now, cause=C, call=call))
        return call.id

    def step(self, job: int, *, sample: int, train: int, gap: int = 0) -> None:
        """Seconds of one synchronous step, from now on."""
        self.call(job, FunctionKind.SAMPLE, sample * S)
        self.until_idle(job)
        self.run(self.now + S)  # the reward
        for _ in range(2):
            self.call(job, FunctionKind.FORWARD_BACKWARD, train * S // 2, tokens=5000)
            self.until_idle(job)
            self.run(self.now + gap)
        self.call(job, FunctionKind.OPTIM_STEP, S)
        self.until_idle(job)

    def until_idle(self, job: int) -> None:
        names = {f"{pool}-{job}" for pool in Pool}
        while any(
            call.rpartition("/")[0] in names and not self.done(call) for call in self.lengths
        ):
            self.run(min(timer[0] for timer in self.timers))

    def done(self, call: CallId) -> bool:
        return call not in self.learner._calls

    def learned(self, job: int = 1) -> Learned:
        found = self.learner.learned(JobId(job))
        assert found is not None
        return found


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.place(1)
    made.until_idle(1)
    return made


def test_the_first_step_is_not_measured_and_each_later_one_is_said(bench: Bench) -> None:
    bench.step(1, sample=10, train=4)
    assert bench.learner.learned(JobId(1)) is None
    for _ in range(3):
        bench.step(1, sample=10, train=4)
    assert (bench.stepped, bench.learned().steps) == (3, 3)


def test_a_synchronous_job_alone(bench: Bench) -> None:
    for _ in range(4):
        bench.step(1, sample=10, train=4, gap=S // 5)
    found = bench.learned()
    # 10 s of samples, 1 s of reward, two halves of 2 s with pauses, 1 s for the optimizer.
    assert found.step_us == 16 * S + 2 * S // 5
    assert found.phase_us == 5 * S + 2 * S // 5
    assert found.function_us == 2 * S
    assert found.sample_us == 10 * S
    assert (found.overlap_percent, found.spread_us) == (0, 0)
    assert found.functions["forward_backward/13"].count == 8
    assert found.functions["forward_backward/13"].mean_us == 2 * S
    habits = found.habits(7)
    assert not habits.train.overlaps
    assert habits.train.switch_us == 7  # it was never switched
    assert habits.rollout.phase_us == 10 * S


def test_what_a_job_waits_for_another_is_no_part_of_its_step(bench: Bench) -> None:
    bench.step(1, sample=10, train=4)
    bench.place(2)
    bench.until_idle(2)
    for _ in range(4):
        bench.call(1, FunctionKind.SAMPLE, 10 * S)
        bench.until_idle(1)
        bench.run(bench.now + S)
        # The other one has the WPG for half a minute.
        bench.call(2, FunctionKind.FORWARD_BACKWARD, 30 * S)
        for _ in range(2):
            bench.call(1, FunctionKind.FORWARD_BACKWARD, 2 * S)
            bench.until_idle(1)
        bench.call(1, FunctionKind.OPTIM_STEP, S)
        bench.until_idle(1)
    found = bench.learned()
    assert found.step_us == pytest.approx(16 * S, rel=0.02)
    assert found.phase_us == 5 * S
    assert found.train_switch_us == bench.switch_us
    # What it has lost is known, too.
    assert found.alone_us == pytest.approx(4 * 16 * S, rel=0.02)
    assert 4 * 30 * S < found.taken_us - found.alone_us < 4 * 32 * S


def test_a_job_that_samples_while_it_trains_overlaps(bench: Bench) -> None:
    for _ in range(6):
        bench.call(1, FunctionKind.SAMPLE, 10 * S)
        bench.call(1, FunctionKind.FORWARD_BACKWARD, 3 * S)
        bench.call(1, FunctionKind.OPTIM_STEP, S)
        bench.until_idle(1)
    found = bench.learned()
    assert found.overlap_percent == 100
    assert found.phase_us == 4 * S
    assert found.step_us == found.sample_us == pytest.approx(10 * S, rel=0.02)
    habits = found.habits(0)
    assert habits.train.overlaps
    assert habits.train.slack_us == found.sample_us - 4 * S
    assert habits.rollout.slack_us == 0


def test_a_step_in_which_a_wpg_was_lost_is_not_measured(bench: Bench) -> None:
    for _ in range(3):
        bench.step(1, sample=10, train=4)
    bench.call(1, FunctionKind.FORWARD_BACKWARD, 50 * S)
    bench.timers.clear()
    down = WpgDown(at_us=bench.now, cause=C, wpg=WPGS[Pool.TRAIN], reason="gone", blame=False)
    bench.feed(down)
    bench.run(bench.now + 100 * S)
    bench.feed(WpgUp(at_us=bench.now, cause=C, wpg=WPGS[Pool.TRAIN]))
    bench.until_idle(1)
    bench.call(1, FunctionKind.OPTIM_STEP, S)
    bench.until_idle(1)
    assert bench.learned().steps == 2
    bench.step(1, sample=10, train=4)
    assert bench.learned().steps == 3
    assert bench.learned().function_us == 2 * S


def test_what_varies_is_told(bench: Bench) -> None:
    for number in range(30):
        bench.step(1, sample=8 if number % 2 else 12, train=4)
    found = bench.learned()
    assert 1.2 * S < found.spread_us < 2.8 * S
    sampled = found.quantiles["sample"]
    assert sampled == Quantiles(p50_us=8 * S, p90_us=12 * S)


def test_quantiles_of_one_value_and_of_ten() -> None:
    assert Quantiles.of([5]) == Quantiles(p50_us=5, p90_us=5)
    assert Quantiles.of(range(1, 11)) == Quantiles(p50_us=5, p90_us=9)


def test_a_job_that_has_gone_is_forgotten(bench: Bench) -> None:
    for _ in range(3):
        bench.step(1, sample=10, train=4)
    for pool in Pool:
        name = DeploymentId(f"{pool}-1")
        bench.feed(DeploymentDropped(at_us=bench.now, cause=C, deployment=name))
    assert bench.learner.learned(JobId(1)) is None
    assert bench.learner._calls == {}


def test_what_was_learned_is_what_the_scheduler_expects_of_the_next_one(bench: Bench) -> None:
    for _ in range(4):
        bench.step(1, sample=10, train=4)
    expected = bench.learned().expected()
    assert (expected.step_us, expected.train_us) == (16 * S, 5 * S)
    assert expected.functions[FunctionKind.FORWARD_BACKWARD] == 2 * S
    estimates, job = Estimates(), JobId(9)
    estimates.expect(job, expected)
    assert estimates.step_us(job) == 16 * S
    assert estimates.phase_us(job, Pool.TRAIN) == 5 * S
    assert estimates.phase_us(job, Pool.ROLLOUT) == 10 * S
    assert estimates.function_us(job, FunctionKind.OPTIM_STEP) == S
    # What it does itself counts, and is not forgotten when the next of its deployments comes.
    estimates.saw_phase(job, Pool.TRAIN, 15 * S)
    assert estimates.phase_us(job, Pool.TRAIN) == 8 * S
    estimates.expect(job, expected)
    assert estimates.phase_us(job, Pool.TRAIN) == 8 * S

"""A partition that is held as it is: jobs share the WPGs of both pools."""

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.run import Ran, simulate_held
from plexrl_slurm.sim.trace import TraceJob
from tests.sim.traces import alike, job

CLUSTER = Cluster(train_gpus=8, rollout_gpus=8)


def wpgs(trace: list[TraceJob], train: int = 1, rollout: int = 1) -> list[Wpg]:
    gpus = {Pool.TRAIN: trace[0].train.gpus, Pool.ROLLOUT: trace[0].rollout.gpus}
    return [
        Wpg(id=WpgId(f"{pool}-{number}"), pool=pool, gpus=gpus[pool])
        for pool, count in ((Pool.TRAIN, train), (Pool.ROLLOUT, rollout))
        for number in range(count)
    ]


def run(trace: list[TraceJob], train: int = 1, rollout: int = 1) -> Ran:
    return simulate_held(trace, wpgs(trace, train, rollout), CLUSTER, plan=Plan())


def test_one_job_takes_what_it_takes_alone_and_the_pull_of_its_first_weights() -> None:
    ran = run([job(steps=12)])
    record = next(iter(ran.world.records.values()))
    model = record.job.trace.model
    pull_us = CLUSTER.move_us(
        int(model.params * model.rollout_bytes_per_param), record.job.trace.rollout.gpus
    )
    assert record.end_us - record.start_us == record.job.alone_us() + pull_us


def test_wpgs_are_held_from_the_first_submission_to_the_last_end() -> None:
    trace = alike(3, steps=8)
    ran = run(trace)
    found = ran.figures
    gpus = trace[0].train.gpus + trace[0].rollout.gpus
    assert sum(ran.world.gpu_us.values()) == found.makespan_us * gpus
    assert found.held_percent == 100
    parts = found.busy_percent + found.switch_percent + found.kept_percent + found.idle_percent
    assert parts == pytest.approx(100, abs=0.01)
    assert found.placement == "held"


def test_what_each_job_saves_sums_to_what_all_save() -> None:
    ran = run(alike(3, steps=8))
    saved = ran.world.saved_percent()
    alone = {number: record.job.alone_us() for number, record in ran.world.records.items()}
    mean = sum(saved[number] * alone[number] for number in saved) / sum(alone.values())
    assert mean == pytest.approx(ran.figures.gpu_hours_per_step_saving_percent, abs=0.01)


def test_jobs_that_sample_on_one_wpg_wait_for_one_another() -> None:
    trace = alike(3, steps=8)
    shared, apart = run(trace), run(trace, train=3, rollout=3)
    assert apart.figures.slowdown.max < 1.01
    assert shared.figures.slowdown.mean > 1.5  # three rollouts are longer than one step
    assert {record.group for record in apart.world.records.values()} == {0, 1, 2}


def test_a_job_samples_while_another_one_waits_for_its_tools() -> None:
    def trace(stalls: int) -> list[TraceJob]:
        tool = {"stalls": stalls, "stall_s": 60}
        return alike(2, steps=6, phases__rollout_s__median=40, phases__tool=tool)

    shared, alone = run(trace(3)), run(trace(3)[:1])
    # 40 s of sampling and 180 s of tools: the other one's 40 s find room among those.
    assert shared.figures.slowdown.max < 1.1
    assert shared.figures.makespan_us < 1.2 * alone.figures.makespan_us
    assert run(trace(0)).figures.slowdown.mean > 1.15


def test_a_job_of_another_shape_is_refused_with_what_is_held() -> None:
    trace = [job()]
    has = [Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=3), *wpgs(trace)[1:]]
    with pytest.raises(BadInput, match=r"needs a train WPG of \d+ GPUs, and held are train-0 w"):
        simulate_held(trace, has, CLUSTER, plan=Plan())

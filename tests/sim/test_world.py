"""Runs: what the simulator promises about time, books and repetition."""

import random
from dataclasses import replace

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.messages import Activity, Pool
from plexrl_slurm.sim.cluster import Cluster, Plan, split
from plexrl_slurm.sim.report import per_job
from plexrl_slurm.sim.run import Ran, simulate
from plexrl_slurm.sim.trace import TraceJob
from tests.sim.traces import alike, job

CLUSTER = Cluster(train_gpus=16, rollout_gpus=48)


def run(
    trace: list[TraceJob], placement: str = "pack", cluster: Cluster = CLUSTER, **plan: object
) -> Ran:
    return simulate(trace, cluster, placement=placement, plan=replace(Plan(), **plan))  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["sync", "async1"])
@pytest.mark.parametrize("placement", ["isolated", "fit"])
def test_one_job_alone_takes_exactly_what_it_takes_alone(mode: str, placement: str) -> None:
    ran = run([job(mode=mode, steps=12)], placement)
    record = next(iter(ran.world.records.values()))
    assert record.end_us - record.start_us == record.job.alone_us()
    assert ran.figures.slowdown.max == ran.figures.efficiency == 1.0


def test_alone_a_synchronous_step_is_the_sum_of_its_parts() -> None:
    ran = run([job(steps=1)])
    record = next(iter(ran.world.records.values()))
    step = record.job.step(0)
    gaps_us = 6 * 50_000  # logprobs, four micro-steps, optimizer, publish
    parts_us = step.sample_us + step.reward_us + sum(us for _, us in step.train) + gaps_us
    assert record.end_us - record.start_us == record.job.create_us + parts_us


def test_held_is_the_sum_of_what_it_was_spent_on() -> None:
    ran = run(alike(4))
    held_us = sum(ran.world.gpu_us.values())
    group = sum(ran.world._group_us.values())
    own = sum(record.own_gpu_us for record in ran.world.records.values())
    assert held_us == group + own
    found = ran.figures
    parts = found.busy_percent + found.switch_percent + found.kept_percent + found.idle_percent
    assert parts + found.down_percent == pytest.approx(100, abs=0.01)


def test_sharing_saves_and_costs_a_little() -> None:
    found = run(alike(3, steps=30)).figures
    # 8 training GPUs for three instead of for each: 1 - (8/3 + 8)/16 = 33.3 %.
    assert 28 < found.gpu_hours_per_step_saving_percent < 33.4
    assert 1.0 < found.slowdown.mean < 1.1


def test_saved_of_each_job_sums_to_what_all_save() -> None:
    ran = run(alike(3, steps=10))
    saved = ran.world.saved_percent()
    alone = {n: r.job.alone_us() for n, r in ran.world.records.items()}
    mean = sum(saved[n] * alone[n] for n in saved) / sum(alone.values())
    assert mean == pytest.approx(ran.figures.gpu_hours_per_step_saving_percent, abs=0.01)


def test_the_same_seed_gives_the_same_run_whatever_the_order_of_the_lines() -> None:
    trace = alike(5)
    shuffled = trace[:]
    random.Random(1).shuffle(shuffled)
    shuffled.sort(key=lambda each: (each.submit_us, each.id))
    first, second = (run(each, "fit").figures.as_json() for each in (trace, shuffled))
    first["wall_seconds"] = second["wall_seconds"] = 0
    assert first == second


def test_another_seed_guesses_otherwise() -> None:
    def starts(seed: int) -> list[int]:
        ran = run(alike(6, user="u", steps=8), "fit", seed=seed, guess_sigma=2.0)
        return [record.group for record in ran.world.records.values()]

    assert len({tuple(starts(seed)) for seed in range(4)}) > 1


def test_jobs_wait_for_gpus_and_all_end() -> None:
    ran = run(alike(9), "isolated", cluster=Cluster(train_gpus=16, rollout_gpus=16))
    assert ran.figures.jobs == 9
    assert ran.figures.mean_queued_us > 0
    most = max(train for _, train, _ in ran.world.held)
    assert most == 16


def test_a_lost_node_costs_time_and_no_step() -> None:
    trace = alike(2, steps=40)
    calm, rough = run(trace), run(trace, node_loss_hours=0.2, restart_us=30_000_000)
    down = sum(us for (_, what), us in rough.world.gpu_us.items() if what is Activity.DOWN)
    assert down > 0
    assert rough.figures.jobs == 2
    assert rough.figures.makespan_us > calm.figures.makespan_us


def test_a_job_that_is_left_alone_moves_to_others_and_its_wpg_is_given_back() -> None:
    long = [job(f"long{n}", seed=n, steps=200, user=f"u{n}") for n in range(2)]
    # Two WPGs are filled while short jobs take the room; then one is enough.
    trace = [long[0], *alike(5, steps=6), long[1]]
    moved, stayed = (
        run(trace, "fit", regroup_us=wait_us, learn_steps=2, guess_sigma=0.0)
        for wait_us in (600_000_000, 0)
    )
    assert moved.world.mover.count > 0 == stayed.world.mover.count
    assert moved.figures.jobs == stayed.figures.jobs == len(trace)
    assert moved.figures.efficiency > stayed.figures.efficiency


def test_a_job_on_a_larger_shape_trains_faster_and_its_wpg_is_not_held() -> None:
    large = job("large", steps=60, seed=1, train__gpus=16, mode="async1")
    small = job("small", steps=60, seed=2, submit_us=1_000_000)
    both, apart = (
        run([large, small], "fit", cluster=Cluster(train_gpus=24, rollout_gpus=48),
            guess_sigma=0.0, widest=widest)
        for widest in (2.0, 1.0)
    )  # fmt: skip
    assert max(train for _, train, _ in both.world.held) == 16
    assert max(train for _, train, _ in apart.world.held) == 24
    # Its phase of 25 s takes 15 s there; the step was 97 s.
    assert apart.figures.slowdown.max == 1.0
    assert both.world.records[JobId(2)].end_us < apart.world.records[JobId(2)].end_us


def test_a_job_that_no_partition_can_hold_is_refused_with_what_is_needed() -> None:
    with pytest.raises(BadInput, match="job a needs 64 training GPUs and the cluster has 16"):
        run([job(train__gpus=64)])
    with pytest.raises(BadInput, match=r"state of m takes 16,000 GB .* 8 training GPUs have 1,275"):
        run([job(model__params=10**12)])


def test_what_placement_has_room_for_is_what_is_not_refused() -> None:
    # 16 GB of state: a node of 20 GB keeps 17 for images, one of 18 GB 15.3; disks count too.
    large, small = (replace(CLUSTER, node_bytes=size * 10**9) for size in (20, 18))
    assert run([job(steps=1)], "fit", large).figures.jobs == 1
    with pytest.raises(BadInput, match="have 15 GB for images, 85% of their memory"):
        run([job(steps=1)], "fit", small)
    disks = replace(small, nvme_bytes=10**9)
    assert run([job(steps=1)], "fit", disks).figures.jobs == 1
    # Half of a node's GPUs have half of its memory.
    with pytest.raises(BadInput, match="nodes of 4 training GPUs have 8 GB"):
        run([job(steps=1, train__gpus=4, train__min_gpus=4)], "fit", large)


@pytest.mark.parametrize(
    ("gpus", "ratio", "sentence"),
    [
        (1024, "2-1", "--split 2-1: give two positive numbers"),
        (1024, "0:1", "--split 0:1: give two positive numbers"),
        (1024, "\u00b2:1", "give two positive numbers"),
        (1024, "1:" + "9" * 5000, "give two positive numbers"),
        (8 * 10**30, "2:1", "and at most 1000000"),
        (1001, "2:1", "--gpus 1001: give a multiple of 8"),
        (8, "2:1", "--gpus 8: give a multiple of 8, at least 16"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(gpus: int, ratio: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        split(gpus, ratio)


def test_a_cluster_is_split_in_whole_nodes() -> None:
    cluster = split(1024, "2:1")
    assert (cluster.train_gpus, cluster.rollout_gpus) == (680, 344)


def test_rollout_wpgs_are_private() -> None:
    ran = run(alike(3))
    assert ran.world.gpu_us[Pool.ROLLOUT, Activity.SWITCH] == 0


def test_a_trace_s_priority_is_its_jobs_weight_on_wpgs() -> None:
    def slowdowns(*priorities: float) -> list[float]:
        crowd = [job(f"j{n}", seed=n, steps=15, priority=each, phases__rollout_s__median=20)
                 for n, each in enumerate(priorities)]  # fmt: skip
        return [each.slowdown for each in per_job(run(crowd).world)]

    alike_ones, first = slowdowns(1.0, 1.0, 1.0, 1.0), slowdowns(1.0, 1.0, 1.0, 50.0)
    assert first[3] < 0.8 * alike_ones[3]
    assert first[3] < min(first[:3])
    assert slowdowns(0.5, 0.5, 0.5, 0.5) == alike_ones, "only proportions count"


def test_a_rollout_that_waits_for_its_tools_does_not_work_meanwhile() -> None:
    trace = job(mode="async1", steps=6, phases__tool={"stalls": 3, "stall_s": 7.5})
    ran = run([trace], "fit")
    (record,) = ran.world.records.values()
    assert record.end_us - record.start_us == record.job.alone_us()
    steps = [record.job.step(number) for number in range(6)]
    samples_us = sum(step.sample_us for step in steps) - 6 * 3 * 7_500_000
    assert sum(sum(step.sampling_us) for step in steps) == samples_us
    assert ran.world.gpu_us[Pool.ROLLOUT, Activity.BUSY] == 8 * samples_us
    without = job(mode="async1", steps=6)
    assert record.job.alone_us() > next(iter(run([without]).world.records.values())).job.alone_us()

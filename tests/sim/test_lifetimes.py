"""Holds that end at their time limit, and images on the disks of a node, in the simulator."""

from dataclasses import replace

import msgspec
import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Activity, Pool, Wpg
from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.run import Ran, simulate, simulate_held
from tests.sim.traces import alike, job

CLUSTER = Cluster(train_gpus=16, rollout_gpus=48)
MINUTE_US = 60_000_000


def run(jobs: int = 2, cluster: Cluster = CLUSTER, *, steps: int = 40, **plan: object) -> Ran:
    chosen = replace(Plan(), **plan)  # type: ignore[arg-type]
    return simulate(alike(jobs, steps=steps), cluster, placement="pack", plan=chosen)


def down_us(ran: Ran, pool: Pool) -> int:
    return sum(
        us for (of, what), us in ran.world.gpu_us.items() if of is pool and what is Activity.DOWN
    )


def test_a_hold_that_is_renewed_costs_its_start_and_the_copies_of_its_images() -> None:
    endless = run(1)
    limit_us = endless.figures.makespan_us * 2 // 3
    ran = run(1, hold_limit_us=limit_us, renew_us=3 * MINUTE_US)
    (record,) = ran.world.records.values()
    image_bytes = record.job.trace.model.image_bytes
    copied_us = image_bytes * 1_000_000 // CLUSTER.shared_bytes_per_s
    # One renewal of each of its two WPGs; images are copied while the old hold is still there.
    assert ran.figures.renewals == 2
    assert down_us(ran, Pool.TRAIN) == record.job.trace.train.gpus * (3 * MINUTE_US + copied_us)
    assert down_us(ran, Pool.ROLLOUT) == record.job.trace.rollout.gpus * 3 * MINUTE_US
    assert ran.figures.makespan_us > endless.figures.makespan_us + 2 * MINUTE_US
    assert ran.figures.steps == endless.figures.steps


def test_every_hold_is_renewed_again_and_again() -> None:
    endless = run(2)
    ran = run(2, hold_limit_us=endless.figures.makespan_us // 5, renew_us=MINUTE_US)
    assert ran.figures.renewals >= 3 * 4
    assert ran.figures.jobs == 2
    assert ran.figures.steps == endless.figures.steps


def test_no_limit_that_is_reached_changes_nothing() -> None:
    endless = run(2).figures
    ran = run(2, hold_limit_us=endless.makespan_us * 2).figures
    assert ran.renewals == 0
    # Its alarm rings when all is over.
    assert replace(ran, wall_seconds=0.0, decisions=0) == replace(
        endless, wall_seconds=0.0, decisions=0
    )


@pytest.mark.parametrize("seed", range(4))
def test_losses_and_renewals_together_end_no_run_and_lose_no_step(seed: int) -> None:
    trace = [
        msgspec.structs.replace(each, submit_us=number * 3 * MINUTE_US)
        for number, each in enumerate(alike(5, steps=20))
    ]
    plan = Plan(
        seed=seed,
        hold_limit_us=10 * MINUTE_US,
        renew_us=MINUTE_US,
        node_loss_hours=0.3,
        restart_us=MINUTE_US,
        regroup_us=5 * MINUTE_US,
    )
    ran = simulate(trace, CLUSTER, placement="fit", plan=plan)
    assert ran.figures.jobs == 5
    assert ran.figures.steps == 100
    assert ran.figures.renewals > 5
    assert ran.world.pools.train_free == CLUSTER.train_gpus
    assert ran.world.pools.rollout_free == CLUSTER.rollout_gpus


def test_images_beyond_host_memory_come_from_the_disk_and_are_waited_for() -> None:
    image_bytes = job().model.image_bytes
    memory = int(image_bytes * 1.5 / 0.85)  # for one image
    small = replace(CLUSTER, node_bytes=memory)
    assert run(2, small).figures.idle_percent > 0
    # Without a disk nobody shares: memory holds one image.
    assert {r.group for r in run(2, small).world.records.values()} == {1, 2}
    disk = replace(small, nvme_bytes=10 * image_bytes, nvme_bytes_per_s=6 * 10**9)
    slow = replace(disk, nvme_bytes_per_s=3 * 10**9)
    runs = [run(2, each) for each in (CLUSTER, disk, slow)]
    assert all({r.group for r in ran.world.records.values()} == {1} for ran in runs)
    switching = [ran.figures.switch_percent for ran in runs]
    assert switching[0] < switching[1] < switching[2]


def test_disks_that_are_not_needed_cost_nothing() -> None:
    plain = run(3).figures
    roomy = run(3, replace(CLUSTER, nvme_bytes=10**13)).figures
    assert replace(roomy, wall_seconds=0.0) == replace(plain, wall_seconds=0.0)


def test_wpgs_of_a_configuration_are_renewed_too_and_stay_held() -> None:
    wpgs = [
        Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=8),
        Wpg(id=WpgId("rollout-0"), pool=Pool.ROLLOUT, gpus=8),
    ]
    first, last = alike(2, steps=20)
    # Nobody is there when the first renewal comes.
    trace = [first, msgspec.structs.replace(last, submit_us=10 * 60 * MINUTE_US)]
    plan = Plan(hold_limit_us=60 * MINUTE_US, renew_us=MINUTE_US)
    found = simulate_held(trace, wpgs, CLUSTER, plan=plan)
    assert found.figures.steps == 40
    assert found.figures.renewals >= 2 * 9
    held_us = 16 * found.figures.makespan_us
    assert sum(found.world.gpu_us.values()) == pytest.approx(held_us, rel=0.01)


def test_nodes_that_are_lost_faster_than_a_step_end_the_run_with_a_sentence() -> None:
    with pytest.raises(BadInput, match=r"^train-.: a node was lost, and no job took a step between "
                       r"10,000 such ends: give more --node-loss-hours"):  # fmt: skip
        run(1, node_loss_hours=0.0001)

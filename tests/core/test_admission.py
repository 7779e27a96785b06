"""Placing a job's deployments, and the steps of a job."""

from dataclasses import replace

import pytest

from plexrl_slurm.core.admission import (
    ObstacleKind,
    Placement,
    Site,
    Tenancy,
    Wanted,
    place,
)
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import InvalidTransition, ModelTooLarge
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.states import ENDED, STEPS, JobState, check_step

GIB = 2**30
MODEL = ModelSpec(
    name="tiny", path="/models/tiny", dtype="float32", max_context_length=64, vocab_size=8,
    parameters=GIB // 20, architecture="x",
)  # fmt: skip


def site(name: str, pool: Pool = Pool.TRAIN, *, device: int = 4 * GIB, host: int = 4 * GIB) -> Site:
    return Site(wpg=Wpg(id=WpgId(name), pool=pool, gpus=1), device_bytes=device, host_bytes=host)


TRAIN, SAMPLED = Wanted(model=MODEL, pool=Pool.TRAIN), Wanted(model=MODEL, pool=Pool.ROLLOUT)
SITES = [site("train-0"), site("train-1"), site("rollout-0", Pool.ROLLOUT)]


def tenant(wpg: str) -> Tenancy:
    return Tenancy(wpg=WpgId(wpg), image_bytes=MODEL.train_bytes)


@pytest.mark.parametrize(
    ("tenancies", "homes"),
    [
        pytest.param([], ("train-0", "rollout-0"), id="the lowest id of empty ones"),
        pytest.param([tenant("train-0")], ("train-1", "rollout-0"), id="the emptiest"),
        pytest.param(
            [tenant("train-0"), *3 * [tenant("train-1")]],
            ("train-0", "rollout-0"),
            id="counted by deployments",
        ),
    ],
)
def test_home(tenancies: list[Tenancy], homes: tuple[WpgId, ...]) -> None:
    assert place([TRAIN, SAMPLED], sites=SITES, tenancies=tenancies) == Placement(homes=homes)


def test_a_job_with_two_models_sees_its_own_first() -> None:
    found = place([TRAIN, TRAIN], sites=SITES, tenancies=[])
    assert found == Placement(homes=(WpgId("train-0"), WpgId("train-1")))


def test_a_tier_below_takes_whole_images_and_memory_still_needs_room_for_two() -> None:
    small = replace(site("train-0", host=3 * GIB), nvme_bytes=5 * GIB + GIB // 2)
    six = 6 * [tenant("train-0")]
    found = place([TRAIN], sites=[small], tenancies=six)
    assert found == Placement(homes=(WpgId("train-0"),))
    assert not isinstance(
        place([TRAIN], sites=[small], tenancies=[*six, tenant("train-0")]), Placement
    )
    with pytest.raises(ModelTooLarge):
        place([TRAIN], sites=[replace(small, host_bytes=2 * GIB - 100)], tenancies=[])


def test_every_obstacle_is_named_and_nothing_is_placed() -> None:
    sites = [site("train-0", device=GIB // 2), site("train-1")]
    found = place([TRAIN], sites=sites, tenancies=3 * [tenant("train-1")])
    assert isinstance(found, tuple)
    assert [(o.kind, o.wpg) for o in found] == [
        (ObstacleKind.DEVICE_MEMORY, "train-0"),
        (ObstacleKind.HOST_MEMORY, "train-1"),
    ]
    assert found[0].sentence == (
        "model tiny needs 1.00 GiB of device memory on train-0, which has 0.50 GiB"
    )
    assert "beside 3 others" in found[1].sentence


def test_a_pool_without_a_wpg_is_an_obstacle() -> None:
    found = place([SAMPLED], sites=SITES[:2], tenancies=[])
    assert isinstance(found, tuple)
    assert found[0].kind is ObstacleKind.NO_WPG


def test_a_model_that_no_wpg_can_ever_hold_is_refused() -> None:
    small = [site("train-0", device=GIB // 2), site("train-1", host=GIB)]
    with pytest.raises(ModelTooLarge, match=r"needs 1\.00 GiB on a train WPG; the largest holds"):
        place([TRAIN], sites=small, tenancies=[])


def test_a_job_may_take_the_steps_of_the_table_and_no_others() -> None:
    for start in JobState:
        for finish in JobState:
            if (start, finish) in STEPS:
                assert check_step(JobId(1), start, finish) == STEPS[start, finish]
            else:
                with pytest.raises(InvalidTransition, match="job 1"):
                    check_step(JobId(1), start, finish)
    assert not [start for start, _ in STEPS if start in ENDED]

"""Sizes of images by layout, and how many deployments fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.sites import Site, host_need, images_room
from plexrl_slurm.core.sizes import deployments_that_fit, image_size, switch_seconds
from plexrl_slurm.core.zero import ZeroLayout

GB = 10**9


@pytest.mark.parametrize(
    ("stage", "ranks", "dtype", "per_parameter"),
    [
        (1, 1, "bfloat16", 16),
        (1, 8, "bfloat16", 44),
        (2, 8, "bfloat16", 30),
        (3, 8, "bfloat16", 16),
        (2, 1, "float32", 20),
        (3, 64, "float32", 20),
    ],
)
def test_what_every_rank_has_counts_as_often_as_there_are_ranks(
    stage: int, ranks: int, dtype: str, per_parameter: int
) -> None:
    size = image_size(1000, dtype=dtype, layout=ZeroLayout(stage=stage), ranks=ranks)
    assert size.total == 1000 * per_parameter
    assert size.masters == 4000 and size.moments == 8000
    assert size.share(ranks) == size.total
    assert size.share(1) * ranks >= size.total


def test_offload_moves_state_off_the_device_and_changes_no_image() -> None:
    layouts = [
        ZeroLayout(stage=3, offload_optimizer=moved, offload_param=moved) for moved in (True, False)
    ]
    first, second = (image_size(7, dtype="bfloat16", layout=each, ranks=2) for each in layouts)
    assert first == second


@pytest.mark.parametrize(
    ("host", "nvme", "snapshot", "count"),
    [
        pytest.param(199, 0, 0, 0, id="no room for one and its spare slot"),
        pytest.param(200, 0, 0, 1, id="one"),
        pytest.param(200, 300, 0, 4, id="three more on the disk"),
        pytest.param(199, 9_000, 0, 0, id="a disk is no place for what a switch moves"),
        pytest.param(200, 9_000, 1, 0, id="a snapshot takes the second slot"),
        pytest.param(250, 9_000, 10, 5, id="snapshots take memory until two images fill it"),
    ],
)
def test_deployments_are_limited_by_memory_and_disk(
    host: int, nvme: int, snapshot: int, count: int
) -> None:
    found = deployments_that_fit(image=100, snapshot=snapshot, host_bytes=host, nvme_bytes=nvme)
    assert found == count


@given(image=st.integers(1, 50), host=st.integers(1, 1000), nvme=st.integers(0, 1000))
def test_admission_takes_as_many_as_fit_and_not_one_more(image: int, host: int, nvme: int) -> None:
    wpg = Wpg(id=WpgId("train-0"), pool=Pool.TRAIN, gpus=1)
    site = Site(wpg=wpg, device_bytes=1 << 40, host_bytes=host, nvme_bytes=nvme)
    room = images_room(site, image)
    count = deployments_that_fit(image=image, snapshot=0, host_bytes=host, nvme_bytes=nvme)
    if count:
        assert host_need([image] * count) <= room < host_need([image] * (count + 1))
    else:
        assert host < 2 * image


def test_a_switch_takes_half_as_long_if_both_directions_go_at_once() -> None:
    both = switch_seconds(100 * GB, bytes_per_second=50 * GB, both_ways=True)
    assert both == 2.0
    assert switch_seconds(100 * GB, bytes_per_second=50 * GB, both_ways=False) == 2 * both

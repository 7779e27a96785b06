"""What `plexrl partition check` says of tiers: budgets too small, folders of a wrong kind."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm import budgets
from plexrl_slurm.settings import check
from plexrl_slurm.tomlcheck import Report
from tests.model_folders import make_hollow_folder

MIB = 1 << 20
#: 20 MiB of an image and 4 MiB of a snapshot.
PARAMETERS = MIB
FILE = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "{host_dir}"
host_bytes = "{host_bytes}"
{nvme}
[[wpg]]
pool = "train"
engine = "deepspeed"
{train}
[[wpg]]
pool = "rollout"
engine = "vllm"

[[model]]
name = "tiny"
path = "tiny"
"""
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Settings without a mistake, but for what is given."""
    make_hollow_folder(tmp_path / "tiny", parameters=PARAMETERS)
    (tmp_path / "disk").mkdir()

    def written(**changes: str) -> Path:
        values = {"host_dir": "/dev/shm/plexrl-budgets", "host_bytes": "44MiB", "nvme": ""}
        path = tmp_path / "plexrl.toml"
        path.write_text(FILE.format(**{**values, "train": "", **changes}))
        return path

    return written


def nvme(folder: object, size: str = "20MiB") -> str:
    return f'nvme_dir = "{folder}"\nnvme_bytes = "{size}"\n'


def test_two_images_and_a_snapshot_are_enough(write: Write) -> None:
    found = check(write(nvme=nvme("disk/plexrl")))
    assert (found.problems, found.warnings) == ((), ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param(
            {"host_bytes": "43MiB"},
            ["model[0]", "two training images of 20.00 MiB", "43.00 MiB: raise host_bytes"],
            id="host memory for one image and a half",
        ),
        pytest.param(
            # Both ranks have all weights: 12 + 2 x 4 + 4 = 24 bytes a parameter.
            {"host_bytes": "51MiB", "train": "gpus = 2"},
            ["two training images of 24.00 MiB, 24 bytes a parameter"],
            id="host memory for images of one GPU",
        ),
        pytest.param(
            {"nvme": nvme("disk", "19MiB")},
            [
                "partition.nvme_bytes",
                "image of model tiny has 20.00 MiB (20 bytes a parameter)",
                "raise nvme_bytes",
            ],
            id="a disk for less than one image",
        ),
        pytest.param(
            {"nvme": nvme("nowhere/plexrl")},
            ["partition.nvme_dir", "there is no folder", "nowhere: mount the disk there"],
            id="no disk",
        ),
        pytest.param(
            {"nvme": nvme("disk", "9000TB")},
            ["partition.nvme_bytes", "more than the whole file system", "lower nvme_bytes"],
            id="a smaller disk",
        ),
        pytest.param(
            {"host_bytes": "9000TB"},
            ["partition.host_bytes", "the whole file system at /dev/shm", "lower host_bytes"],
            id="a smaller /dev/shm",
        ),
    ],
)
def test_a_tier_that_cannot_work_is_refused_with_its_numbers(
    write: Write, changes: dict[str, str], words: list[str]
) -> None:
    (problem,) = check(write(**changes)).problems
    for each in words:
        assert each in problem, problem


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"host_dir": "disk/host", "nvme": nvme("disk/host")}, "host_dir"),
        ({"host_dir": "disk/host", "nvme": nvme("disk/host/nvme")}, "host_dir"),
        ({"nvme": nvme("state")}, "state_dir"),
        ({"nvme": nvme("state/nvme")}, "state_dir"),
        ({"host_dir": "disk/rlvr/host", "nvme": nvme("disk")}, "host_dir"),
        ({"nvme": nvme("plexrl.toml")}, "is a file"),
    ],
)
def test_a_tier_needs_a_folder_of_its_own(write: Write, changes: dict[str, str], word: str) -> None:
    (problem,) = check(write(**changes)).problems
    assert "partition.nvme_dir" in problem and word in problem


def test_with_stage_3_several_gpus_need_no_more_than_one(write: Write) -> None:
    options = "gpus = 2\n[wpg.options]\nzero_stage = 3\n"
    assert check(write(train=options)).problems == ()


def test_a_disk_of_another_machine_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "network_kind", lambda folder: "Lustre")
    (problem,) = check(write(nvme=nvme("disk"))).problems
    assert "partition.nvme_dir" in problem and "is on Lustre, which is not a disk" in problem


def test_a_disk_that_is_mounted_read_only_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.statvfs

    def statvfs(path: Path) -> Any:
        found = list(real(path))
        if Path(path).name == "disk":
            found[8] |= os.ST_RDONLY
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "statvfs", statvfs)
    (problem,) = check(write(nvme=nvme("disk/plexrl"))).problems
    assert "disk is on a file system that is mounted read-only" in problem


def test_a_disk_in_memory_is_a_warning(write: Write) -> None:
    found = check(write(nvme=nvme("/dev/shm/plexrl-budgets-nvme")))
    assert found.problems == ()
    assert any("is in memory itself (tmpfs)" in each for each in found.warnings)


def test_what_this_host_lacks_held_nodes_may_have(tmp_path: Path) -> None:
    values = {"nvme_dir": tmp_path / "no" / "disk", "nvme_bytes": 1, "host_bytes": 9 << 60}
    report = Report("[partition]\nnvme_dir = 1\nnvme_bytes = 1\n")
    budgets.check_nvme(report, values, here=False)
    budgets.check_host(report, {**values, "host_dir": Path("/dev/shm/x")}, here=False)
    assert report.sentences() == ()
    disk, memory = report.warnings
    assert disk.startswith("partition.nvme_dir: on this host, there is no folder")
    assert memory.startswith("partition.host_bytes: on this host, ")


def test_the_largest_image_on_the_wpgs_there_are_is_what_counts_everywhere(write: Write) -> None:
    options = "gpus = 2\ncount = 3\n"
    settings = check(write(train=options, host_bytes="52MiB")).settings
    assert settings is not None
    # Both ranks have all weights.
    assert settings.models["tiny"].train_bytes == 24 * PARAMETERS
    model = settings.models["tiny"]
    two: budgets.Gang = (2, {})
    eight: budgets.Gang = (8, {"zero_stage": 3})
    impossible: budgets.Gang = (8, {"zero_stage": 9})
    for gangs, size in (([], 20), ([eight], 20), ([eight, two], 24), ([impossible, two], 24)):
        assert budgets.on_gangs(model, gangs).train_bytes == size * PARAMETERS


def test_on_several_nodes_each_has_its_share_of_an_image(write: Write) -> None:
    one, two = "gpus = 4\n", "gpus = 4\nnodes = 2\n"
    # 12 + 4 x 4 + 4 = 32 bytes a parameter on all ranks.
    (problem,) = check(write(train=one, host_bytes="40MiB")).problems
    assert "two training images of 32.00 MiB, 32 bytes a parameter," in problem
    assert check(write(train=two, host_bytes="40MiB")).problems == ()
    (problem,) = check(write(train=two, host_bytes="35MiB")).problems
    assert "two training images of 16.00 MiB, 16 bytes a parameter on each of its nodes" in problem
    disk = nvme("disk/plexrl", "17MiB")
    assert check(write(train=two, host_bytes="40MiB", nvme=disk)).problems == ()
    (problem,) = check(write(train=two, host_bytes="40MiB", nvme=disk.replace("17", "15"))).problems
    assert "a training image of model tiny has 16.00 MiB" in problem

"""Two [[wpg]] tables that share GPUs: what is read, and what is refused."""

from pathlib import Path

import pytest

from plexrl_slurm.settings import check, read
from tests.model_folders import make_model_folder

GOOD = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "host"
host_bytes = "1GiB"

[[wpg]]
pool = "train"
engine = "deepspeed"
gpus = 2
shared = "both"
residual_bytes = "2GiB"
gpu_bytes = "80GiB"
options = { device_bytes = "150GiB" }

[[wpg]]
pool = "rollout"
engine = "vllm"
gpus = 2
shared = "both"
residual_bytes = "3GiB"
options = { device_bytes = "120GiB" }

[[model]]
name = "tiny"
path = "models/tiny"
"""
SLURM = """
[hold]
backend = "slurm"

[[hold.component]]
pool = "shared"
partition = "gpu"
gpus_per_node = 2

[slurm]
controller_partition = "cpu"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "models" / "tiny", intermediate_size=32)
    path = tmp_path / "plexrl.toml"
    path.write_text(GOOD)
    return path


def problems(config: Path, text: str) -> list[str]:
    config.write_text(text)
    return list(check(config).problems)


def test_a_pair_of_tables_is_read(config: Path) -> None:
    train, rollout = read(config).wpgs
    assert (train.shared, rollout.shared, train.place) == ("both", "both", "shared")
    assert (train.residual_bytes, rollout.residual_bytes) == (2 << 30, 3 << 30)


@pytest.mark.parametrize(
    ("old", "new", "key", "words"),
    [
        pytest.param(
            'shared = "both"\nresidual_bytes = "3GiB"\n', "",
            "wpg[0].shared", "1 in pool train, and a group is one table in pool train and one",
            id="one alone",
        ),
        pytest.param(
            'engine = "vllm"\ngpus = 2', 'engine = "vllm"',
            "wpg[1].gpus", "gpus must be equal, and it is 2 (train) and 1 (rollout)", id="gpus",
        ),
        pytest.param(
            'engine = "vllm"', 'engine = "vllm"\ncount = 2',
            "wpg[1].count", "count must be equal", id="count",
        ),
        pytest.param(
            'engine = "deepspeed"', 'engine = "deepspeed"\nnodes = 2',
            "wpg[1].nodes", "nodes must be equal", id="nodes",
        ),
        pytest.param(
            "120GiB", "156GiB", "wpg[1].options.device_bytes",
            "awake the rollout WPG of both takes 156.0 GiB, beside 5.0 GiB that neither gives back",
            id="rollout does not fit",
        ),
        pytest.param(
            "150GiB", "156GiB", "wpg[0].options.device_bytes",
            "and its GPUs have 160.0 GiB", id="training does not fit",
        ),
        pytest.param(
            'options = { device_bytes = "120GiB" }', "", "wpg[1].options.device_bytes",
            "it is missing: with gpu_bytes", id="an unknown share",
        ),
        pytest.param(
            'residual_bytes = "3GiB"', 'gpu_bytes = "40GiB"', "wpg[1].gpu_bytes",
            "have one size", id="two sizes",
        ),
        pytest.param(
            'residual_bytes = "3GiB"', "residual_bytes = -1", "wpg[1].residual_bytes",
            "is not a size", id="no size",
        ),
    ],
)  # fmt: skip
def test_a_mistake_is_named_with_its_key(
    config: Path, old: str, new: str, key: str, words: str
) -> None:
    assert old in GOOD
    (problem,) = problems(config, GOOD.replace(old, new, 1))
    assert key in problem and words in problem


def test_what_is_left_asleep_is_only_for_those_that_share(config: Path) -> None:
    alone = GOOD.replace('shared = "both"\n', "")
    found = problems(config, alone)
    assert [problem.split(", ", 1)[1].split(":")[0] for problem in found] == [
        "wpg[0].residual_bytes",
        "wpg[0].gpu_bytes",
        "wpg[1].residual_bytes",
    ]
    assert "add shared or second_slot_bytes, or leave it out" in found[0]


def test_a_component_has_their_gpus_once(config: Path) -> None:
    assert problems(config, GOOD + SLURM) == []
    (problem,) = problems(config, GOOD + SLURM.replace("gpus_per_node = 2", "gpus_per_node = 1"))
    assert "the shared WPGs (1 of 2 GPU(s)) do not fit" in problem
    (problem,) = problems(config, GOOD + SLURM.replace('pool = "shared"', 'pool = "train"'))
    assert "there are WPGs in pool shared and no component has it: add a [[hold.component]]" in (
        problem
    )


def test_without_the_size_of_a_gpu_slurm_sites_are_warned(config: Path) -> None:
    config.write_text(GOOD.replace('gpu_bytes = "80GiB"\n', "") + SLURM)
    (warning,) = [each for each in check(config).warnings if "gpu_bytes" in each]
    assert "whether the WPGs that share both fit" in warning


@pytest.mark.parametrize("value", ['"abc"', "[]", "-1"])
def test_an_unreadable_size_of_a_fake_is_told_once(config: Path, value: str) -> None:
    text = GOOD.replace('"vllm"', '"fake_sample"').replace('"120GiB"', value)
    (problem,) = problems(config, text)
    assert "wpg[1].options.device_bytes" in problem and "is not a size" in problem

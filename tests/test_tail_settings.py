"""``[tails]`` of the configuration."""

from pathlib import Path

import pytest

from plexrl_slurm.core.tails import TailRules
from plexrl_slurm.daemons.layout import Place, Room, lay_out, wpg_slots
from plexrl_slurm.settings import check, read
from plexrl_slurm.tail_settings import read_tails
from plexrl_slurm.tomlcheck import Report
from tests.model_folders import make_model_folder


def test_every_key_is_read() -> None:
    report = Report("")
    rules = read_tails(
        report,
        {"pause": False, "running": 2, "share_percent": 0, "least_seconds": 0.5, "pauses": 1},
    )
    assert report.sentences() == ()
    assert rules == TailRules(pause=False, running=2, share=0, least_us=500_000, pauses=1)


def test_without_the_table_tails_may_be_paused() -> None:
    assert read_tails(Report(""), {}) == TailRules()
    assert TailRules().pause


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("pause", "yes", "is not true or false"),
        ("running", 0, "whole number of 1 or more"),
        ("share_percent", 101, "more than 100 percent"),
        ("share_percent", -1, "whole number of 0 or more"),
        ("least_seconds", "long", "is not a number of seconds"),
        ("pauses", 0, "whole number of 1 or more"),
        ("coresident", True, "unknown key coresident"),
    ],
)
def test_mistakes_are_told(key: str, value: object, words: str) -> None:
    report = Report("")
    read_tails(report, {key: value})
    (sentence,) = report.sentences()
    assert f"tails.{key}" in sentence and words in sentence


def test_tails_run_beside_others_only_where_that_is_written() -> None:
    assert not TailRules().co_resident
    rules = read_tails(Report(""), {"co_resident": True, "slowdown_percent": 35})
    assert rules == TailRules(co_resident=True, slowdown=35)


# -- second engines -------------------------------------------------------------------------

GOOD = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "host"
host_bytes = "1GiB"

[tails]
co_resident = true

[[wpg]]
pool = "train"
engine = "fake_train"

[[wpg]]
pool = "rollout"
engine = "vllm"
gpus = 2
residual_bytes = "4GiB"
gpu_bytes = "80GiB"
second_slot_bytes = "70GiB"
options = { device_bytes = "80GiB", kv_cache_bytes = "30GiB" }

[[model]]
name = "tiny"
path = "models/tiny"
"""
SLURM = """
[hold]
backend = "slurm"

[[hold.component]]
pool = "train"
partition = "gpu"
gpus_per_node = 2

[[hold.component]]
pool = "rollout"
partition = "gpu"
gpus_per_node = 2

[slurm]
controller_partition = "cpu"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "models" / "tiny", intermediate_size=32)
    return tmp_path / "plexrl.toml"


def problems(config: Path, text: str) -> tuple[str, ...]:
    config.write_text(text)
    return check(config).problems


@pytest.mark.parametrize("more", ["", SLURM])
def test_a_second_engine_that_fits_is_read_and_its_wpg_has_two_slots(
    config: Path, more: str
) -> None:
    assert problems(config, GOOD + more) == ()
    found = read(config)
    assert found.tails.co_resident and found.wpgs[1].second_slot_bytes == 70 << 30
    train, rollout = lay_out(
        wpg_slots(found),
        [Room(place=Place(hold="h", component=0, node="n"), pool=None, gpus=9)],
        taken=(),
    )
    assert (train.wpg.second_slot, rollout.wpg.second_slot) == (False, True)
    assert rollout.config().options["second_slot"] and "second_slot" not in train.config().options


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            'second_slot_bytes = "70GiB"',
            'second_slot_bytes = "77GiB"',
            "wpg[1].second_slot_bytes: two engines at once take 161.00 GiB (options.device_bytes "
            "80.00 GiB, second_slot_bytes 77.00 GiB, residual_bytes 4.00 GiB), and the GPUs of the "
            "WPG have 160.00 GiB",
        ),
        (
            'second_slot_bytes = "70GiB"',
            'second_slot_bytes = "50GiB"',
            "keys and values of 60.00 GiB), and this is 50.00 GiB: raise it",
        ),
        ('device_bytes = "80GiB", ', "", "options.device_bytes: it is missing"),
        (
            'residual_bytes = "4GiB"\ngpu_bytes = "80GiB"\nsecond_slot_bytes = "70GiB"\n',
            "",
            "tails.co_resident: no WPG has memory for a second engine",
        ),
        ("co_resident = true", "", "it has no effect without co_resident = true in [tails]"),
        (
            'engine = "fake_train"',
            'engine = "fake_train"\nsecond_slot_bytes = "1GiB"',
            "wpg[0].second_slot_bytes: only rollouts have tails",
        ),
        (
            'engine = "fake_train"',
            'engine = "fake_train"\nresidual_bytes = "1GiB"',
            "is for WPGs that share their GPUs or have a second engine",
        ),
    ],
)
def test_a_second_engine_that_does_not_fit_is_refused(
    config: Path, old: str, new: str, words: str
) -> None:
    assert old in GOOD
    (sentence,) = problems(config, GOOD.replace(old, new))
    assert words in sentence


def test_with_slurm_the_memory_of_a_gpu_has_to_be_known(config: Path) -> None:
    text = GOOD.replace('gpu_bytes = "80GiB"\n', "")
    assert problems(config, text) == ()
    (sentence,) = problems(config, text + SLURM)
    assert "wpg[1].gpu_bytes: it is missing" in sentence


def test_wpgs_that_take_turns_have_no_second_engine(config: Path) -> None:
    text = GOOD.replace('engine = "fake_train"', 'engine = "fake_train"\ngpus = 2\nshared = "both"')
    text = text.replace(
        'second_slot_bytes = "70GiB"', 'second_slot_bytes = "1GiB"\nshared = "both"'
    )
    assert any(
        "takes turns on its GPUs gives all their memory back" in sentence
        for sentence in problems(config, text)
    )

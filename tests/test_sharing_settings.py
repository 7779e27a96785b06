"""``[sharing]``: what is read, and what is refused."""

from typing import Any

import pytest

from plexrl_slurm.core.grouping import Placement
from plexrl_slurm.sharing_settings import SharingSettings, read_sharing
from plexrl_slurm.tomlcheck import Report


def read(**table: Any) -> tuple[SharingSettings, tuple[str, ...]]:
    report = Report("[sharing]\n")
    return read_sharing(report, {"sharing": table}), report.sentences()


def test_without_a_table_jobs_share_by_fit_and_are_promised_a_tenth() -> None:
    report = Report("")
    found = read_sharing(report, {})
    assert (found.placement, found.max_slowdown, found.backfill) == ("fit", 1.10, True)
    assert found.rules.placement is Placement.FIT


@pytest.mark.parametrize(
    ("name", "way", "backfill"),
    [
        ("isolated", Placement.ISOLATED, False),
        ("isolated_backfill", Placement.ISOLATED, True),
        ("pack", Placement.PACK, False),
        ("spread", Placement.SPREAD, False),
        ("spread_backfill", Placement.SPREAD, True),
    ],
)
def test_placements_by_name(name: str, way: Placement, backfill: bool) -> None:
    found, problems = read(placement=name)
    assert problems == ()
    assert (found.rules.placement, found.backfill) == (way, backfill)


def test_every_key_decides_something() -> None:
    found, problems = read(
        max_slowdown=1.5, max_jobs=3, max_load=0.8, margin=0.5, regroup=False, regroup_seconds=60,
        guess={"step_seconds": 30, "train_share": 0.3, "sample_share": 0.2, "switch_seconds": 2},
    )  # fmt: skip
    assert problems == ()
    rules = found.rules
    assert (rules.most, rules.full, rules.margin) == (3, 0.8, 0.5)
    assert (found.max_slowdown, found.regroup, found.regroup_us) == (1.5, False, 60_000_000)
    habits = found.guess.habits()
    assert habits.train.phase_us == 9_000_000
    assert habits.rollout.phase_us == 6_000_000
    assert habits.train.switch_us == 2_000_000


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"placement": "packed"}, "unknown placement 'packed'; did you mean pack"),
        ({"max_slowdown": 0.9}, "sharing.max_slowdown: 0.9 is not a number from 1.0 to 1000"),
        ({"max_slowdown": float("nan")}, "nan is not a number from 1.0"),
        ({"max_jobs": 0}, "sharing.max_jobs: 0 is not a whole number of 1 or more"),
        ({"margin": 2}, "sharing.margin: 2 is not a number from 0.01 to 1"),
        ({"regroup": "yes"}, "'yes' is not true or false"),
        ({"max_slowdwn": 2}, "unknown key max_slowdwn; did you mean max_slowdown?"),
        ({"guess": {"train_share": 1.5}}, "sharing.guess.train_share: 1.5 is not"),
        ({"guess": 3}, "it must be a table"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(table: dict[str, Any], words: str) -> None:
    _, problems = read(**table)
    assert len(problems) == 1
    assert words in problems[0]

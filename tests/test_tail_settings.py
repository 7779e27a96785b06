"""``[tails]`` of the configuration."""

import pytest

from plexrl_slurm.core.tails import TailRules
from plexrl_slurm.tail_settings import read_tails
from plexrl_slurm.tomlcheck import Report


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

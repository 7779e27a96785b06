"""What squeue says of a tail, and of whoever runs beside it."""

from typing import Any

from plexrl_slurm.core.explain import Asker
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.daemons.tail_views import tail_views
from tests.core.hand import Hand
from tests.core.test_beside import tailing, together
from tests.core.test_tails import T, samples


def told(hand: Hand) -> dict[int, list[dict[str, Any]]]:
    found = tail_views(hand.core.views(), Asker(0, lambda job: str(100 + job)))
    return {int(job): each for job, each in found.items()}


def test_both_are_told_of_each_other_by_slurms_numbers() -> None:
    hand, *_ = together()
    assert told(hand) == {
        1: [
            {
                "wpg": "rollout-0", "word": "Tail", "slurm_ids": ["102"], "jobs": [2],
                "sentence": "its last samples run on rollout-0 beside job 102",
            }
        ],
        2: [
            {
                "wpg": "rollout-0", "word": "BesideTail", "slurm_ids": ["101"], "jobs": [1],
                "sentence": "it runs beside a tail of job 101 on rollout-0",
            }
        ],
    }  # fmt: skip


def test_while_the_other_is_switched_in_only_the_tail_runs() -> None:
    hand, _ = tailing()
    assert told(hand) == {}, "nobody has come, and it is all that runs"
    hand.later(1).arrive(*samples(T, 0))
    ((job, (only,)),) = told(hand).items()
    assert (job, only["word"], only["slurm_ids"]) == (1, "Tail", [])
    assert only["sentence"] == "its last samples run on rollout-0"


def test_when_the_tail_has_ended_nobody_is_told() -> None:
    hand, *tail, _ = together()
    for call in tail:
        hand.later(1).end(call)
    assert JobId(2) in hand.core.views()[0].jobs
    assert told(hand) == {}

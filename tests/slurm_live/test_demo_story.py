"""What `make demo-slurm` says at its end, and when it says that something is wrong. No Slurm."""

from typing import Any

from tests.slurm_live import demo_story
from tests.slurm_live.demo_story import Story

S = 1_000_000


def story() -> Story:
    return Story(
        holds=[
            ("h1", "1", "ended", "", 190 * S, "its batch script is gone"),
            ("h2", "9", "up", "h1", None, ""),
            ("h3", "10", "pending", "", None, "Resources"),
        ],
        stays=[
            ("h1", "rollout-0", "n3", 100 * S, 190 * S),
            ("h1", "train-0", "n1", 100 * S, 150 * S),
            ("h2", "train-1", "n4", 160 * S, None),
        ],
        faults=[("n1", 150 * S, "Slurm lost node n1")],
        moves=[("count-1", "3", 151 * S, "moved", "Slurm lost node n1: train-0 -> train-1")],
        said=[(140 * S, "node n1 is lost")],
    )


def test_the_story_is_told_in_order_of_time() -> None:
    assert story().lines() == [
        "    0.0 s  hold h1 (Slurm job 1) has rollout-0 on n3, train-0 on n1",
        "   40.0 s  node n1 is lost",
        "   50.0 s  fault of node n1: Slurm lost node n1",
        "   50.0 s  hold h1 gives up train-0 on n1",
        "   51.0 s  job 3 (count-1) moved: Slurm lost node n1: train-0 -> train-1",
        "   60.0 s  hold h2 (Slurm job 9, replaces hold h1) has train-1 on n4",
        "   90.0 s  hold h1 gives up rollout-0 on n3",
        "   90.0 s  hold h1 is ended: its batch script is gone",
    ]


def report(**changes: Any) -> dict[str, Any]:
    job = {"name": "count-1", "learning_identical": True}
    good = {
        "learning_identical": True,
        "rows": {"4 jobs, a node lost": {"jobs": [job, job | {"name": "count-2"}]}},
        "events": {
            "lost_node": "n1",
            "lost_batch": False,
            "renewed": "extended",
            "refused_agent": "h1.0.n1",
            "recovered_us": 27 * S,
        },
        "story": story().facts(),
        "reconcile": [
            {
                "hold_id": "h1",
                "slurm_id": "1",
                "incarnations": 2,
                "ledger_gpu_us": 90 * S,
                "sacct_gpu_us": 91 * S,
                "agrees": "yes",
            }
        ],
        "flaws": [],
    }
    return good | changes


def test_nothing_is_wrong_where_everything_happened_and_all_learned_the_same() -> None:
    assert demo_story.trouble(report()) == []


def test_each_thing_that_is_wrong_is_said() -> None:
    job = {"name": "count-2", "learning_identical": False}
    nothing = {"renewed": "", "refused_agent": ""}
    said = demo_story.trouble(
        report(
            rows={"4 jobs, a node lost": {"jobs": [job]}},
            events=report()["events"] | nothing,
            story={"moves": [], "node_faults": []},
            reconcile=[{"hold_id": "h1", "agrees": "no"}, {"hold_id": "h2", "agrees": "unknown"}],
            flaws=["hole of 3 us"],
        )
    )
    assert said == [
        "4 jobs, a node lost: count-2 learned something else than alone",
        "the hold was not renewed",
        "the lost agent was not refused",
        "the database knows nothing of the lost node",
        "the books have 1 flaws: hole of 3 us",
        "ledger and sacct do not agree on hold h1, h2",
    ]


def test_accounts_that_nobody_kept_are_missed() -> None:
    assert demo_story.trouble(report(reconcile=[])) == [
        "ledger and sacct do not agree on hold (no record)"
    ]


def test_the_last_words_say_what_was_lost_and_whether_it_mattered() -> None:
    events = report()["events"]
    *_, what, identical = demo_story.closing(report(), [])
    assert what == (
        "the hold was extended, and lost a node (n1); all jobs had WPGs again after 27 s"
    )
    assert identical == "learning identical: yes"
    *_, what, identical = demo_story.closing(
        report(events=events | {"lost_batch": True, "renewed": ""}, learning_identical=False), []
    )
    assert what.startswith("the hold was NOT renewed, and lost the node of its batch script (n1)")
    assert identical == "learning identical: NO"


def test_the_books_stand_beside_sacct() -> None:
    unknown = {
        "hold_id": "h2",
        "slurm_id": "9",
        "incarnations": None,
        "ledger_gpu_us": 5 * S,
        "sacct_gpu_us": None,
        "agrees": "unknown",
    }
    assert demo_story.reconciled([*report()["reconcile"], unknown]).splitlines() == [
        "HOLD SLURM JOB INCARNATIONS LEDGER GPU-S SACCT GPU-S AGREES",
        "h1   1         2            90.0         91.0        yes",
        "h2   9         0            5.0          -           unknown",
    ]


def test_rows_of_the_ledger_are_stretches_for_the_figures() -> None:
    (found,) = demo_story.stretches([("h1", "train-0", "busy", 3, "c", 1, 5, 4)])
    assert found["wpg"] == "train-0" and found["stop_us"] - found["start_us"] == found["gpu_us"]

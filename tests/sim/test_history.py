"""Traces from what a partition did."""

from typing import Any

import pytest

from plexrl_slurm.sim.cluster import Cluster, Plan
from plexrl_slurm.sim.history import PastJob, from_ledger
from plexrl_slurm.sim.run import simulate

S = 1_000_000


def past(name: str = "7", **changes: Any) -> PastJob:
    facts: dict[str, Any] = {
        "id": name, "name": f"10{name}", "user": "u", "account": "", "qos": "normal",
        "priority": 1, "seed": 3,
        "submit_us": 100 * S, "start_us": 90 * S, "end_us": 140 * S,
        "model": "m", "parameters": 10**9, "bytes_per_param": 16.0, "walltime_s": 50.0, **changes,
    }  # fmt: skip
    return PastJob(**facts)


def ran(
    start: float, stop: float, kind: str | None, job: str | None = "7", gpus: int = 2,
    activity: str = "busy",
) -> dict[str, Any]:  # fmt: skip
    span = int((stop - start) * S)
    call = f"{job}.{start}" if kind else None
    return {
        "job_id": job, "kind": kind, "activity": activity, "wpg": "w", "call_id": call,
        "start_us": int(start * S), "stop_us": int(stop * S), "gpu_us": span * gpus,
    }  # fmt: skip


def step(at: float, rollout: float = 10.0) -> list[dict[str, Any]]:
    """Samples, a second of reward, then 0.5 + 2 x 2 + 1 s of training with gaps of 0.1 s."""
    t = at + rollout + 1
    return [
        ran(at, at + rollout / 2, None, gpus=4),
        ran(at + rollout / 2, at + rollout, None, gpus=4),
        ran(t, t + 0.5, "forward"),
        ran(t + 0.6, t + 2.6, "forward_backward"),
        ran(t + 2.7, t + 4.7, "forward_backward"),
        ran(t + 4.8, t + 5.8, "optim_step"),
        ran(t + 5.9, t + 6.1, "publish"),
    ]


def test_a_synchronous_job_is_told_by_its_stretches() -> None:
    rows = [
        ran(90, 99, "create"),
        ran(0, 9, None, job=None, activity="idle"),
        *step(100),
        *step(120),
    ]
    (job,), left_out = from_ledger(reversed(rows), [past()])
    assert job.id == "107"
    phases = job.phases
    assert left_out == {}
    assert (job.mode, job.steps, job.submit_us, job.account) == ("sync", 2, 0, "none")
    assert (job.train.gpus, job.rollout.gpus) == (2, 4)
    assert (phases.rollout_s.median, phases.rollout_s.sigma) == (10, 0)
    assert phases.reward_s.median == pytest.approx(1)
    assert (phases.logprob_s.median, phases.optim_s.median) == (0.5, 1)
    assert (phases.fwdbwd_s.median, phases.fwdbwd_s.count) == (2, 2)
    assert phases.publish_s.median == pytest.approx(0.2)
    assert phases.client_gap_s == pytest.approx(0.1)


def test_waiting_for_others_is_in_no_duration() -> None:
    rows = [*step(100), *step(120)]
    late = [
        {**row, "start_us": row["start_us"] + 7 * S, "stop_us": row["stop_us"] + 7 * S}
        if row["kind"] in ("optim_step", "publish") else row
        for row in rows
    ]  # fmt: skip
    (job,), _ = from_ledger(late, [past()])
    assert job.phases.optim_s.median == 1
    assert job.phases.client_gap_s == pytest.approx(0.1), "the median gap, not the longest"


def test_a_job_that_samples_while_it_trains_is_a_step_ahead() -> None:
    rows = [*step(100), ran(110, 125, None, gpus=4), *step(125)[2:]]
    (job,), _ = from_ledger(rows, [past()])
    assert job.mode == "async1"


def test_lengths_that_vary_keep_their_mean() -> None:
    rows = [*step(0, rollout=5), *step(100, rollout=20)]
    (job,), _ = from_ledger(rows, [past()])
    rollout = job.phases.rollout_s
    assert rollout.median < 12.5
    assert rollout.median * 2.718281828 ** (rollout.sigma**2 / 2) == pytest.approx(12.5)


@pytest.mark.parametrize(
    ("rows", "changes", "why"),
    [
        ([], {}, "it took no optimizer step"),
        (step(0)[:4], {}, "it took no optimizer step"),
        (step(0)[2:], {}, "it sampled nothing here"),
        (step(0), {"parameters": 0}, "the catalogue has no model m"),
    ],
)
def test_a_job_that_makes_no_trace_is_told_why(
    rows: list[dict[str, Any]], changes: dict[str, Any], why: str
) -> None:
    assert from_ledger(rows, [past(**changes)]) == ([], {"107": why})


def test_the_first_weights_are_no_part_of_a_step() -> None:
    (job,), _ = from_ledger([ran(99, 99.5, "publish"), *step(100), *step(120)], [past()])
    assert (job.mode, job.steps) == ("sync", 2)
    assert job.phases.publish_s.median == pytest.approx(0.2)


def test_a_call_that_the_books_have_in_two_pieces_is_one() -> None:
    rows = step(100)
    optimizer = rows[5]
    middle = optimizer["start_us"] + 300_000
    rows[5:6] = [{**optimizer, "stop_us": middle}, {**optimizer, "start_us": middle}]
    (job,), _ = from_ledger(rows, [past()])
    assert (job.steps, job.phases.optim_s.median) == (1, 1.0)


def test_what_a_script_does_before_its_first_call_and_after_its_last_is_kept() -> None:
    (job,), _ = from_ledger([*step(100), *step(120)], [past()])
    assert job.phases.create_s == 0
    assert job.phases.client_start_s == pytest.approx(10)
    assert job.phases.client_end_s == pytest.approx(140 - 137.1)


def test_what_brought_the_model_in_is_none_of_its_scripts_time() -> None:
    rows = [ran(92, 95, "create"), *step(100), ran(117, 118, "create"), *step(120)]
    (job,), _ = from_ledger(rows, [past()])
    assert job.phases.create_s == 3, "another one, after a loss, is none of the beginning"
    assert job.phases.client_start_s == pytest.approx(7)


def test_what_a_function_waited_is_no_time_that_its_job_spent_outside() -> None:
    rows = [*step(100), *step(120)]
    asked = {row["call_id"]: row["start_us"] - 800_000 for row in rows if row["kind"] == "forward"}
    (job,), _ = from_ledger(rows, [past()], asked)
    assert job.phases.reward_s.median == pytest.approx(0.2)


def test_a_history_can_be_run() -> None:
    rows = [ran(94, 97, "create"), *step(100), *step(120), *step(140)]
    trace, _ = from_ledger(rows, [past(start_us=92 * S, end_us=157_100_000)])
    cluster = Cluster(train_gpus=8, rollout_gpus=8)
    found = simulate(trace, cluster, placement="isolated", plan=Plan()).figures
    # Three steps of 10 + 1 + 6.1 s after 8 s with the model's creation.
    assert found.makespan_us == pytest.approx((3 * 17.1 + 8) * S, abs=10)


def at(start: float, stop: float, activity: str, job: str | None = None) -> dict[str, Any]:
    return ran(start, stop, None, job, 4, activity)


def with_tools(at_s: float, pause: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A step whose rollout pauses for four seconds, in which WPG w does ``pause``."""
    first, second, *training = step(at_s)
    moved = [
        {**row, "start_us": row["start_us"] + 4 * S, "stop_us": row["stop_us"] + 4 * S}
        for row in (second, *training)
    ]
    return [first, *pause, *moved]


@pytest.mark.parametrize(
    ("pause", "stalls", "stall_s"),
    [
        ([at(5, 9, "idle")], 1, 4),
        ([at(5, 5.1, "kept", "7"), at(5.1, 9, "idle")], 1, 4),
        # It asked when nobody was there any more, and waited from then on.
        ([at(5, 8, "idle"), at(8, 9, "busy", "9")], 1, 3),
        # Of somebody else.
        ([at(5, 9, "kept", "9")], 0, 0),
        ([at(5, 9, "busy", "9")], 0, 0),
    ],
)
def test_what_a_rollout_waits_for_tools_is_told_from_what_it_waits_for_others(
    pause: list[dict[str, Any]], stalls: int, stall_s: float
) -> None:
    (job,), _ = from_ledger(with_tools(0, pause), [past()])
    assert (job.phases.tool.stalls, job.phases.tool.stall_s) == (stalls, stall_s)
    assert job.phases.rollout_s.median == 10
    assert job.kind == ("agentic" if stalls else "reasoning")


def test_what_lies_between_two_rollouts_is_no_wait_for_tools() -> None:
    (job,), _ = from_ledger([*step(0), at(10, 20, "idle"), *step(20)], [past()])
    assert job.phases.tool.stalls == 0


def test_a_history_with_tools_takes_as_long_when_it_is_run() -> None:
    rows = [*with_tools(0, [at(5, 9, "idle")]), *with_tools(30, [at(35, 39, "idle")])]
    trace, _ = from_ledger(rows, [past(submit_us=0, start_us=0, end_us=51_100_000)])
    cluster = Cluster(train_gpus=8, rollout_gpus=8)
    found = simulate(trace, cluster, placement="isolated", plan=Plan()).figures
    assert found.makespan_us == pytest.approx(2 * 21.1 * S, abs=10)


def test_promise_and_weight_of_a_job_are_its_own() -> None:
    (job,), _ = from_ledger(step(0), [past(max_slowdown=1.3, priority=8)])
    assert (job.slo.max_slowdown, job.priority) == (1.3, 8.0)

"""What the daemon makes of Slurm's words about users' jobs, from a Slurm that a test scripts."""

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plexrl_slurm.api.service import Principal
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import (
    BadInput,
    NotAdmitted,
    NotFound,
    SlurmRejected,
    SlurmUnavailable,
    UnknownModel,
)
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.daemons import controllers as module
from plexrl_slurm.daemons import service_submission
from plexrl_slurm.daemons.intake import Intake
from plexrl_slurm.daemons.service_submission import hashed
from plexrl_slurm.daemons.state import LiveJob, LiveSession
from plexrl_slurm.db import queue
from plexrl_slurm.slurm.port import SlurmState
from tests.daemons.controllers_bench import ADA, EVE, TICK_S, Bench, bench_in

Play = Callable[[Callable[[Bench], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    monkeypatch.setattr(module, "RELEASE_AGAIN_US", 0)

    def run(scene: Callable[[Bench], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with bench_in(tmp_path) as bench:
                await scene(bench)

        asyncio.run(whole())

    return run


# ---- ends --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "code", "state", "reason"),
    [
        ("COMPLETED", 0, "completed", ""),
        ("FAILED", 7, "failed", "its script ended with exit code 7"),
        ("CANCELLED", None, "cancelled", "cancelled"),
        ("TIMEOUT", None, "timeout", "its time limit passed"),
        ("NODE_FAIL", None, "failed", "its node failed"),
        ("OUT_OF_MEMORY", 137, "failed", "it used more memory than it had asked for"),
        ("PREEMPTED", None, "failed", "Slurm preempted it"),
        ("DEADLINE", None, "failed", "it could not end before its deadline"),
        ("LAUNCH_FAILED", None, "failed", "Slurm could not launch it"),
    ],
)
def test_every_end_has_its_reason(
    play: Play, word: str, code: int | None, state: str, reason: str
) -> None:
    async def scene(bench: Bench) -> None:
        live = await bench.running()
        bench.slurm.put("7", word, exit_code=code)
        await bench.look()
        row = await bench.row(live.id)
        assert (str(row.state), row.reason, row.exit_code) == (state, reason, code)
        assert live.id not in bench.state.jobs

    play(scene)


@pytest.mark.parametrize("admitted", [True, False])
@pytest.mark.parametrize("word", ["UNSURE", "COMPLETING", "no answer", "not known"])
def test_a_word_that_is_no_end_ends_nothing(play: Play, word: str, admitted: bool) -> None:
    async def scene(bench: Bench) -> None:
        if admitted:
            job = (await bench.running()).id
        else:
            bench.slurm.put("7", "PENDING", reason="JobHeldUser")
            job = await bench.submit("7")
        before = str((await bench.row(job)).state)
        if word in SlurmState.__members__:
            bench.slurm.put("7", word)
        elif word == "not known":
            del bench.slurm.jobs[SlurmId("7")]
        else:
            bench.slurm.poll = bench.slurm.states = _unavailable  # type: ignore[method-assign,assignment]
        for _ in range(3):
            await bench.look()
        assert str((await bench.row(job)).state) == before

    play(scene)


def _unavailable(*_: Any) -> Any:
    raise SlurmUnavailable("nobody answered")


def test_a_job_that_slurmctld_has_forgotten_is_asked_for_once_in_a_while(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        live = await bench.running()
        status = bench.slurm.jobs.pop(live.slurm_id)
        await bench.look()
        assert bench.slurm.asked == []  # it might be younger than the answer
        for _ in range(3):
            await bench.look()
        assert bench.slurm.asked == [["7"]]
        ended = dataclasses.replace(status, state=SlurmState.COMPLETED, exit_code=0)
        bench.slurm.forgotten[live.slurm_id] = ended
        bench.controllers._asked_us = 0
        await bench.look()
        assert str((await bench.row(live.id)).state) == "completed"

    play(scene)


@pytest.mark.parametrize(
    ("word", "state", "reason"),
    [
        ("CANCELLED", "cancelled", "cancelled"),
        (
            "TIMEOUT",
            "failed",
            "its Slurm job ended before it was admitted: its time limit passed",
        ),
        ("COMPLETED", "failed", "its Slurm job ended before it was admitted: its script ended"),
    ],
)
def test_a_job_may_end_before_it_has_a_place(
    play: Play, word: str, state: str, reason: str
) -> None:
    async def scene(bench: Bench) -> None:
        job = await bench.submit("7")
        bench.slurm.put("7", word)
        await bench.look()
        row = await bench.row(job)
        assert (str(row.state), row.reason) == (state, reason)

    play(scene)


# ---- releases and holds ------------------------------------------------------------------------


def test_a_release_that_slurm_does_not_take_is_tried_until_it_does(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.slurm.put("7", "PENDING", reason="JobHeldUser")
        bench.slurm.error = SlurmUnavailable("nobody answered")
        job = await bench.submit("7")
        live = await bench.admit(job)
        await bench.look()
        bench.slurm.error = SlurmRejected(("scontrol", "release"), "Access/permission denied")
        await bench.look()
        row = await bench.row(job)
        assert str(row.state) == "admitted"
        assert row.reason == "Slurm does not release it: scontrol: Access/permission denied"
        bench.slurm.error = None
        live = await bench.again(job)  # a daemon that died right before the release
        await bench.look()
        await bench.look()
        assert bench.slurm.told == [("release", "7")]
        assert live.released

    play(scene)


def test_who_holds_a_job_after_its_release_means_it(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.slurm.put("7", "PENDING", reason="JobHeldUser")
        job = await bench.submit("7")
        await bench.admit(job)
        bench.slurm.put("7", "PENDING", reason="Resources")
        await bench.look()
        wanted = "it has a place, and waits for a node of Slurm (Resources)"
        assert (await bench.row(job)).reason == wanted
        for reason, words in (
            ("JobHeldUser", "its owner holds it in Slurm: scontrol release 7"),
            ("JobHeldAdmin", "an administrator holds it in Slurm: ask for its release"),
        ):
            bench.slurm.put("7", "PENDING", reason=reason)
            await bench.again(job)
            await bench.look()
            assert (await bench.row(job)).reason == words
        assert bench.slurm.told == [("release", "7")]
        bench.slurm.put("7", "RUNNING")
        await bench.look()
        assert (await bench.row(job)).reason == ""

    play(scene)


def test_a_users_own_hold_is_released_by_the_user_only(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.slurm.put("7", "PENDING", reason="JobHeldUser")
        job = await bench.submit("7", hold="user")
        await bench.admit(job)
        await bench.look()
        live = await bench.again(job)
        await bench.look()
        assert bench.slurm.told == []
        bench.slurm.put("7", "PENDING", reason="Priority")
        await bench.look()
        assert live.released and bench.slurm.told == []

    play(scene)


@pytest.mark.parametrize("options", [{}, {"hold": "user"}])
def test_a_job_that_was_released_before_its_turn_is_held_once_and_released_in_turn(
    play: Play, options: dict[str, str]
) -> None:
    async def scene(bench: Bench) -> None:
        job = await bench.submit("7", **options)
        bench.slurm.put("7", "PENDING", reason="Resources")
        await bench.look()
        await bench.controllers.watch()  # Slurm's answer is still that of before
        assert bench.slurm.told == [("hold", "7")]
        assert await bench.story(job) == ["submitted", "bound", "held"]
        bench.slurm.put("7", "PENDING", reason="JobHeldAdmin")
        await bench.look()
        await bench.admit(job)
        assert bench.slurm.told == [("hold", "7"), ("release", "7")]

    play(scene)


def test_a_job_that_was_cancelled_meanwhile_keeps_the_reason_of_its_end(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.slurm.put("7", "PENDING", reason="JobHeldUser")
        live = await bench.admit(await bench.submit("7"))
        await bench.store.run(queue.cancel, live.id, reason="by ada", now_us=9)
        bench.slurm.put("7", "PENDING", reason="Resources")
        await bench.look()
        assert (await bench.row(live.id)).reason == "by ada"

    play(scene)


def test_a_job_that_runs_already_needs_no_release(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        job = await bench.submit("7")
        bench.slurm.put("7", "RUNNING")
        for _ in range(2):
            await bench.look()
        assert (await bench.story(job)).count("early") == 1
        await bench.admit(job)
        await bench.look()
        assert bench.slurm.told == []
        assert str((await bench.row(job)).state) == "running"

    play(scene)


# ---- requeues ----------------------------------------------------------------------------------


def _open(bench: Bench, live: LiveJob, name: str) -> LiveSession:
    now = now_us()
    session = LiveSession(id=name, job=live.id, heartbeat_us=now, opened_us=now)
    bench.state.sessions[name] = session
    return session


@pytest.mark.parametrize("seen", ["waiting", "running again"])
def test_a_requeue_ends_the_sessions_of_the_process_that_is_gone(play: Play, seen: str) -> None:
    async def scene(bench: Bench) -> None:
        live = await bench.running()
        old = _open(bench, live, "old")
        await asyncio.sleep(TICK_S)
        begun = now_us()
        if seen == "waiting":
            bench.slurm.put("7", "PENDING", reason="BeginTime", restarts=1)
            await bench.look()
            assert not live.running
        await asyncio.sleep(TICK_S)
        new = _open(bench, live, "new")
        bench.slurm.put("7", "RUNNING", start_us=begun, restarts=1)
        for _ in range(2):
            await bench.look()
        assert (old.finished, new.finished, live.running) == (True, False, True)
        live = await bench.again(live.id)
        new = _open(bench, live, "new")
        new.opened_us = 2
        await bench.look()
        assert not new.finished  # that requeue is known
        assert (await bench.story(live.id)).count("requeued") == 1
        assert str((await bench.row(live.id)).state) == "running"

    play(scene)


# ---- plain submissions -------------------------------------------------------------------------


def test_a_marked_job_is_adopted_once(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        mark = "plexrl:1:rlvr:model=tiny;seed=7;priority=3"
        bench.slurm.put("7", "PENDING", reason="JobHeldUser", admin_comment=mark, submit_us=5)
        for number, comment in (
            ("8", "plexrl:1:other:model=tiny"),
            ("9", "plexrl:1:rlvr:nonsense"),
            ("10", "a note of the site's"),
        ):
            bench.slurm.put(number, "PENDING", reason="JobHeldUser", admin_comment=comment)
        for _ in range(2):
            await bench.look()
            bench.fresh()
        (row,) = await bench.rows()
        assert (row.slurm_id, row.uid, row.seed, row.priority) == ("7", 1000, 7, 3)
        await bench.store.run(queue.cancel, JobId(row.id), reason="x", now_us=10)
        await bench.look()
        assert len(await bench.rows()) == 1  # Slurm has not heard of the end yet
        bench.fresh()
        bench.slurm.put("7", "PENDING", reason="JobHeldUser", admin_comment=mark, submit_us=20)
        await bench.look()
        assert len(await bench.rows()) == 2  # years later: the same number, another job

    play(scene)


def test_a_marked_job_is_adopted_while_the_partition_drains_and_told_so(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.state.draining = True
        bench.slurm.put("7", "PENDING", reason="JobHeldUser", admin_comment="plexrl:1:rlvr:")
        await bench.look()
        (row,) = await bench.rows()
        with pytest.raises(NotAdmitted, match="partition rlvr is draining and admits no job"):
            await bench.service.credentials(ADA, SlurmId("7"))
        assert str(row.state) == "pending"

    play(scene)


def test_credentials_of_a_marked_job_wait_for_its_adoption(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.slurm.put("7", "RUNNING", admin_comment="plexrl:1:rlvr:")
        bench.slurm.put("8", "RUNNING")
        with pytest.raises(NotAdmitted, match="has not taken it in yet"):
            await bench.service.credentials(ADA, SlurmId("7"))
        for who, number in ((EVE, "7"), (ADA, "8"), (ADA, "9")):
            with pytest.raises(NotFound):
                await bench.service.credentials(who, SlurmId(number))

    play(scene)


def test_a_slurm_job_is_bound_to_one_row(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.slurm.put("7", "RUNNING")
        first, second = await bench.submit(), await bench.submit()
        for _ in range(2):
            await bench.service.bind_job(ADA, first, slurm_id="7")
        with pytest.raises(BadInput, match="Slurm job 7 is in the queue already"):
            await bench.service.bind_job(ADA, second, slurm_id="7")
        with pytest.raises(NotFound):
            await bench.service.bind_job(EVE, second, slurm_id="7")

    play(scene)


def test_a_number_is_bound_only_while_slurm_says_whose_it_is(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        # As when accounting does not answer: the number may be somebody else's one day.
        bench.slurm.put("7", "WHO_KNOWS", uid=None)
        job = await bench.submit()
        with pytest.raises(SlurmUnavailable, match="cannot say now whose job 7 is"):
            await bench.service.bind_job(ADA, job, slurm_id="7")
        (row,) = await bench.rows()
        assert row.slurm_id is None

    play(scene)


def test_an_array_that_is_bound_again_has_one_row_a_task(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        for task in range(3):
            bench.slurm.put(f"7_{task}", "PENDING", array_id=SlurmId("7"), array_task=task)
        job = await bench.submit(hold="user")
        for _ in range(2):
            await bench.service.bind_job(ADA, job, slurm_id="7")
        rows = await bench.rows()
        assert [(row.slurm_id, row.options) for row in rows] == [
            (f"7_{task}", {"hold": "user"}) for task in range(3)
        ]

    play(scene)


def test_a_job_that_can_never_be_placed_ends_though_slurm_is_away_at_first(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        def admit(*_: Any, **__: Any) -> Any:
            raise UnknownModel("tiny", ("other",))

        bench.slurm.put("7", "PENDING", reason="JobHeldUser")
        job = await bench.submit("7")
        bench.parts.placer = SimpleNamespace(admit=admit)
        bench.slurm.error = SlurmUnavailable("nobody answered")
        intake = asyncio.create_task(Intake(bench.parts, bench.service).run())
        await asyncio.sleep(0.1)
        assert str((await bench.row(job)).state) == "pending"
        bench.slurm.error = None
        bench.parts.wake_intake.set()
        await asyncio.sleep(0.2)
        intake.cancel()
        row = await bench.row(job)
        assert (str(row.state), row.reason[:20]) == ("failed", "unknown model 'tiny'")
        assert ("cancel", "7") in bench.slurm.told

    play(scene)


# ---- a key before its turn ---------------------------------------------------------------------


def test_a_call_before_its_turn_goes_on_when_the_job_has_its_place(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        job = await bench.submit("7")
        bench.slurm.put("7", "RUNNING")
        token = bench.service._answer(job)["token"]
        call = asyncio.create_task(bench.service.principal_of_token(token))
        await asyncio.sleep(0.05)
        assert not call.done()
        await bench.admit(job)
        assert await call == Principal(uid=1000, user="ada", job=job)

    play(scene)


def test_a_call_that_waits_too_long_for_its_turn_hears_why(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_submission, "TURN_US", 0)

    async def scene(bench: Bench) -> None:
        job = await bench.submit("7")
        token = bench.service._answer(job)["token"]
        await bench.store.run(queue.set_obstacles, job, obstacles=["no room"], now_us=2)
        with pytest.raises(NotAdmitted, match="job 7 is not admitted yet: no room"):
            await bench.service.principal_of_token(token)
        await bench.store.run(queue.cancel, job, reason="x", now_us=3)
        assert await bench.service.principal_of_token(token) is None
        assert await bench.service.principal_of_token("tml-x") is None

    play(scene)


def test_a_users_options_cannot_pass_for_the_daemons_notes(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        job = await bench.submit("7", released="yes", restarts="x", max_slowdown="2")
        row = await bench.row(job)
        assert row.options == {"max_slowdown": "2"}
        assert row.token_sha256 == hashed(bench.service._answer(job)["token"])

    play(scene)

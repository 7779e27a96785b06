"""Intake's pass along the queue: its order, who is held, who is refused, and what is written."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from plexrl_slurm.api.service import JobSubmission, Principal
from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import BadInput, DatabaseUnavailable
from plexrl_slurm.core.ids import JobId, SlurmId, WpgId
from plexrl_slurm.core.limits import LimitRules, Limits, Qos
from plexrl_slurm.core.messages import Activity, Pool
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.priority import Weights
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.states import JobState
from plexrl_slurm.core.turns import TurnRules
from plexrl_slurm.daemons import standings, turns
from plexrl_slurm.daemons.intake import Intake
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.queue_settings import QueueSettings
from tests.daemons.controllers_bench import Bench, bench_in
from tests.db.builders import add_hold, charge

USERS = {name: Principal(uid=1000 + number, user=name) for number, name in enumerate("abcd")}
Scene: TypeAlias = Callable[["Queue"], Awaitable[None]]
FULL = Obstacle(kind=ObstacleKind.HOST_MEMORY, sentence="no room on train-0")
KEPT = Obstacle(kind=ObstacleKind.RESERVATION, sentence="kept free for others")


class Rooms:
    """A placer with so much room; a job needs as much as it has models."""

    def __init__(self, state: Any, free: int) -> None:
        self.state, self.free, self.asked = state, free, list[JobId]()
        self.reserved = 0

    def admit(
        self, job: LiveJob, models: list[str], *, steady: bool = False
    ) -> tuple[Obstacle, ...]:
        """Nothing but the job changes, as with the real one."""
        self.asked.append(job.id)
        taken = {True: 0, False: 0}
        for each in self.state.jobs.values():
            taken[each.reserved] += len(each.models)
        left = self.free + self.reserved - sum(taken.values())
        kept = 0 if job.reserved else max(0, self.reserved - taken[True])
        if len(models) > left - kept:
            return (KEPT,) if len(models) <= left else (FULL,)
        job.homes[Pool.TRAIN], job.models = WpgId("train-0"), tuple(models)
        return ()


class Queue:
    """A bench with an intake."""

    def __init__(self, bench: Bench, settings: QueueSettings, free: int) -> None:
        self.bench = bench
        bench.parts.settings.queue = settings
        bench.service.standings = standings.Standings(bench.parts.settings)
        self.rooms = bench.parts.placer = Rooms(bench.state, free)
        self.intake = Intake(bench.parts, bench.service)
        self.number = 0

    async def submit(
        self, user: str = "a", account: str = "lab", *, models: int = 1, priority: int = 1,
        bound: bool = True, **options: str,
    ) -> JobId:  # fmt: skip
        answer = await self.bench.service.submit_job(
            USERS[user],
            JobSubmission(
                partition="rlvr", name="count", account=account, models=("tiny",) * models,
                priority=priority, seed=0, script="job.sh", options=options,
            ),
        )  # fmt: skip
        job = JobId(answer["job_id"])
        if bound:
            self.number += 1
            slurm_id = SlurmId(str(self.number))
            self.bench.slurm.put(slurm_id, "PENDING", reason="JobHeldAdmin")
            await self.bench.store.run(queue.bind, job, slurm_id=slurm_id, now_us=1)
        return job

    async def look(self) -> list[JobId]:
        """Jobs that got a place, in their order."""
        before = len(self.bench.slurm.told)
        self.intake._turns._not_before_us = 0
        await self.intake._turns.look()
        told = self.bench.slurm.told[before:]
        rows = {row.slurm_id: JobId(row.id) for row in await self.bench.rows()}
        return [rows[number] for verb, number in told if verb == "release"]

    def words(self) -> dict[JobId, str]:
        found = self.bench.state.obstacles
        return {job: each[0].word for job, each in found.items()}

    async def row(self, job: JobId) -> JobRow:
        return await self.bench.row(job)

    async def use(self, job: JobId, seconds: int) -> None:
        """So many GPU-seconds, just now, in the ledger."""

        def book(session: Any, now: int) -> None:
            add_hold(session, now_us=now, gpus=1)
            charge(session, now, now + 1, gpu_us=seconds * 10**6, job=job, activity=Activity.BUSY)

        def ours(session: Any) -> None:
            session.connection().exec_driver_sql("UPDATE holds SET partition = 'rlvr'")

        await self.bench.store.run(book, now_us())
        await self.bench.store.run(ours)


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    def run(scene: Scene, free: int = 0, **settings: Any) -> None:
        async def whole() -> None:
            async with bench_in(tmp_path) as bench:
                await scene(Queue(bench, QueueSettings(**settings), free))

        asyncio.run(whole())

    return run


def test_the_more_urgent_job_gets_the_last_place(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        low, high = await q.submit(), await q.submit(priority=900)
        assert await q.look() == [high]
        assert q.words() == {low: "HostMemory"}
        row = await q.row(low)
        assert (row.state, row.reason) == (JobState.PENDING, "no room on train-0")
        taken = await q.row(high)
        assert (taken.state, taken.owner) == (JobState.ADMITTED, "daemon-1")
        assert taken.homes == {"train": "train-0"}

    play(scene, free=1)


def test_who_has_used_more_than_the_share_waits_for_who_has_not(
    play: Callable[..., None],
) -> None:
    async def scene(q: Queue) -> None:
        earlier = await q.submit("a", "physics", bound=False)
        await q.use(earlier, 500)
        mine, others = await q.submit("a", "physics"), await q.submit("b", "bio")
        assert await q.look() == [others]
        answer = await q.bench.service.priorities(USERS["a"])
        assert [each["job_id"] for each in answer["jobs"]] == [mine]
        (waits,) = answer["jobs"]
        told = (await q.bench.service.explain_job(USERS["a"], mine))["sentences"]
        assert told[0] == "no room on train-0"
        assert told[1].startswith(
            f"it is the first in the queue; its priority is {waits['priority']}"
        )
        assert waits["factors"]["fairshare"] < 1
        assert waits["priority"] == sum(waits["parts"].values())

    play(scene, free=1)


def test_without_the_weight_of_fair_share_the_first_comes_first(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        earlier = await q.submit("a", "physics", bound=False)
        await q.use(earlier, 500)
        mine, _ = await q.submit("a", "physics"), await q.submit("b", "bio")
        assert await q.look() == [mine]

    play(scene, free=1, weights=Weights(fairshare=0))


def test_a_smaller_job_goes_before_one_that_does_not_fit(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        large, small = await q.submit(models=2), await q.submit()
        assert await q.look() == [small]
        assert q.words() == {large: "HostMemory"}

    play(scene, free=1)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        pytest.param(TurnRules(backfill=False), "goes first, and finds no place yet", id="order"),
        pytest.param(TurnRules(guard_us=0), "has waited so long", id="guard"),
        pytest.param(TurnRules(depth=1), "1 jobs that go first were looked at", id="depth"),
    ],
)
def test_where_the_pass_ends_the_rest_waits_for_its_turn(
    play: Callable[..., None], rules: TurnRules, words: str
) -> None:
    async def scene(q: Queue) -> None:
        large, small = await q.submit(models=2), await q.submit()
        assert await q.look() == []
        assert q.words() == {large: "HostMemory", small: "Priority"}
        assert words in (await q.row(small)).reason

    play(scene, free=1, turns=rules)


def test_jobs_of_a_shape_that_found_no_room_are_not_tried_again(
    play: Callable[..., None],
) -> None:
    async def scene(q: Queue) -> None:
        jobs = [await q.submit() for _ in range(5)]
        assert await q.look() == []
        assert q.rooms.asked == jobs[:1]
        assert set(q.words()) == set(jobs)
        # Whoever weighs more may keep a promise where these would not.
        heavier = await q.submit(priority=2)
        q.rooms.asked.clear()
        assert await q.look() == []
        assert q.rooms.asked == [heavier, jobs[0]]

    play(scene)


def test_a_user_at_max_jobs_waits_in_nobodys_way(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        first, second, other = [await q.submit(user) for user in ("a", "a", "b")]
        assert await q.look() == [first, other]
        assert q.words() == {second: "AssocMaxJobsLimit"}
        assert q.bench.state.waiting_since_us is None
        reason = (await q.row(second)).reason
        assert reason.startswith("user a has 1 job running, and max_jobs is 1")
        await q.bench.service.end_job(first, state=JobState.COMPLETED, reason="", exit_code=0)
        assert await q.look() == [second]

    rules = LimitRules(users=Limits(max_jobs=1))
    play(scene, free=9, limits=rules, turns=TurnRules(backfill=False))


def test_a_job_over_a_submit_limit_is_refused(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        first = await q.submit()
        with pytest.raises(BadInput, match=r"user a has 1 job waiting or running, and max_submit"):
            await q.submit()
        await q.submit("b")
        await q.bench.service.cancel_job(USERS["a"], first, reason="x")
        await q.submit()

    play(scene, limits=LimitRules(users=Limits(max_submit=1)))


def test_slurms_account_counts_when_the_job_is_bound(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        await q.submit("a", "lab")
        job = await q.submit("b", "", bound=False)
        q.bench.slurm.put("77", "PENDING", uid=1001, user="b", account="lab")
        with pytest.raises(BadInput, match="account lab has 1 job waiting or running"):
            await q.bench.service.bind_job(USERS["b"], job, slurm_id="77")
        assert (await q.row(job)).slurm_id is None

    play(scene, limits=LimitRules(accounts=Limits(max_submit=1)))


def test_gpu_time_of_a_day_holds_the_account(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "REFRESH_US", 0)

    async def scene(q: Queue) -> None:
        earlier = await q.submit("a", "physics", bound=False)
        mine, others = await q.submit("b", "physics"), await q.submit("c", "bio")
        await q.use(earlier, 500)
        assert await q.look() == [others]
        assert q.words() == {mine: "AssocGrpGRESMinutes"}
        assert "used 500 GPU-seconds" in (await q.row(mine)).reason

    limits = LimitRules(accounts=Limits(gpu_us_per_day=400 * 10**6))
    play(scene, free=9, limits=limits, weights=Weights(fairshare=0))


FAST = {
    "fast": Qos(name="fast", priority=10, weight=4, reserved=True, users=frozenset("a")),
    "slow": Qos(name="slow", limits=Limits(max_jobs=1)),
}


def test_a_qos_lifts_a_job_in_the_queue_and_on_its_wpg(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        await q.submit("b")
        fast = await q.submit("a", qos="fast", priority=2)
        assert await q.look() == [fast]
        assert q.bench.state.jobs[fast].priority == 8

    play(scene, free=1, limits=LimitRules(qos=FAST))


def test_an_unknown_qos_and_one_for_others_are_refused(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        with pytest.raises(BadInput, match="unknown qos 'no'; this partition has fast, normal"):
            await q.submit(qos="no")
        with pytest.raises(BadInput, match="qos fast is not for user b in account lab"):
            await q.submit("b", qos="fast")
        slow = [await q.submit(user, qos="slow") for user in ("a", "b")]
        assert await q.look() == slow[:1]
        assert q.words() == {slow[1]: "QOSGrpJobsLimit"}

    play(scene, free=9, limits=LimitRules(qos=FAST))


def test_what_is_reserved_is_for_reserved_jobs_even_past_the_guard(
    play: Callable[..., None],
) -> None:
    async def scene(q: Queue) -> None:
        q.rooms.reserved = 1
        plain = await q.submit("b")
        assert await q.look() == []
        assert q.words() == {plain: "Reservation"}
        large = await q.submit("b", models=3)
        fast = await q.submit("a", qos="fast")
        last = await q.submit("b")
        assert await q.look() == [fast]
        assert q.words() == {plain: "Reservation", large: "HostMemory", last: "Priority"}

    kept = Reservation(wpgs=1)
    play(scene, limits=LimitRules(qos=FAST), reservation=kept, turns=TurnRules(guard_us=0))


def test_the_story_is_told_once_however_often_numbers_change(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        job = await q.submit()
        sentences = iter(["1 GiB is missing", "2 GiB are missing", "3 GiB are missing"])

        def admit(*_: Any, **__: Any) -> Mapping[Any, Any] | tuple[Obstacle, ...]:
            return (Obstacle(kind=ObstacleKind.HOST_MEMORY, sentence=next(sentences)),)

        q.rooms.admit = admit  # type: ignore[assignment,method-assign]
        await q.look()
        await q.look()
        assert (await q.row(job)).reason == "1 GiB is missing"
        turns.WRITE_US, kept = 0, turns.WRITE_US  # type: ignore[misc]
        try:
            await q.look()
        finally:
            turns.WRITE_US = kept  # type: ignore[misc]
        assert (await q.row(job)).reason == "3 GiB are missing"
        assert (await q.bench.story(job)).count("obstacles") == 1

    play(scene)


def test_a_job_that_ends_while_it_is_claimed_gives_its_place_back(
    play: Callable[..., None],
) -> None:
    async def scene(q: Queue) -> None:
        job = await q.submit()
        place = q.rooms.admit

        def admit(live: LiveJob, models: list[str], **_: Any) -> tuple[Obstacle, ...]:
            found = place(live, models)
            ends.append(
                asyncio.ensure_future(
                    q.bench.service.cancel_job(USERS["a"], live.id, reason="too late")
                )
            )
            return found

        ends: list[asyncio.Future[Any]] = []
        q.rooms.admit = admit  # type: ignore[assignment,method-assign]
        await q.look()
        await asyncio.gather(*ends)
        assert (await q.row(job)).state == JobState.CANCELLED
        assert job not in q.bench.state.jobs

    play(scene, free=1)


def test_a_claim_of_which_the_answer_was_lost_is_given_back_and_made_again(
    play: Callable[..., None],
) -> None:
    async def scene(q: Queue) -> None:
        job = await q.submit()
        run = q.bench.store.run

        async def cut(function: Any, *args: Any, **more: Any) -> Any:
            found = await run(function, *args, **more)
            if function.__name__ == "_claim_with_homes":
                raise DatabaseUnavailable("sqlite", "the connection broke during a commit")
            return found

        q.bench.store.run = cut  # type: ignore[method-assign]
        with pytest.raises(DatabaseUnavailable):
            await q.look()
        assert (await q.row(job)).state == JobState.ADMITTED
        assert job not in q.bench.state.jobs
        q.bench.store.run = run  # type: ignore[method-assign]
        assert await q.look() == []
        assert await q.look() == [job]

    play(scene, free=2)


def test_a_daemon_that_dies_in_a_pass_loses_no_job(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        jobs = [await q.submit() for _ in range(6)]

        async def die(*_: Any) -> None:
            raise SystemExit

        for _ in jobs:
            q.intake._turns._admit = die
            with pytest.raises(SystemExit):
                await q.look()
            rows = [await q.row(job) for job in jobs]
            assert {row.state for row in rows} <= {JobState.PENDING, JobState.ADMITTED}
            q.bench.fresh()
            q.bench.parts.placer, q.rooms.state = q.rooms, q.bench.state
            q.bench.parts.settings.queue = QueueSettings()
            adopted = await q.bench.store.run(
                queue.adopt, partition="rlvr", owner="daemon-1", lease_us=10**12, now_us=1
            )
            assert all(row.homes == {"train": "train-0"} for row in adopted)
            for row in adopted:
                q.bench.know(row)
            q.intake = Intake(q.bench.parts, q.bench.service)
        assert {(await q.row(job)).state for job in jobs} == {JobState.ADMITTED}

    play(scene, free=6)


def test_whoever_joins_others_comes_before_whoever_takes_an_empty_wpg(
    play: Callable[..., None],
) -> None:
    async def scene(q: Queue) -> None:
        homes = {1: "train-0", 2: "train-1", 3: "train-0"}

        def admit(live: LiveJob, _: list[str], **__: Any) -> tuple[Obstacle, ...]:
            live.homes[Pool.TRAIN] = WpgId(homes[live.id])
            return ()

        q.rooms.admit = admit  # type: ignore[assignment,method-assign]
        first = await q.submit()
        assert await q.look() == [first]
        alone, joining = await q.submit(), await q.submit()
        assert await q.look() == [joining, alone]
        assert q.words() == {}

    play(scene)


def test_what_was_used_counts_once_however_many_ask_at_the_same_time(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "REFRESH_US", 0)

    async def scene(q: Queue) -> None:
        earlier = await q.submit("a", "physics", bound=False)
        await q.use(earlier, 500)
        known = q.bench.service.standings
        await asyncio.gather(*(known.refresh(q.bench.store, now_us()) for _ in range(5)))
        await known.refresh(q.bench.store, now_us())
        assert sum(known.dues.usage(now_us()).values()) == pytest.approx(500e6, rel=1e-3)
        assert set(known.dues.today(now_us()).values()) == {500 * 10**6}

    play(scene)


def test_a_qos_of_plain_sbatch_is_judged_in_the_queue(play: Callable[..., None]) -> None:
    async def scene(q: Queue) -> None:
        for number, qos in (("71", "fast"), ("72", "nope")):
            q.bench.slurm.put(
                number, "PENDING", reason="JobHeldAdmin", uid=1000, user="a", account="lab",
                submit_us=now_us(), admin_comment=f"plexrl:1:rlvr:model=tiny;qos={qos}",
            )  # fmt: skip
        await q.bench.look()
        fast, wrong = await q.bench.rows()
        assert (fast.options, wrong.options) == ({"qos": "fast"}, {"qos": "nope"})
        assert await q.look() == [fast.id]
        assert q.words() == {JobId(wrong.id): "InvalidQOS"}
        told = "unknown qos 'nope'; this partition has fast, normal, slow: submit with one of these"
        assert (await q.row(JobId(wrong.id))).reason == told

    play(scene, free=9, limits=LimitRules(qos=FAST))

"""The placer: what it tells the core, what it keeps, and what it only answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.errors import BadInput, UnknownModel
from plexrl_slurm.core.ground import Ground, News, Wish
from plexrl_slurm.core.ids import DeploymentId, JobId, SlurmId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import ObstacleKind
from plexrl_slurm.core.profiles import Guess
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.daemons.layout import Place, Room, lay_out, wpg_slots
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.state import LiveDeployment, LiveJob, State
from plexrl_slurm.settings import WpgSettings
from plexrl_slurm.sharing_settings import SharingSettings
from tests.daemons.holds_bench import TINY, settings_in

HEAVY = Guess(train_share=0.4, sample_share=0.05)


class Bench:
    """Two training WPGs and one to sample on, on one node; jobs are made as intake makes them."""

    def __init__(self, folder: Path, *, trains: int = 2, **sharing: Any) -> None:
        wpgs = (
            WpgSettings(pool="train", engine="fake_train", count=trains),
            WpgSettings(pool="rollout", engine="fake_sample"),
        )
        settings = settings_in(folder)
        self.settings = replace(settings, wpgs=wpgs, sharing=SharingSettings(**sharing))
        self.state = State()
        self.placer = Placer(self.state, self.settings)
        rooms = [
            Room(place=Place(hold="h", component=0, node="n1"), pool=Pool.TRAIN, gpus=trains),
            Room(place=Place(hold="h", component=1, node="n1"), pool=Pool.ROLLOUT, gpus=1),
        ]
        for held in lay_out(wpg_slots(self.settings), rooms, taken=()):
            self.placer.wpgs[held.id] = held
        self.noted: list[tuple[News, Wish, Any]] = []
        self.placer.journal = lambda *noted: self.noted.append(noted)

    def job(self, number: int, promise: float | None = None) -> LiveJob:
        return LiveJob(
            id=JobId(number), uid=1, user="ada", name="j", seed=0, priority=1,
            slurm_id=SlurmId(str(100 + number)), running=True, max_slowdown=promise,
        )  # fmt: skip

    def admit(self, number: int, models: Sequence[str] = ("tiny",), **facts: Any) -> LiveJob:
        job = self.job(number, **facts)
        assert self.placer.admit(job, models) == ()
        self.state.jobs[job.id] = job
        return job


def test_an_admitted_job_has_homes_in_both_pools_and_says_what_it_will_take(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    job = bench.admit(1)
    assert job.homes == {Pool.TRAIN: WpgId("train-0"), Pool.ROLLOUT: WpgId("rollout-0")}
    assert sorted(job.declared) == [
        (Pool.ROLLOUT, TINY.weights_bytes),
        (Pool.TRAIN, TINY.train_bytes),
    ]
    assert job.models == ("tiny",)


def test_a_refused_job_keeps_nothing_and_is_told_of_the_next_hold_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path, trains=1, placement="isolated")
    bench.admit(1)
    bench.placer.why_no_more = "hold h2 waits in Slurm"
    job = bench.job(2)
    found = bench.placer.admit(job, ["tiny"])
    assert [each.kind for each in found] == [
        ObstacleKind.ROLLOUT_GPUS, ObstacleKind.TRAIN_GPUS, ObstacleKind.NO_WPG,
    ]  # fmt: skip
    assert found[-1].sentence == "hold h2 waits in Slurm"
    assert (job.homes, job.declared, job.models) == ({}, [], ())


def test_each_job_has_its_own_promise_and_the_partitions_without_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path, trains=1, guess=HEAVY)
    bench.admit(1)
    (refused,) = bench.placer.admit(bench.job(2), ["tiny"])
    assert refused.kind is ObstacleKind.PROMISE
    assert "1.10 was promised" in refused.sentence
    lax = Bench(tmp_path, trains=1, guess=HEAVY, max_slowdown=2.0)
    lax.admit(1)
    lax.admit(2)
    *_, refused = lax.placer.admit(lax.job(3, 1.01), ["tiny"])
    assert "it would run" in refused.sentence
    assert "1.01 was promised" in refused.sentence


def test_a_job_s_weight_counts_when_promises_are_predicted(tmp_path: Path) -> None:
    def second(weight: int, promise: float) -> Any:
        bench = Bench(tmp_path, trains=1, guess=HEAVY, max_slowdown=4.0)
        bench.state.jobs[JobId(1)] = first = replace(bench.job(1), priority=weight)
        assert bench.placer.admit(first, ["tiny"]) == ()
        return bench.placer.admit(bench.job(2, promise), ["tiny"])

    needs = next(promise / 100 for promise in range(100, 300) if not second(1, promise / 100))
    (refused,) = second(50, needs)
    assert refused.kind is ObstacleKind.PROMISE
    assert "it would run" in refused.sentence


def test_would_place_answers_for_when_jobs_have_ended_and_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, trains=1, guess=HEAVY)
    first = bench.admit(1)
    before = dict(first.homes)
    waits = bench.job(2)
    assert not isinstance(bench.placer.would_place(waits, ["tiny"]), Placement)
    later = bench.placer.would_place(waits, ["tiny"], ended=[first.id])
    assert isinstance(later, Placement)
    assert later.homes[Pool.TRAIN] == "train-0"
    assert (waits.homes, waits.declared, first.homes) == ({}, [], before)
    assert set(bench.state.jobs) == {first.id}
    with pytest.raises(UnknownModel):
        bench.placer.would_place(waits, ["huge"])


def test_a_job_that_said_nothing_goes_where_it_disturbs_least(tmp_path: Path) -> None:
    bench = Bench(tmp_path, guess=HEAVY)
    for number, home in ((1, "train-0"), (2, "train-1")):
        assert bench.admit(number).homes[Pool.TRAIN] == home
    silent = bench.job(3)
    assert bench.placer.admit(silent, []) == ()
    bench.state.jobs[silent.id] = silent
    # Declared, it would have to wait; its call cannot.
    assert not isinstance(bench.placer.would_place(bench.job(4), ["tiny"]), Placement)
    assert bench.placer.home(silent, Pool.TRAIN, TINY) == "train-0"
    assert bench.placer.home(silent, Pool.TRAIN, TINY) == "train-0"
    # What it has made counts from then on.
    bench.state.deployments.update((live.id, live) for live in [deployment(silent, "train-0")])
    (there,) = [s for s in bench.placer.partition().settled if s.who.job == silent.id]
    assert there.who.train_images == (TINY.train_bytes,)


def test_where_jobs_share_nothing_neither_does_one_that_said_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, trains=1, placement="isolated")
    bench.admit(1)
    with pytest.raises(BadInput, match="no train WPG is free"):
        bench.placer.home(bench.job(2), Pool.TRAIN, TINY)


def test_a_job_whose_wpg_goes_gets_another_though_a_promise_breaks(tmp_path: Path) -> None:
    bench = Bench(tmp_path, guess=HEAVY)
    first, second = bench.admit(1), bench.admit(2)
    assert (first.homes[Pool.TRAIN], second.homes[Pool.TRAIN]) == ("train-0", "train-1")
    bench.placer.draining.add(WpgId("train-0"))
    assert bench.placer.rehome(first, Pool.TRAIN) == "train-1"
    bench.placer.draining.add(WpgId("train-1"))
    assert bench.placer.rehome(first, Pool.TRAIN) is None


def test_what_was_decided_is_noted_with_what_it_was_decided_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path, trains=1, guess=HEAVY)
    bench.admit(1)
    waits = bench.job(2)
    found = bench.placer.admit(waits, ["tiny"])
    bench.state.obstacles[waits.id] = found
    bench.placer.admit(waits, ["tiny"])  # the same again is no news
    bench.placer.would_place(waits, ["tiny"])
    bench.placer.admit(bench.job(3), [])  # has nothing to decide
    assert len(bench.noted) == 2
    ground = Ground(Reservation())
    for news, wish, answer in bench.noted:
        ground.hear(news)
        assert ground.answer(wish) == answer


def test_who_has_to_have_a_place_and_finds_none_is_noted_once_for_each_reason(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, trains=1, placement="isolated")
    first, second = bench.admit(1), bench.job(2)
    bench.state.jobs[second.id] = second
    bench.placer.draining.add(WpgId("train-0"))
    for _ in range(3):
        assert bench.placer.rehome(first, Pool.TRAIN) is None
        with pytest.raises(BadInput):
            bench.placer.home(second, Pool.TRAIN, TINY)
    bench.placer.draining.clear()
    with pytest.raises(BadInput):  # the first one is there
        bench.placer.home(second, Pool.TRAIN, TINY)
    assert bench.placer.rehome(first, Pool.TRAIN) == "train-0"
    whose = [wish.who.job for _, wish, _ in bench.noted]
    assert whose == [first.id, first.id, second.id, second.id, first.id]
    ground = Ground(Reservation())
    for news, wish, answer in bench.noted:
        ground.hear(news)
        assert ground.answer(wish) == answer


def test_of_a_job_that_is_as_it_was_only_its_expected_end_is_news(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    placer = bench.placer
    one, two = bench.admit(1), bench.admit(2)
    ground, ends = Ground(Reservation()), {one.id: 10**12, two.id: 10**12}
    placer.ends_of = lambda job: ends.get(job.id)

    def told() -> News:
        placer.partition()
        news = placer.residents.news()
        ground.hear(news)
        assert list(ground.whole.settled) == list(placer.partition().settled)
        assert ground.whole.members == placer.partition().members
        return news

    for news, _, _ in bench.noted:
        ground.hear(news)
    assert [each.who.job for each in told().settled] == [two.id]
    ends[one.id] += 10**9
    news = told()
    assert (news.settled, news.ends) == ((), ((one.id, ends[one.id]),))
    # Whoever is otherwise too is told of as a whole, with the end that was expected last.
    two.reserved = True
    placer.partition()
    ends[one.id], ends[two.id] = 7, 8
    news = told()
    assert [each.who.ends_us for each in news.settled] == [8]
    assert news.ends == ((one.id, 7),)
    ends[one.id] = 9
    placer.partition()
    del bench.state.jobs[one.id]
    news = told()
    assert (news.left, news.settled, news.ends) == ((one.id,), (), ())
    assert not told()


def deployment(job: LiveJob, wpg: str) -> LiveDeployment:
    return LiveDeployment(
        id=DeploymentId(f"d{job.id}"), job=job.id, session="s", model="tiny", rank=0,
        wpg=WpgId(wpg), user_metadata={}, last_used_us=0,
    )  # fmt: skip

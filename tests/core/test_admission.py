"""Placing a job: promises in both pools, memory per node, and every obstacle."""

from dataclasses import replace

import pytest

from plexrl_slurm.core.admission import Placement, place
from plexrl_slurm.core.errors import InvalidTransition, ModelTooLarge
from plexrl_slurm.core.grouping import Placement as Way
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind, lasting
from plexrl_slurm.core.predict import Profile
from plexrl_slurm.core.profiles import Guess, Habits
from plexrl_slurm.core.sites import Applicant, Partition, Settled, Site
from plexrl_slurm.core.states import ENDED, STEPS, JobState, check_step

GIB = 2**30
S = 1_000_000
FIT, SPREAD, PACK, ALONE = (
    Rules(placement=each) for each in (Way.FIT, Way.SPREAD, Way.PACK, Way.ISOLATED)
)


def site(
    name: str, pool: Pool = Pool.TRAIN, *, device: int = 4 * GIB, host: int = 16 * GIB,
    nodes: tuple[str, ...] = (), gpus: int = 1, draining: bool = False,
) -> Site:  # fmt: skip
    return Site(
        wpg=Wpg(id=WpgId(name), pool=pool, gpus=gpus), device_bytes=device, host_bytes=host,
        nodes=nodes, draining=draining,
    )  # fmt: skip


SITES = [site("train-0"), site("train-1"), site("rollout-0", Pool.ROLLOUT)]


def uses(train: int = 10, sample: int = 10, step: int = 100) -> Habits:
    """Seconds of a step."""

    def profile(phase: int) -> Profile:
        return Profile(
            step_us=step * S, phase_us=phase * S, function_us=phase * S, switch_us=S // 10,
            overlaps=False,
        )  # fmt: skip

    return Habits(train=profile(train), rollout=profile(sample))


def job(
    number: int, habits: Habits | None = None, *, promise: float = 1.1, image: int = GIB,
    ends_us: int | None = None, models: int = 1,
) -> Applicant:  # fmt: skip
    return Applicant(
        job=JobId(number), label=f"job {number} (ada)", models=("tiny",) * models,
        train_images=(image,) * models, rollout_images=(image // 4,) * models,
        habits={1: habits or uses()}, max_slowdown=promise, ends_us=ends_us,
    )  # fmt: skip


def at(who: Applicant, train: str, rollout: str = "rollout-0") -> Settled:
    return Settled(who=who, homes={Pool.TRAIN: WpgId(train), Pool.ROLLOUT: WpgId(rollout)})


def homes(found: Placement | tuple[Obstacle, ...]) -> tuple[str, str]:
    assert isinstance(found, Placement), found
    return found.homes[Pool.TRAIN], found.homes[Pool.ROLLOUT]


def ask(
    who: Applicant, *settled: Settled, sites: list[Site] | None = None, rules: Rules = FIT
) -> Placement | tuple[Obstacle, ...]:
    return place(who, Partition(sites=sites or SITES, settled=settled), rules)


class TestWhere:
    def test_an_empty_partition_gives_the_lowest_ids(self) -> None:
        assert homes(ask(job(1))) == ("train-0", "rollout-0")

    def test_fit_and_pack_join_the_fullest_and_spread_and_isolated_stay_alone(self) -> None:
        first = at(job(1), "train-1")
        assert homes(ask(job(2), first))[0] == "train-1"
        assert homes(ask(job(2), first, rules=PACK))[0] == "train-1"
        assert homes(ask(job(2), first, rules=SPREAD))[0] == "train-0"
        two = [*SITES, site("rollout-1", Pool.ROLLOUT)]
        assert homes(ask(job(2), first, sites=two, rules=ALONE)) == ("train-0", "rollout-1")

    def test_the_rollout_wpg_that_samples_least_is_taken(self) -> None:
        sites = [*SITES, site("rollout-1", Pool.ROLLOUT)]
        busy = at(job(1, uses(sample=60)), "train-0", "rollout-1")
        calm = at(job(2, uses(sample=5)), "train-0", "rollout-0")
        assert homes(ask(job(3, promise=9.0), busy, calm, sites=sites))[1] == "rollout-0"

    def test_fit_goes_elsewhere_rather_than_break_a_promise(self) -> None:
        heavy = at(job(1, uses(train=60)), "train-0")
        assert homes(ask(job(2, uses(train=30)), heavy))[0] == "train-1"

    def test_what_a_job_loses_on_its_rollout_wpg_is_left_no_more_for_its_training_wpg(self) -> None:
        mate, wish = job(1, uses(train=30, sample=30)), job(2, uses(train=30, sample=30))
        one = [SITES[0], SITES[2]]
        apart = [*one, site("rollout-1", Pool.ROLLOUT)]
        assert homes(ask(wish, at(mate, "train-0"), sites=apart)) == ("train-0", "rollout-1")
        (refused,) = _refused(ask(wish, at(mate, "train-0"), sites=one))
        assert (refused.kind, refused.pool) == (ObstacleKind.PROMISE, Pool.TRAIN)

    def test_the_smallest_wpg_that_can_hold_it_is_taken_first(self) -> None:
        sites = [site("train-0", gpus=8), site("train-1", gpus=2), SITES[2]]
        assert homes(ask(job(1), sites=sites))[0] == "train-1"
        large = [replace(sites[0], device_bytes=64 * GIB), sites[1], SITES[2]]
        assert homes(ask(job(1, image=6 * GIB), sites=large))[0] == "train-0"

    def test_nothing_is_placed_on_what_is_given_back(self) -> None:
        sites = [site("train-0", draining=True), *SITES[1:]]
        assert homes(ask(job(1), sites=sites))[0] == "train-1"


class TestMemory:
    def test_wpgs_of_one_node_share_its_host_memory(self) -> None:
        sites = [
            site("train-0", nodes=("n1",), host=4 * GIB),
            site("train-1", nodes=("n1",), host=4 * GIB),
            SITES[2],
        ]
        first = at(job(1), "train-0")  # with its spare slab 2 GiB of 4
        assert homes(ask(job(2), first, sites=sites))[0] == "train-0"
        second = at(job(2), "train-1")
        found = _refused(ask(job(3), first, second, sites=sites))
        assert [each.kind for each in found] == [ObstacleKind.HOST_MEMORY]
        assert found[0].free_bytes == 2 * GIB

    def test_a_wpg_of_two_nodes_keeps_half_of_each_image_on_either(self) -> None:
        wide = site("train-0", nodes=("n1", "n2"), host=4 * GIB, device=64 * GIB, gpus=2)
        mates = [at(job(number, image=2 * GIB), "train-0") for number in (1, 2)]
        assert homes(ask(job(3, image=2 * GIB), *mates, sites=[wide, SITES[2]]))[0] == "train-0"
        third = at(job(3, image=2 * GIB), "train-0")
        (refused,) = _refused(ask(job(4, image=2 * GIB), *mates, third, sites=[wide, SITES[2]]))
        assert (
            refused.sentence
            == "2 nodes x 4.00 GiB of host memory hold 3 states of tiny on train-0; 3 are placed"
        )

    def test_a_tier_below_takes_whole_images_and_memory_still_needs_room_for_two(self) -> None:
        small = replace(site("train-0", host=3 * GIB), nvme_bytes=5 * GIB + GIB // 2)
        sites, many = [small, SITES[2]], Rules(placement=Way.PACK, most=20)
        six = [at(job(number), "train-0") for number in range(1, 7)]
        assert homes(ask(job(8), *six, sites=sites, rules=many))[0] == "train-0"
        (refused,) = _refused(ask(job(8), *six, at(job(7), "train-0"), sites=sites, rules=many))
        assert refused.kind is ObstacleKind.NVME
        with pytest.raises(ModelTooLarge):
            ask(job(1), sites=[replace(small, host_bytes=2 * GIB - 100), SITES[2]])

    def test_a_job_with_two_models_needs_room_for_both_in_one_place(self) -> None:
        sites = [site("train-0", host=2 * GIB), site("train-1", host=3 * GIB), SITES[2]]
        assert homes(ask(job(1, models=2), sites=sites))[0] == "train-1"

    def test_a_model_that_no_wpg_can_ever_hold_is_refused(self) -> None:
        small = [site("train-0", device=GIB // 2), site("train-1", host=GIB), SITES[2]]
        with pytest.raises(ModelTooLarge, match=r"needs 1\.00 GiB on a train WPG; the largest"):
            ask(job(1), sites=small)


class TestObstacles:
    def test_every_kind_is_told_once_and_the_nearest_first(self) -> None:
        sites = [
            site("train-0", device=GIB // 2),
            site("train-1", host=3 * GIB),
            site("train-2"),
            SITES[2],
        ]
        settled = [
            at(job(1), "train-1"),
            at(job(2), "train-1"),
            at(job(3, uses(train=80), ends_us=7_300 * S), "train-2"),
        ]
        found = _refused(ask(job(4, uses(train=40)), *settled, sites=sites))
        assert [(each.kind, each.wpg) for each in found] == [
            (ObstacleKind.PROMISE, "train-2"),
            (ObstacleKind.HOST_MEMORY, "train-1"),
            (ObstacleKind.DEVICE_MEMORY, "train-0"),
        ]
        assert found[0].word == "Promise"
        assert found[0].told(100 * S).endswith("the first is expected to end in 2 h 0 min")
        assert (
            "1 node x 3.00 GiB of host memory hold 2 states of tiny on train-1; 2 are placed"
            in found[1].told(0)
        )
        needs = "model tiny needs 1.00 GiB of device memory on train-0, which has 0.50 GiB"
        assert found[2].sentence == needs

    def test_a_promise_names_whose_it_is(self) -> None:
        sites = [SITES[0], SITES[2], site("rollout-1", Pool.ROLLOUT)]
        proud = at(job(1, uses(train=30), promise=1.0), "train-0")
        (refused,) = _refused(ask(job(2), proud, sites=sites))
        assert refused.job == 1
        assert "on train-0 job 1 (ada) would run" in refused.sentence
        assert "and 1.00 was promised" in refused.sentence

    def test_a_full_wpg_says_how_many_it_has(self) -> None:
        rules = Rules(placement=Way.PACK, most=2)
        two = [at(job(number), "train-0") for number in (1, 2)]
        (refused,) = _refused(ask(job(3), *two, sites=[SITES[0], SITES[2]], rules=rules))
        assert refused.kind is ObstacleKind.TRAIN_GPUS
        assert refused.sentence == "train-0 has 2 jobs, and 2 is the most"

    def test_isolated_jobs_wait_for_both_pools_and_both_are_told(self) -> None:
        one = at(job(1), "train-0")
        found = _refused(ask(job(2), one, sites=[SITES[0], SITES[2]], rules=ALONE))
        assert {each.kind for each in found} == {
            ObstacleKind.TRAIN_GPUS, ObstacleKind.ROLLOUT_GPUS,
        }  # fmt: skip
        assert {each.word for each in found} == {"Resources"}

    def test_a_pool_without_a_wpg_and_one_that_is_given_back_differ(self) -> None:
        none = _refused(ask(job(1), sites=SITES[:1]))
        assert [each.kind for each in none] == [ObstacleKind.NO_WPG]
        leaving = _refused(ask(job(1), sites=[site("train-0", draining=True), SITES[2]]))
        assert [(each.kind, each.word) for each in leaving] == [
            (ObstacleKind.DRAINING, "Draining")
        ]  # fmt: skip

    def test_a_job_that_may_not_come_changes_nothing(self) -> None:
        partition = Partition(sites=SITES, settled=[at(job(1, uses(train=90)), "train-0")])
        before = {wpg: list(members) for wpg, members in partition.members.items()}
        place(job(2, uses(sample=95)), partition, FIT)
        assert partition.members == before


def _refused(found: Placement | tuple[Obstacle, ...]) -> tuple[Obstacle, ...]:
    assert not isinstance(found, Placement)
    return found


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(-3, "0 s"), (59, "59 s"), (61, "1 min"), (11_400, "3 h 10 min"), (180_000, "2 d 2 h")],
)
def test_how_long_something_lasts(seconds: int, words: str) -> None:
    assert lasting(seconds * S) == words


def test_six_jobs_that_nobody_knows_share_one_wpg_of_each_pool() -> None:
    guess = Guess().habits()
    settled: list[Settled] = []
    for number in range(1, 7):
        assert homes(ask(job(number, guess), *settled, sites=[SITES[0], SITES[2]]))
        settled.append(at(job(number, guess), "train-0"))


def test_a_job_may_take_the_steps_of_the_table_and_no_others() -> None:
    for start in JobState:
        for finish in JobState:
            if (start, finish) in STEPS:
                assert check_step(JobId(1), start, finish) == STEPS[start, finish]
            else:
                with pytest.raises(InvalidTransition, match="job 1"):
                    check_step(JobId(1), start, finish)
    assert not [start for start, _ in STEPS if start in ENDED]


def test_what_a_job_has_lost_is_left_no_more_for_others() -> None:
    there, new = job(1, uses(train=30), promise=1.5), job(2, uses(train=30), promise=2.0)
    only = [site("train-0"), *SITES[2:], site("rollout-1", Pool.ROLLOUT)]
    assert homes(ask(new, at(there, "train-0"), sites=only)) == ("train-0", "rollout-1")
    late = replace(there, allowed=1.02)
    found = ask(new, at(late, "train-0"), sites=only)
    assert not isinstance(found, Placement)
    assert (found[0].kind, found[0].job) == (ObstacleKind.PROMISE, 1)
    assert found[0].sentence.startswith("on train-0 job 1 (ada) would run 1.")
    assert "1.50 was promised, of which 1.02 is left after what it has lost" in found[0].sentence

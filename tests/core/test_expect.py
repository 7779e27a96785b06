"""Who is expected next is said in time, and only when it changes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.ids import CauseId, DeploymentId, WpgId
from plexrl_slurm.core.messages import AnyInstruction, Expect, Pool, Switch
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.scheduler import SchedulerCore
from tests.core.hand import SECOND, Hand, short
from tests.core.harness import MS, World
from tests.core.tiers import CREATE, FB, OPTIM, A, B, calls_of
from tests.core.workloads import ROLLOUT, TRAIN, crowd, train_loop, trained


def both_have_images() -> Hand:
    """b is resident; a has an image."""
    hand = Hand(TRAIN, image_every=1, hints=True)
    hand.place(A, B)
    hand.up()
    hand.work(*calls_of("a", CREATE, FB, OPTIM))
    hand.switched()
    hand.arrive(*calls_of("b", CREATE))
    hand.later(5).end(calls_of("b", CREATE)[0])
    return hand


def test_whoever_waits_while_another_runs_is_expected_and_it_is_said_once() -> None:
    hand = both_have_images()
    fb = calls_of("b", FB, OPTIM, first=1)
    hand.arrive(fb[0])
    said = hand.arrive(*calls_of("a", FB, first=3))
    assert hand.core.plan(hand.now, CauseId("again")) == []
    assert short(said) in ([], ["expect a"])
    assert "expect a" not in short(hand.arrive(fb[1]))


def test_nobody_is_expected_where_nobody_else_has_an_image() -> None:
    hand = Hand(TRAIN, image_every=1, hints=True)
    hand.place(A, B)
    hand.up()
    first, *rest = calls_of("a", CREATE, FB)
    orders = hand.arrive(first, *rest) + hand.arrive(*calls_of("b", CREATE)) + hand.end(first)
    assert not [word for word in short(orders) if word.startswith("expect")]


def test_once_it_is_switched_in_it_is_expected_no_more() -> None:
    hand = both_have_images()
    words = short(hand.later(60).arrive(*calls_of("a", FB, first=3)))
    words += short(hand.switched()) + short(hand.switched())
    assert [word for word in words if word.startswith(("switch", "expect"))][-1] in (
        "expect b",
        "switch nothing -> a",
        "switch b -> a",
    )
    assert "expect a" not in words[words.index(next(w for w in words if "-> a" in w)) :]


def test_a_wpg_that_comes_up_again_is_told_again() -> None:
    hand = both_have_images()
    hand.work(*calls_of("b", FB, OPTIM, first=1))
    hand.switched()
    hand.arrive(*calls_of("b", FB, first=3), *calls_of("a", FB, first=3))
    hand.down()
    words = [word for word in short(hand.up()) if word.startswith(("switch", "expect"))]
    assert words in (
        ["switch nothing -> a", "expect b"],
        ["switch nothing -> b", "expect a"],
    )


def test_a_core_that_is_not_asked_says_nothing() -> None:
    hand = Hand(TRAIN, image_every=1)
    hand.place(A, B)
    hand.up()
    hand.work(*calls_of("a", CREATE, FB, OPTIM))
    words = short(hand.arrive(*calls_of("b", CREATE), *calls_of("a", FB, first=3)))
    assert not [word for word in words if word.startswith("expect")]


class Foreseeing(World):
    """Checks every hint, and notes which switches were foreseen."""

    hints: dict[WpgId, DeploymentId | None]
    foreseen: list[bool]

    def make_core(self) -> SchedulerCore:
        self.hints, self.foreseen = {}, getattr(self, "foreseen", [])
        return SchedulerCore(
            find_policy(self.policy),
            costs=SwitchCosts(),
            hold_us=self.hold_us,
            image_every=self.image_every,
            hints=True,
        )

    def perform(self, order: AnyInstruction) -> None:
        if isinstance(order, Expect):
            self.hints[order.wpg] = name = order.deployment
            if name is not None:
                assert name in self.images, f"{name} has no image to bring"
                assert name not in self.dropped
                assert self.deployments[name].wpg == order.wpg
            return
        if isinstance(order, Switch) and self.deployments[order.incoming].pool is Pool.TRAIN:
            self.foreseen.append(self.hints.get(order.wpg) == order.incoming)
        super().perform(order)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32), deaths=st.sampled_from([0.0, 0.05]))
def test_whatever_happens_only_what_has_an_image_there_is_expected(
    seed: int, deaths: float
) -> None:
    world = Foreseeing(seed, wpgs=(TRAIN, ROLLOUT), deaths=deaths)
    crowd(world, trainers=3, samplers=2, steps=3, trouble=0.05)
    world.after(world.rng.randint(0, 200 * world.unit_us), world.stop_daemon, world.unit_us)
    world.after(200 * world.unit_us, world.drop, trained(1).id)
    world.run()
    world.close()
    assert all(record.finished is not None for record in world.records.values())


def foreseen(*, pause_s: int) -> float:
    """The share of switches of five jobs, whose rests are random, that were foreseen."""
    world = Foreseeing(3, wpgs=(TRAIN,), image_every=1)
    for job in range(1, 6):
        world.after(
            job * SECOND, train_loop, world, trained(job), steps=12, micro=2, gap_us=20 * MS,
            pause_us=pause_s * SECOND,
        )  # fmt: skip
    world.run()
    world.close()
    assert len(world.foreseen) > 30
    return sum(world.foreseen) / len(world.foreseen)


def test_on_a_busy_wpg_most_switches_are_foreseen() -> None:
    assert foreseen(pause_s=2) > 0.7


def test_where_nobody_waits_those_that_come_back_are_foreseen_better_than_by_chance() -> None:
    assert foreseen(pause_s=5) > 0.4, "one in four by chance"

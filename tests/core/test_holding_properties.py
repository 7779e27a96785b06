"""Whatever a little Slurm does to the holds, the promises about them are kept."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.holding import HoldPhase, HoldRules, Renewal
from tests.core.effort import effort, tried
from tests.core.toy_slurm import RULES, SECOND, SLOTS, ToySlurm, Trouble, is_open

FEW = effort(60, costs=20)
SEEDS = st.integers(0, 2**32)
TROUBLES = st.builds(
    Trouble,
    room=st.integers(1, 5),
    refuses_extensions=st.booleans(),
    rejects=st.sampled_from([0.0, 0.3]),
    requeues=st.sampled_from([0.0, 0.01]),
    losses=st.sampled_from([0.0, 0.01]),
    jobs=st.sampled_from([0.0, 0.02, 0.1]),
)
RULE_SETS = st.builds(
    replace,
    st.just(RULES),
    min=st.integers(0, 2),
    max=st.integers(2, 4),
    renewal=st.sampled_from(Renewal),
    idle_release_us=st.sampled_from([0, 30 * SECOND, 200 * SECOND]),
    scale_up_after_us=st.sampled_from([0, 20 * SECOND]),
)


def wait_for(world: ToySlurm, what: Callable[[], bool], *, seconds: int = 2_000) -> None:
    for _ in range(seconds // 4):
        if what():
            return
        world.run(4)
    raise AssertionError([hold.view for hold in world.holds.values()])


@FEW
@given(seed=SEEDS, rules=RULE_SETS, trouble=TROUBLES)
def test_bounds_are_kept_and_after_trouble_everything_finds_its_place(
    seed: int, rules: HoldRules, trouble: Trouble
) -> None:
    world = ToySlurm(seed, rules, trouble)
    world.run(1_600)
    world.be_quiet()
    fits = SLOTS * min(rules.max, trouble.room)
    for number in sorted(world.ends_us)[fits:]:
        world.forget(number)
    for number in world.ends_us:
        world.ends_us[number] = world.now_us + 10_000 * SECOND
    wait_for(world, lambda: not world.waiting and not world.homeless)

    for number in list(world.ends_us):
        world.forget(number)
    least = min(rules.min, trouble.room)
    wait_for(world, lambda: sum(is_open(hold.view) for hold in world.holds.values()) >= least)
    if rules.idle_release_us:
        wait_for(world, lambda: lines(world) == rules.min)
    tried("holds: bounds")


@effort(12, costs=20)
@given(seed=SEEDS, renewal=st.sampled_from(Renewal), refuses=st.booleans(), room=st.integers(1, 3))
def test_one_deployment_lives_through_many_limits_on_any_cluster(
    seed: int, renewal: Renewal, refuses: bool, room: int
) -> None:
    trouble = Trouble(room=room, refuses_extensions=refuses, jobs=0)
    world = ToySlurm(seed, replace(RULES, max=1, renewal=renewal), trouble)
    world.add_job(lives_s=10_000)
    world.run(200)
    away = 0
    for _ in range(600):
        world.run(4)
        away += bool(world.homeless)
    if renewal is not Renewal.REPLACE and not refuses:
        assert away == 0 and world.numbers == 2
    elif room > 1 and renewal is not Renewal.EXTEND:
        # It moves when its new home is ready: away for a moment only.
        assert away <= 10
    assert away <= 150, "away for too long around its renewals"
    tried("holds: one deployment")


def lines(world: ToySlurm) -> int:
    live = {n for n, h in world.holds.items() if h.view.phase is not HoldPhase.ENDING}
    return len(live - {world.holds[name].view.replaces for name in live})

"""Whoever comes and goes: no promise is predicted broken, no memory is given twice."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.admission import Placement, place
from plexrl_slurm.core.errors import ModelTooLarge
from plexrl_slurm.core.grouping import Placement as Way
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.predict import Profile, slowdowns
from plexrl_slurm.core.profiles import Habits
from plexrl_slurm.core.sites import Applicant, Partition, Settled, Site
from tests.core.effort import effort, tried

S, GIB = 1_000_000, 2**30


def profiles(phase: st.SearchStrategy[int]) -> st.SearchStrategy[Profile]:
    return st.builds(
        lambda share, step, switch, overlaps, weight: Profile(
            step_us=step * S,
            phase_us=step * S * share // 100,
            function_us=step * S * share // 200,
            switch_us=switch * S // 100,
            overlaps=overlaps,
            slack_us=step * S * (100 - share) // 200 if overlaps else 0,
            weight=weight,
        ),
        phase,
        st.integers(10, 1000),
        st.integers(0, 500),
        st.booleans(),
        st.sampled_from([1, 1, 8]),
    )


SHARES = st.sampled_from([1, 3, 10, 25, 60])
#: How often two jobs lived on one WPG under ``fit``, and images filled most of a node.
SEEN: Counter[str] = Counter()
APPLICANTS = st.builds(
    lambda train, rollout, promise, image, allowed: Applicant(
        job=JobId(0),
        label="",
        models=("m",),
        train_images=(image * GIB,),
        rollout_images=(image * GIB // 8,),
        habits={1: Habits(train=train, rollout=rollout)},
        max_slowdown=promise,
        allowed=allowed,
    ),
    profiles(SHARES),
    profiles(SHARES),
    st.sampled_from([1.0, 1.05, 1.1, 1.5, 4.0]),
    st.sampled_from([1, 3, 4, 5, 5, 6]),
    # What is left of the promise, after what was lost.
    st.sampled_from([0.0, 0.0, 1.03, 1.2]),
)


@st.composite
def partitions(draw: st.DrawFn) -> list[Site]:
    sites = []
    for pool in Pool:
        for number in range(draw(st.integers(1, 3))):
            nodes = draw(st.sampled_from([("a",), ("b",), ("a", "b")]))
            sites.append(
                Site(
                    wpg=Wpg(
                        id=WpgId(f"{pool}-{number}"), pool=pool, gpus=draw(st.sampled_from([1, 2]))
                    ),
                    device_bytes=8 * GIB,
                    host_bytes=24 * GIB,
                    nvme_bytes=draw(st.sampled_from([0, 10 * GIB])),
                    nodes=nodes,
                )
            )
    return sites


@dataclass
class Town:
    sites: list[Site]
    rules: Rules
    settled: dict[JobId, Settled] = field(default_factory=dict)

    def partition(self) -> Partition:
        return Partition(sites=self.sites, settled=list(self.settled.values()))

    def slow(self, job: Settled) -> float:
        """Of a job in both pools, from nothing but the homes."""
        total = 1.0
        for pool, wpg in job.homes.items():
            gpus = next(site.wpg.gpus for site in self.sites if site.wpg.id == wpg)
            there = [each.who for each in self.settled.values() if each.homes[pool] == wpg]
            found = slowdowns([who.profile(pool, gpus) for who in there])
            total += found[there.index(job.who)] - 1
        return total

    def check_memory(self) -> None:
        """Images lie in a node's memory or on its disk, where all are alike as wholes; in memory
        there is also a spare slab for each training WPG, as large as its largest image."""
        for node in ("a", "b"):
            here = [s for s in self.sites if s.wpg.pool is Pool.TRAIN and node in s.at]
            images, spares = [], 0
            for site in here:
                mine = [
                    -(-image // len(site.at))
                    for each in self.settled.values()
                    if each.homes[Pool.TRAIN] == site.wpg.id
                    for image in each.who.train_images
                ]
                images += mine
                spares += max(mine, default=0)
            if images:
                disk = max(site.nvme_bytes for site in here)
                in_memory = {0}
                for image in images:
                    in_memory |= {others + image for others in in_memory}
                room = 24 * GIB - spares
                best = max((each for each in in_memory if each <= room), default=-1)
                assert sum(images) - room <= disk and room >= 0, f"node {node} has no room"
                if len(set(images)) == 1:
                    assert sum(images) - best <= disk, f"on node {node} an image would be cut"
                SEEN["full"] += sum(images) + spares > 0.7 * (24 * GIB + disk)

    def check_alone(self) -> None:
        for pool in Pool:
            homes = [each.homes[pool] for each in self.settled.values()]
            assert len(homes) == len(set(homes))


@effort(250)
@given(
    sites=partitions(),
    way=st.sampled_from([*Way, Way.FIT, Way.FIT]),
    moves=st.lists(
        st.tuples(APPLICANTS, st.sampled_from([False, False, False, True])),
        min_size=4,
        max_size=16,
    ),
)
def test_at_admission_no_promise_breaks_and_no_memory_is_given_twice(
    sites: list[Site], way: Way, moves: list[tuple[Applicant, bool]]
) -> None:
    town = Town(sites, Rules(placement=way, most=4))
    for number, (who, leaves) in enumerate(moves, 1):
        if leaves and town.settled:
            del town.settled[min(town.settled)]
            continue
        mine = Applicant(
            job=JobId(number),
            label=f"job {number}",
            models=who.models,
            train_images=who.train_images,
            rollout_images=who.rollout_images,
            habits=who.habits,
            max_slowdown=who.max_slowdown,
            allowed=who.allowed,
        )
        before = dict(town.settled)
        try:
            found = place(mine, town.partition(), town.rules)
        except ModelTooLarge:
            assert mine.train_images[0] > 5 * GIB
            continue
        assert town.settled == before
        again = place(mine, town.partition(), town.rules)
        assert again == found
        if not isinstance(found, Placement):
            assert found
            assert all(each.sentence and each.word for each in found)
            continue
        assert set(found.homes) == set(Pool)  # in both pools, or in none
        town.settled[mine.job] = Settled(who=mine, homes=found.homes)
        town.check_memory()
        if way is Way.ISOLATED:
            town.check_alone()
        trains = [each.homes[Pool.TRAIN] for each in town.settled.values()]
        assert max(trains.count(wpg) for wpg in trains) <= town.rules.most
        if way is Way.FIT:
            SEEN["shared"] += max(trains.count(wpg) for wpg in trains) > 1
            for each in town.settled.values():
                slow = town.slow(each)
                assert slow <= each.who.most + 1e-9
                SEEN["close"] += slow - 1 > (each.who.most - 1) / 2 > 0
    tried("admission")


def test_those_jobs_have_shared_wpgs_and_filled_nodes() -> None:
    if not SEEN:
        test_at_admission_no_promise_breaks_and_no_memory_is_given_twice()
    assert SEEN["shared"] > 1 < SEEN["full"], SEEN

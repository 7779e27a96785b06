"""What is kept free is seen by those only that may have it."""

from dataclasses import replace

import pytest

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.profiles import Guess
from plexrl_slurm.core.reservation import Reservation, open_to_all
from plexrl_slurm.core.sites import Applicant, Partition, Settled, Site

GIB = 2**30


def site(name: str, *, nodes: tuple[str, ...] = ()) -> Site:
    pool = Pool.TRAIN if name.startswith("train") else Pool.ROLLOUT
    return Site(
        wpg=Wpg(id=WpgId(name), pool=pool, gpus=1), device_bytes=100 * GIB, host_bytes=100 * GIB,
        nodes=nodes,
    )  # fmt: skip


def settled(job: int, home: str, gib: int) -> Settled:
    who = Applicant(
        job=JobId(job), label=f"job {job}", models=("m",), train_images=(gib * GIB,),
        rollout_images=(GIB,), habits={1: Guess().habits()}, max_slowdown=1.1,
    )  # fmt: skip
    return Settled(who=who, homes={Pool.TRAIN: WpgId(home)})


def seen(
    partition: Partition, *reserved: int, wpgs: int = 0, gib: int = 0
) -> dict[str, tuple[bool, int]]:
    kept = Reservation(wpgs=wpgs, host_bytes=gib * GIB)
    found = open_to_all(partition, kept, {JobId(job) for job in reserved})
    assert found.settled == partition.settled
    return {str(s.wpg.id): (s.draining, s.host_bytes // GIB) for s in found.sites}


def test_the_last_wpgs_of_each_pool_are_kept() -> None:
    sites = [site(f"train-{n}") for n in (9, 10, 8)] + [site("rollout-0"), site("rollout-1")]
    found = seen(Partition(sites=sites, settled=[]), wpgs=1)
    assert [name for name, (closed, _) in found.items() if closed] == ["train-10", "rollout-1"]


def test_memory_is_kept_as_far_as_reserved_jobs_do_not_have_it_already() -> None:
    sites = [site("train-0"), site("train-1"), site("rollout-0")]
    there = [settled(1, "train-0", 10), settled(2, "train-1", 50), settled(3, "train-0", 7)]
    found = seen(Partition(sites=sites, settled=there), 1, 2, gib=30)
    assert found == {"train-0": (False, 80), "train-1": (False, 100), "rollout-0": (False, 100)}


def test_wpgs_of_one_node_share_what_is_kept_there() -> None:
    sites = [site("train-0", nodes=("n1",)), site("train-1", nodes=("n1", "n2"))]
    found = seen(Partition(sites=sites, settled=[settled(1, "train-0", 10)]), 1, gib=30)
    assert found == {"train-0": (False, 80), "train-1": (False, 70)}


@pytest.mark.parametrize("wpgs", [0, 5])
def test_never_all_wpgs_of_a_pool_are_kept(wpgs: int) -> None:
    """Holds may have fewer than the settings say: they lost nodes, or are of other settings."""
    found = seen(Partition(sites=[site("train-0")], settled=[]), wpgs=wpgs)
    assert found == {"train-0": (False, 100)}
    found = seen(Partition(sites=[site("train-0"), site("train-1")], settled=[]), wpgs=wpgs)
    assert found == {"train-0": (False, 100), "train-1": (wpgs > 0, 100)}
    assert Reservation(wpgs=wpgs).any is (wpgs > 0)


def test_what_is_kept_stays_kept_while_another_wpg_drains() -> None:
    sites = [replace(site("train-0"), draining=True), site("train-1")]
    found = seen(Partition(sites=sites, settled=[]), wpgs=1)
    assert found == {"train-0": (True, 100), "train-1": (True, 100)}

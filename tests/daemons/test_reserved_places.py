"""What is kept free in a partition of WPGs, and when its jobs are expected to start."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.expected_start import Candidate, Unknown, expected_starts
from plexrl_slurm.core.ids import JobId, SlurmId, WpgId
from plexrl_slurm.core.limits import LimitRules, Limits, Subject, Tally
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.turns import TurnRules
from plexrl_slurm.daemons.dry_run import DryRun
from plexrl_slurm.daemons.layout import Place, Room, lay_out, wpg_slots
from plexrl_slurm.daemons.placement import Placer
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.queue_settings import QueueSettings
from plexrl_slurm.settings import WpgSettings
from plexrl_slurm.sharing_settings import SharingSettings
from tests.daemons.holds_bench import TINY, settings_in

WPGS = tuple(
    WpgSettings(pool=pool, engine=engine, count=2)
    for pool, engine in (("train", "fake_train"), ("rollout", "fake_sample"))
)
KEPT = Reservation(wpgs=1)


def placer_in(folder: Path, reservation: Reservation) -> Placer:
    settings = replace(
        settings_in(folder),
        wpgs=WPGS,
        host_bytes=100 * TINY.train_bytes,
        sharing=SharingSettings(placement="isolated"),
        queue=QueueSettings(reservation=reservation),
    )
    placer = Placer(State(), settings)
    rooms = [
        Room(place=Place(hold="h1", component=0, node="n1"), pool=pool, gpus=2) for pool in Pool
    ]
    for held in lay_out(wpg_slots(settings), rooms, taken=()):
        placer.wpgs[held.id] = held
    return placer


def job(placer: Placer, number: int, *, reserved: bool = False) -> LiveJob:
    return LiveJob(
        id=JobId(number), uid=1, user="ada", name="j", seed=0, priority=1,
        slurm_id=SlurmId(str(number)), running=False, reserved=reserved,
    )  # fmt: skip


def admit(placer: Placer, number: int, *, reserved: bool = False) -> str:
    """Its training WPG, or the word for what is in its way."""
    live = job(placer, number, reserved=reserved)
    if found := placer.admit(live, ["tiny"]):
        return found[0].word
    placer._state.jobs[live.id] = live
    return live.homes[Pool.TRAIN]


def test_the_last_wpg_is_kept_for_a_reserved_job(tmp_path: Path) -> None:
    placer = placer_in(tmp_path, KEPT)
    assert admit(placer, 1) == "train-0"
    assert admit(placer, 2) == "Reservation"
    with pytest.raises(BadInput):
        placer.home(job(placer, 3), Pool.TRAIN, TINY)
    assert admit(placer, 4, reserved=True) == "train-1"
    assert admit(placer, 5, reserved=True) == "Resources"
    assert admit(placer, 2) == "Resources"
    assert {site.draining for site in placer.open_partition().sites} == {True, False}


def test_without_a_reservation_everybody_may_have_it(tmp_path: Path) -> None:
    placer = placer_in(tmp_path, Reservation())
    assert [admit(placer, number) for number in (1, 2)] == ["train-0", "train-1"]
    assert placer.open_partition().sites == placer.partition().sites


def expected(
    placer: Placer, waiting: Sequence[int], ends_us: dict[int, int | None], *,
    reserved: frozenset[int] = frozenset(), kept: Reservation = KEPT, limits: Limits | None = None,
) -> dict[int, int | Unknown | None]:  # fmt: skip
    numbers = [*waiting, *ends_us]
    subjects = {
        JobId(n): Subject(job=JobId(n), user="ada", account="a", qos="normal") for n in numbers
    }
    tally = Tally(LimitRules(users=limits or Limits()))
    for number in ends_us:
        tally.enter(subjects[JobId(number)])
    room = DryRun(
        placer.partition(),
        placer.rules,
        applicants={JobId(n): placer.applicant(job(placer, n), ["tiny"]) for n in waiting},
        subjects=subjects,
        tally=tally,
        reservation=kept,
        reserved=frozenset(JobId(n) for n in reserved),
    )
    found = expected_starts(
        [
            Candidate(
                job=JobId(n), since_us=n, shape=n in reserved, length_us=100, reserved=n in reserved
            )
            for n in waiting
        ],
        ends_us={JobId(n): end for n, end in ends_us.items()},
        now_us=10,
        rules=TurnRules(),
        priority=lambda _job, _at: 0.0,
        room=room,
    )
    return {n: each.at_us if each.at_us is not None else each.unknown for n, each in found.items()}


def test_expected_starts_see_what_is_kept_free_and_what_is_limited(tmp_path: Path) -> None:
    placer = placer_in(tmp_path, KEPT)
    assert admit(placer, 1) == "train-0"
    found = expected(placer, [2, 3, 4], {1: 50}, reserved=frozenset({4}))
    assert found == {2: 50, 3: 150, 4: 10}
    assert expected(placer, [2], {1: None}) == {2: Unknown.ENDS}
    free = expected(placer, [2, 3], {1: 50}, kept=Reservation())
    assert free == {2: 10, 3: 50}
    one = Limits(max_jobs=1)
    assert expected(placer, [2, 3], {1: 50}, kept=Reservation(), limits=one) == {2: 50, 3: 150}
    # It was a dry run.
    assert list(placer._state.jobs) == [JobId(1)]
    assert placer._state.jobs[JobId(1)].homes[Pool.TRAIN] == WpgId("train-0")

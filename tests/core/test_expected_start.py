"""When jobs are expected to start, and when nobody can tell."""

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.expected_start import (
    Candidate,
    Entry,
    Expected,
    Unknown,
    expected_starts,
)
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.turns import TurnRules

RULES = TurnRules(guard_us=10**12)


class Counted:
    """Room for so many jobs, and some that a limit keeps out."""

    def __init__(self, slots: int, inside: int = 0, kept_out: frozenset[int] = frozenset()) -> None:
        self.free, self.kept_out = slots - inside, kept_out

    def holds(self, job: JobId) -> bool:
        return job in self.kept_out

    def enter(self, job: JobId, *, alone: bool) -> Entry:
        if self.free <= 0:
            return Entry.NONE
        self.free -= 1
        return Entry.PLACED

    def leave(self, job: JobId) -> None:
        self.free += 1


def wait(job: int, length_us: int | None = 100, **more: bool) -> Candidate:
    return Candidate(job=JobId(job), since_us=job, shape="one", length_us=length_us, **more)


def starts(
    *waiting: Candidate, ends: Mapping[int, int | None], slots: int, now_us: int = 50,
    priority: Mapping[int, float] | None = None, kept_out: frozenset[int] = frozenset(),
    rules: TurnRules = RULES,
) -> dict[int, Expected]:  # fmt: skip
    urgent = priority or {}
    found = expected_starts(
        waiting,
        ends_us={JobId(job): end for job, end in ends.items()},
        now_us=now_us,
        rules=rules,
        priority=lambda job, at_us: urgent.get(job, 0.0),
        room=Counted(slots, len(ends), kept_out),
    )
    return {int(job): each for job, each in found.items()}


def test_each_starts_when_one_before_it_ends() -> None:
    found = starts(wait(3), wait(4), wait(5), ends={1: 100, 2: 300}, slots=2)
    assert {job: each.at_us for job, each in found.items()} == {3: 100, 4: 200, 5: 300}


def test_the_more_urgent_one_is_expected_first() -> None:
    found = starts(wait(3), wait(4), ends={1: 100}, slots=1, priority={4: 9.0})
    assert {job: each.at_us for job, each in found.items()} == {4: 100, 3: 200}


def test_nobody_knows_a_start_behind_an_end_that_nobody_knows() -> None:
    assert starts(wait(3), ends={1: None}, slots=1)[3] == Expected(at_us=None, unknown=Unknown.ENDS)
    found = starts(wait(3, None), wait(4), ends={1: 100}, slots=1)
    assert found == {3: Expected(at_us=100), 4: Expected(at_us=None, unknown=Unknown.ENDS)}


def test_an_end_that_is_overdue_is_expected_now() -> None:
    assert starts(wait(3), ends={1: 10}, slots=1)[3].at_us == 50


def test_what_never_fits_and_what_is_held_have_no_instant() -> None:
    assert starts(wait(3), ends={}, slots=0)[3].unknown is Unknown.NO_PLACE
    assert starts(wait(3, held=True), ends={1: 70}, slots=1)[3].unknown is Unknown.HELD
    found = starts(wait(3), wait(4), ends={1: 70}, slots=1, kept_out=frozenset({3}))
    assert found[3].unknown is Unknown.HELD
    assert found[4].at_us == 70


def test_without_backfill_the_first_one_stands_before_all() -> None:
    class Picky(Counted):
        def enter(self, job: JobId, *, alone: bool) -> Entry:
            return Entry.NONE if job == 3 else super().enter(job, alone=alone)

    rules = TurnRules(backfill=False)
    none = expected_starts(
        [wait(3), wait(4)], ends_us={}, now_us=0, rules=rules,
        priority=lambda job, at_us: 0.0, room=Picky(5),
    )  # fmt: skip
    assert {each.unknown for each in none.values()} == {Unknown.NO_PLACE}


@given(
    st.lists(st.none() | st.integers(1, 1000), max_size=12),
    st.lists(st.none() | st.integers(0, 1000), min_size=1, max_size=4),
)
def test_never_more_run_at_once_than_there_is_room_for(
    lengths: list[int | None], running: list[int | None]
) -> None:
    waiting = [wait(100 + index, length) for index, length in enumerate(lengths)]
    slots, now = len(running), 50
    found = starts(*waiting, ends=dict(enumerate(running)), slots=slots, now_us=now)
    assert set(found) == {each.job for each in waiting}
    spans = [(now, None if end is None else max(end, now)) for end in running]
    for each in waiting:
        at = found[each.job].at_us
        if at is not None:
            assert at >= now
            spans.append((at, None if each.length_us is None else at + each.length_us))
    for begin, _ in spans:
        together = sum(lo <= begin and (hi is None or begin < hi) for lo, hi in spans)
        assert together <= slots
    if None not in running and None not in lengths:
        assert all(each.at_us is not None for each in found.values())


class Said:
    """Each job is told what there is for it, and once more if it asks again."""

    def __init__(self, **entries: Entry) -> None:
        self.entries = {int(job[1:]): entry for job, entry in entries.items()}
        self.asked: list[tuple[int, bool]] = []

    def holds(self, job: JobId) -> bool:
        return False

    def enter(self, job: JobId, *, alone: bool) -> Entry:
        self.asked.append((job, alone))
        entry = self.entries[job]
        return Entry.PLACED if entry is Entry.LATER and alone else entry

    def leave(self, job: JobId) -> None:
        raise AssertionError("nobody ends")


def along(room: Said, *waiting: Candidate, rules: TurnRules, joins_first: bool = False) -> set[int]:
    """Who starts at once."""
    found = expected_starts(
        waiting, ends_us={}, now_us=0, rules=rules, priority=lambda job, at_us: 0.0, room=room,
        joins_first=joins_first,
    )  # fmt: skip
    return {int(job) for job, each in found.items() if each.at_us == 0}


def apart(job: int, *, reserved: bool = False) -> Candidate:
    return Candidate(job=JobId(job), since_us=job, shape=job, length_us=None, reserved=reserved)


def test_whoever_may_have_what_is_kept_free_passes_one_that_nobody_else_passes() -> None:
    strict = TurnRules(backfill=False)
    room = Said(j1=Entry.NONE, j2=Entry.PLACED, j3=Entry.PLACED)
    assert along(room, apart(1), apart(2), apart(3, reserved=True), rules=strict) == {3}


def test_nobody_waits_behind_one_that_only_the_reservation_keeps_out() -> None:
    strict = TurnRules(backfill=False)
    room = Said(j1=Entry.KEPT, j2=Entry.PLACED)
    assert along(room, apart(1), apart(2), rules=strict) == {2}


def test_whoever_takes_an_empty_wpg_comes_after_all_that_join_others() -> None:
    room = Said(j1=Entry.LATER, j2=Entry.PLACED)
    assert along(room, apart(1), apart(2), rules=RULES, joins_first=True) == {1, 2}
    assert room.asked == [(1, False), (2, False), (1, True)]
    overdue = Said(j1=Entry.LATER, j2=Entry.PLACED)
    late = [replace(each, since_us=-each.job) for each in (apart(1), apart(2))]
    assert along(overdue, *late, rules=TurnRules(guard_us=1), joins_first=True) == {1, 2}
    assert overdue.asked == [(2, True), (1, True)]


def test_the_next_pass_looks_at_those_that_were_too_far_back() -> None:
    room = Said(**{f"j{number}": Entry.PLACED for number in range(1, 8)})
    waiting = [apart(number) for number in range(1, 8)]
    assert along(room, *waiting, rules=TurnRules(depth=2)) == set(range(1, 8))

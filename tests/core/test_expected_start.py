"""When jobs are expected to start, and when nobody can tell."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from plexrl_slurm.core.expected_start import Candidate, Expected, Unknown, expected_starts
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.turns import TurnRules

RULES = TurnRules(guard_us=10**12)


class Counted:
    """Room for so many jobs, and some that a limit keeps out."""

    def __init__(self, slots: int, inside: int = 0, kept_out: frozenset[int] = frozenset()) -> None:
        self.free, self.kept_out = slots - inside, kept_out

    def holds(self, job: JobId) -> bool:
        return job in self.kept_out

    def enter(self, job: JobId) -> bool:
        if self.free <= 0:
            return False
        self.free -= 1
        return True

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
        def enter(self, job: JobId) -> bool:
            return job != 3 and super().enter(job)

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

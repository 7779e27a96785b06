"""Time that is never set back."""

import pytest

from plexrl_slurm.clock import Steady, now_us, steady_us

S = 1_000_000
HOUR = 3600 * S


class Clocks:
    """One that can be set, and one that cannot."""

    def __init__(self) -> None:
        self.wall, self.running = 1_000 * HOUR, 5 * S
        self.steady = Steady(lambda: self.wall, lambda: self.running)

    def after(self, us: int, *, step: int = 0) -> int:
        self.wall += us + step
        self.running += us
        return self.steady()


def test_it_is_the_clock_while_that_goes_on() -> None:
    clocks = Clocks()
    assert clocks.after(S) == clocks.wall
    assert clocks.after(S, step=HOUR) == clocks.wall, "set forward: at once"
    assert abs(steady_us() - now_us()) < 60 * S


def test_it_goes_on_from_where_it_was_when_the_clock_is_set_back() -> None:
    clocks = Clocks()
    before = clocks.after(S)
    assert clocks.after(0, step=-HOUR) == before
    assert clocks.after(16 * S) == before + 15 * S
    for _ in range(15):
        clocks.after(HOUR)
    assert clocks.steady() > clocks.wall
    clocks.after(2 * HOUR)
    assert clocks.steady() == clocks.wall, "the clock has caught up"


@pytest.mark.parametrize("step", [-1, -24, -S, -HOUR, HOUR])
def test_it_never_goes_back(step: int) -> None:
    clocks = Clocks()
    last = clocks.steady()
    for number in range(1000):
        now = clocks.after(number * 997 % 5000, step=step if number % 50 == 7 else 0)
        assert now >= last
        last = now

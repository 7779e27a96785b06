"""Steps of a machine, several out of one draw.

Hypothesis takes longer for a draw than the core for a fact: a machine with a rule for each action
spends most of a night on choosing rules and drawing arguments. One whose only rule throws dice for
``BURST`` steps tries the same in a third of the time. It still shrinks: to fewer bursts, to steps
that are left out, and to the first option of each choice.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from hypothesis import note
from hypothesis import strategies as st

_Option = TypeVar("_Option")
_Method = TypeVar("_Method", bound=Callable[..., Any])

BURST: Final = 5
#: Bytes that one step may use up.
_EACH: Final = 4


class Dice:
    """Draws that were made already."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Dice({self.number})"

    def to(self, most: int) -> int:
        """From 0 to ``most``, each as often: there are far fewer ways than numbers."""
        self.number, at = divmod(self.number, most + 1)
        return at

    def of(self, options: Sequence[_Option]) -> _Option:
        """One of them."""
        return options[self.to(len(options) - 1)]

    def coin(self) -> bool:
        return self.to(1) == 1


#: One throw.
DICE = st.binary(min_size=8, max_size=8).map(lambda drawn: Dice(int.from_bytes(drawn, "big")))
#: A throw for each step of a burst.
THROWS = st.binary(min_size=_EACH * BURST, max_size=_EACH * BURST)


class Actions:
    """What a machine can do; in most examples only some of it, as Hypothesis does with rules: rare
    runs are of few kinds of steps."""

    def __init__(self) -> None:
        self._all: list[tuple[str, str, int]] = []

    def more(self) -> "Actions":
        """The same, to which others are added."""
        found = Actions()
        found._all = list(self._all)
        return found

    def action(self, needs: str = "", often: int = 1) -> Callable[[_Method], _Method]:
        """A method that takes dice; possible while the attribute ``needs`` is not empty. What is
        done ``often`` times as often as others is in every example."""

        def remember(method: _Method) -> _Method:
            self._all.append((method.__name__, needs, often))
            return method

        return remember

    def some(self, dice: Dice) -> list[tuple[str, str]]:
        """Those of one example, each as often as it is to be tried."""
        chance = dice.to(7)
        return [
            (name, needs)
            for name, needs, often in self._all
            if often > 1 or dice.to(7) <= chance
            for _ in range(often)
        ]

    @staticmethod
    def take(machine: object, enabled: list[tuple[str, str]], throws: bytes) -> Iterator[str]:
        """The steps of a burst that are possible; each is done when it is asked for."""
        for at in range(0, len(throws), _EACH):
            number = int.from_bytes(throws[at : at + _EACH], "big")
            able = [name for name, needs in enabled if not needs or getattr(machine, needs)]
            if number and able:
                dice = Dice(number)
                name = dice.of(able)
                note(f"{name}: {dice}")
                getattr(machine, name)(dice)
                yield name

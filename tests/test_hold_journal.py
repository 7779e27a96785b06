"""Journals of holds: what was to be done with them, and on which nodes, is decided again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.core.hold_news import KeepRules, left_out
from plexrl_slurm.core.holding import Fault, HoldAction
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.daemons.hold_book import HoldBook
from plexrl_slurm.journal import JournalledCore, replay
from plexrl_slurm.slurm_settings import HoldSettings
from tests.core.toy_slurm import RULES, SECOND, ToySlurm, Trouble

REST_US = 30 * SECOND
KEEP = KeepRules(rules=RULES, first_rest_us=REST_US, exclude_after=2)


class Written(ToySlurm):
    """Its decisions are the daemon's, and in a journal."""

    def __init__(self, path: Path, seed: int) -> None:
        trouble = Trouble(rejects=0.2, requeues=0.005, losses=0.005, jobs=0.02)
        super().__init__(seed, RULES, trouble)
        self.journal = JournalledCore(
            find_policy("fifo"), path=path, prior=SwitchCosts(), holds=KEEP
        )
        self.book = HoldBook(HoldSettings())
        self.book._rules, self.book.journal = KEEP, self.journal
        self.decisions, self.seen = 0, set[str]()

    def decide(self, at_us: int) -> tuple[HoldAction, ...]:
        failed_us = (self.not_before_us - REST_US,) if self.not_before_us else ()
        actions = self.book.decide(at_us, self.views(), self.demand(), failed_us)
        assert actions == super().decide(at_us)
        self.decisions += 1
        self.seen |= {type(action).__name__ for action in actions}
        return actions


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "1.jsonl"
    world = Written(path, seed=1)
    world.run(6_000)
    world.journal.close()
    assert world.seen >= {"Submit", "Extend", "Drain", "Release"}
    assert b"others have had room for all" in path.read_bytes()
    # A look at which nothing is new and nothing is to be done is no line.
    assert path.read_bytes().count(b"\n") < world.decisions / 2
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(4))
def test_what_was_done_with_holds_is_done_again(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "1.jsonl"
    world = Written(path, seed)
    world.run(1_500)
    world.journal.close()
    assert list(replay(path)) == list(range(2, path.read_bytes().count(b"\n") + 1))


def test_a_hold_is_told_of_when_it_is_new_or_other_than_it_was(written: bytes) -> None:
    known: dict[str, Any] = {}
    for line in map(msgspec.json.decode, written.split(b"\n")[1:-1]):
        for view in line[2]["holds"]:
            assert known.get(view["id"]) != view
            known[view["id"]] = view
        for name in line[2]["gone"]:
            del known[name]


Tamper = Callable[[list[Any]], bool]


def _nothing(line: list[Any]) -> bool:
    """What was done is left out."""
    return bool(line[3]) and line[3].pop() is not None


def _another(line: list[Any]) -> bool:
    for kind, action in line[3]:
        if kind == "Drain":
            action["hold"] = "h99"
            return True
    return False


def _why(line: list[Any]) -> bool:
    for kind, action in line[3]:
        if kind == "Release":
            action["reason"] = "because"
            return True
    return False


def _late(line: list[Any]) -> bool:
    """Something was done of which it was not time yet."""
    if line[3] and line[3][0][0] == "Drain":
        line[1] = 0
        return True
    return False


@pytest.mark.parametrize("tamper", [_nothing, _another, _why, _late])
def test_a_decision_that_was_changed_is_told_with_its_line_and_both(
    tmp_path: Path, written: bytes, tamper: Tamper
) -> None:
    path, lines = tmp_path / "1.jsonl", written.split(b"\n")
    for number, text in enumerate(lines[1:-1], 2):
        line = msgspec.json.decode(text)
        if tamper(line):
            lines[number - 1] = msgspec.json.encode(line)
            break
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadInput, match=rf"{path.name}:{number}: decided then .*, and now "):
        list(replay(path))


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (b'"max":3', b'"max":2'),
        (b'"renew_before_us":150000000', b'"renew_before_us":15000000'),
        (b'"idle_release_us":60000000', b'"idle_release_us":600000000'),
        (b'"first_rest_us":30000000', b'"first_rest_us":300000000'),
    ],
)
def test_other_rules_decide_otherwise(
    tmp_path: Path, written: bytes, then: bytes, now: bytes
) -> None:
    path = tmp_path / "1.jsonl"
    head, rest = written.split(b"\n", 1)
    assert then in head
    path.write_bytes(head.replace(then, now) + b"\n" + rest)
    with pytest.raises(BadInput, match=rf"{path.name}:\d+: decided then "):
        list(replay(path))


def test_nodes_are_left_out_again_and_each_fault_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    journal = JournalledCore(find_policy("fifo"), path=path, prior=SwitchCosts(), holds=KEEP)
    book = HoldBook(HoldSettings())
    book._rules, book.journal = KEEP, journal
    faults: list[Fault] = []
    assert book.left_out(1, faults) == []
    for at_us, node in ((1, "n1"), (2, "n2"), (3, "n1"), (4, "n2")):
        faults.append(Fault(node=node, at_us=at_us, reason="lost"))
        assert book.left_out(at_us, faults) == left_out(at_us, faults, KEEP)
    journal.close()
    lines = [msgspec.json.decode(line) for line in path.read_bytes().split(b"\n")[1:-1]]
    assert [(len(line[2]), line[3]) for line in lines] == [
        (1, []), (1, []), (1, ["n1"]), (1, ["n1", "n2"]),
    ]  # fmt: skip
    assert list(replay(path)) == [2, 3, 4, 5]
    path.write_bytes(path.read_bytes().replace(b'["n1"]]', b"[]]"))
    with pytest.raises(BadInput, match=r":4: decided then \[\], and now \[\"n1\"\]"):
        list(replay(path))


@pytest.mark.parametrize("line", [b'["hold",1,{"gone":["h9"]},[]]', b'["exclude",1,[4],[]]'])
def test_what_is_no_line_is_told(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "1.jsonl"
    JournalledCore(find_policy("fifo"), path=path, prior=SwitchCosts()).close()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(BadScript, match=r":2: is no line of a journal"):
        list(replay(path))

"""Journals of reliefs and merges: who left which WPG, and who did not, is decided again."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.core.ground import Ground, News, Wish
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.leaving import LeaveRules, Leaves, Leaving, Stays, still_right
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.queue_rules import QueueRules
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.sites import Settled
from plexrl_slurm.journal import JournalledCore, replay
from tests.core.test_admission import FIT, site, uses
from tests.core.test_admission import job as applicant

S = 1_000_000
SITES = [
    *(site(f"train-{number}") for number in range(5)),
    *(site(f"rollout-{number}", Pool.ROLLOUT) for number in range(5)),
]
#: Two holds.
HOLDS = [
    ("h0", [WpgId(f"{pool}-{number}") for pool in Pool for number in (0, 1, 2)]),
    ("h1", [WpgId(f"{pool}-{number}") for pool in Pool for number in (3, 4)]),
]
RULES = LeaveRules(rules=FIT, regroup_us=600 * S)
QUEUE = QueueRules(reservation=Reservation(wpgs=1))


class Town:
    """Jobs come as light ones, turn out as they are, leave for other WPGs, and end."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = JournalledCore(
            find_policy("atc_h"), path=path, prior=SwitchCosts(), queue=QUEUE, leaving=RULES
        )
        self.ground = Ground(QUEUE.reservation)
        self.now_us, self.number = 10**12, 0
        self.since_us: dict[JobId, int] = {}
        self.told_us: dict[JobId, int] = {}
        #: How often each was decided.
        self.counts: dict[str, int] = {}
        self.vacant: str | None = None
        self.hear(News(sites=tuple(SITES)))

    def hear(self, news: News) -> None:
        self.ground.hear(news)
        self.core.grounded(news)

    def live(self, turns: int) -> None:
        for _ in range(turns):
            self.now_us += self.rng.randrange(300 * S)
            self.rng.choice((self.come, self.come, self.learn, self.learn, self.hurry, self.end))()
            self.look()
        self.core.close()

    def come(self) -> None:
        self.number += 1
        who = applicant(self.number, uses(train=3, sample=3))
        wish = Wish(who=who, rules=FIT, pools=tuple(Pool))
        found = self.ground.answer(wish)
        self.core.placed(News(), wish, found)
        if isinstance(found, Placement):
            self.hear(News(settled=(Settled(who=who, homes=found.homes),)))
            self.since_us[who.job] = self.now_us

    def learn(self) -> None:
        rng = self.rng
        for each in rng.sample(list(self.ground.whole.settled), min(3, len(self.since_us))):
            habits = uses(train=rng.choice((3, 20, 45)), sample=rng.choice((2, 3, 45)))
            who = applicant(each.who.job, habits, ends_us=each.who.ends_us)
            self.hear(News(settled=(replace(each, who=who),)))

    def hurry(self) -> None:
        """Somebody will end sooner than was thought."""
        for job in self.rng.sample(list(self.since_us), min(1, len(self.since_us))):
            self.hear(News(ends=((job, self.now_us + self.rng.randrange(1200 * S)),)))

    def end(self) -> None:
        for job in self.rng.sample(list(self.since_us), min(1, len(self.since_us))):
            del self.since_us[job]
            self.hear(News(left=(job,)))

    def look(self) -> None:
        leaves = Leaves(RULES, self.ground.open, self.since_us, self.now_us)
        asked = self.rng.sample([each.wpg.id for each in SITES], 6)
        found = leaves.relieved(asked)
        if found is not None:
            del asked[asked.index(found.wpg) + 1 :]
        self.note(asked, found)
        if found is None:
            found = leaves.merged()
            self.note(None, found)
        vacant = leaves.vacated(HOLDS)
        if vacant != self.vacant:
            self.vacant = vacant
            self.core.vacated(News(), Stays(), self.now_us, HOLDS, vacant)
            self.count("vacate", vacant is not None)
        if found is not None:
            self.drained(found)

    def note(self, asked: list[WpgId] | None, found: Leaving | None) -> None:
        stays = Stays(
            since_us={j: at for j, at in self.since_us.items() if self.told_us.get(j) != at},
            gone=tuple(job for job in self.told_us if job not in self.since_us),
        )
        self.told_us = dict(self.since_us)
        self.core.left(News(), stays, self.now_us, asked, found)
        self.count("relieve" if asked is not None else "merge", found is not None)

    def count(self, *what: object) -> None:
        word = " ".join(map(str, what))
        self.counts[word] = self.counts.get(word, 0) + 1

    def drained(self, found: Leaving) -> None:
        if self.rng.random() < 0.3:
            self.learn()
        right = still_right(self.ground.open, RULES, found)
        self.core.still(News(), right)
        self.count("still", right)
        for job, home in found.homes if right else ():
            there = self.ground.whole.of(job)
            assert there is not None
            pool = Pool.TRAIN if home.startswith("train") else Pool.ROLLOUT
            self.hear(News(settled=(replace(there, homes={**there.homes, pool: home}),)))
            self.since_us[job] = self.now_us


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "1.jsonl"
    town = Town(path, seed=1)
    town.live(400)
    assert town.counts.keys() == {
        f"{what} {said}"
        for what in ("relieve", "merge", "still", "vacate")
        for said in (True, False)
    }, town.counts  # fmt: skip
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(4))
def test_who_left_leaves_again(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "1.jsonl"
    town = Town(path, seed)
    town.live(150)
    assert town.counts["relieve True"] and town.counts["merge True"], town.counts
    assert list(replay(path)) == list(range(2, path.read_bytes().count(b"\n") + 1))


def test_what_is_known_already_is_not_told_again(written: bytes) -> None:
    lines = [msgspec.json.decode(line) for line in written.split(b"\n")[:-1]]
    since: dict[str, int] = {}
    for verb, *_, said in lines:
        if verb == "stays":
            assert said["since_us"] or said["gone"]
            assert not since.items() & said["since_us"].items()
            since |= said["since_us"]
    kinds = [line[0] for line in lines]
    assert kinds.count("stays") < kinds.count("relieve")
    assert all(len(line) == 2 for line in lines if line[0] == "still")


Tamper = Callable[[list[Any]], bool]


def _nobody_left(line: list[Any]) -> bool:
    if line[0] != "relieve" or line[3] is None:
        return False
    line[3] = None
    return True


def _left_for_another(line: list[Any]) -> bool:
    if line[0] != "relieve" or line[3] is None:
        return False
    line[3][1][0][1] = "train-77"
    return True


def _somebody_left(line: list[Any]) -> bool:
    if line[0] != "relieve" or line[3] is not None:
        return False
    line[3] = [line[2][0], [[1, "train-1"]]]
    return True


def _was_asked_for_another(line: list[Any]) -> bool:
    if line[0] != "relieve" or line[3] is None:
        return False
    line[2] = [line[3][1][0][1]]
    return True


def _nothing_merged(line: list[Any]) -> bool:
    if line[0] != "merge" or line[2] is None:
        return False
    line[2] = None
    return True


def _merged_too_early(line: list[Any]) -> bool:
    """Nobody who leaves has been there for long."""
    if line[0] != "merge" or line[2] is None:
        return False
    line[1] = 1
    return True


def _another_hold(line: list[Any]) -> bool:
    if line[0] != "vacate" or line[3] is None:
        return False
    line[3] = "h1" if line[3] == "h0" else "h0"
    return True


def _was_not_right(line: list[Any]) -> bool:
    if line[0] != "still":
        return False
    line[1] = not line[1]
    return True


@pytest.mark.parametrize(
    "tamper",
    [
        _nobody_left, _left_for_another, _somebody_left, _was_asked_for_another, _nothing_merged,
        _merged_too_early, _was_not_right, _another_hold,
    ],
)  # fmt: skip
def test_a_decision_that_was_changed_is_told_with_its_line_and_both(
    tmp_path: Path, written: bytes, tamper: Tamper
) -> None:
    path, lines = tmp_path / "1.jsonl", written.split(b"\n")
    for number, text in enumerate(lines[:-1], 1):
        line = msgspec.json.decode(text)
        if tamper(line):
            lines[number - 1] = msgspec.json.encode(line)
            break
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadInput, match=rf"{path.name}:{number}: decided then .*, and now "):
        list(replay(path))


def _has_just_come(line: list[Any]) -> bool:
    """Somebody who left had just come."""
    if line[0] != "stays":
        return False
    line[1]["since_us"] = dict.fromkeys(line[1]["since_us"], 1 << 50)
    return True


def _habits(line: list[Any]) -> bool:
    """Nobody trains much."""
    for each in line[1]["settled"] if line[0] == "ground" else ():
        for habits in each["who"]["habits"].values():
            habits["train"]["phase_us"] = 1
    return bool(line[0] == "ground")


def _ends(line: list[Any]) -> bool:
    for each in line[1]["ends"] if line[0] == "ground" else ():
        each[1] = 1
    return bool(line[0] == "ground")


@pytest.mark.parametrize("tamper", [_has_just_come, _habits, _ends])
def test_other_facts_decide_otherwise(tmp_path: Path, written: bytes, tamper: Tamper) -> None:
    path, lines = tmp_path / "1.jsonl", written.split(b"\n")
    for number, text in enumerate(lines[1:-1], 1):
        line = msgspec.json.decode(text)
        if tamper(line):
            lines[number] = msgspec.json.encode(line)
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadInput, match=rf"{path.name}:\d+: decided then .*, and now "):
        list(replay(path))


def test_other_rules_decide_otherwise(tmp_path: Path, written: bytes) -> None:
    path = tmp_path / "1.jsonl"
    for then, now in ((b"600000000", b"600000000000"), (b'"margin":0.9', b'"margin":0.1')):
        head, rest = written.split(b"\n", 1)
        assert then in head
        path.write_bytes(head.replace(then, now) + b"\n" + rest)
        with pytest.raises(BadInput, match=rf"{path.name}:\d+: decided then .*, and now "):
            list(replay(path))


@pytest.mark.parametrize(
    "line",
    [
        b'["relieve",1,"train-0",null]',
        b'["relieve","now",["train-0"],null]',
        b'["stays",{"gone":[4]}]',
        b'["ground",{"ends":[[4,1]]}]',
        b'["merge"]',
        b'["vacate",1,["h0"],null]',
    ],
)
def test_what_is_no_line_is_told(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "1.jsonl"
    Town(path, seed=1).core.close()
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(BadScript, match=r":3: is no line of a journal"):
        list(replay(path))


def test_a_wpg_that_nobody_was_to_leave_is_not_drained(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    Town(path, seed=1).core.close()
    path.write_bytes(path.read_bytes() + b'["still",true]\n')
    with pytest.raises(BadInput, match=r":3: a WPG was drained, and no line says who leaves it"):
        list(replay(path))

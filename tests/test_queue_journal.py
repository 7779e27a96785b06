"""Journals of the queue: order, limits and reservation are decided again, or the line is told."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.dues import Dues
from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.core.ground import Ground, News, Wish
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import Held, HeldKind, LimitRules, Limits, Qos, Subject, Tally
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.priority import Owner, Weights
from plexrl_slurm.core.queue_pass import (
    LATER,
    PLACED,
    UNFIT,
    Queued,
    QueueNews,
    QueuePass,
    Refused,
)
from plexrl_slurm.core.queue_rules import QueueRules
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.sites import Settled
from plexrl_slurm.core.turns import HOUR_US, TurnRules
from plexrl_slurm.journal import JournalledCore, replay
from tests.core.test_admission import FIT, site, uses
from tests.core.test_admission import job as applicant

SITES = [
    *(site(f"train-{number}") for number in range(4)),
    *(site(f"rollout-{number}", Pool.ROLLOUT) for number in range(4)),
]
DAY_US = 24 * HOUR_US
#: Slurm would not start it.
SOON = Held(kind=HeldKind.BEGIN_TIME, sentence="it is to begin tomorrow")
RULES = QueueRules(
    weights=Weights(half_life_us=2 * HOUR_US),
    shares={"bio": 3},
    limits=LimitRules(
        qos={
            "fast": Qos(name="fast", priority=9, reserved=True, users=frozenset("ab")),
            "slow": Qos(name="slow", limits=Limits(max_jobs=1)),
        },
        users=Limits(max_jobs=5, gpu_us_per_day=900 * 10**6),
        accounts=Limits(max_submit=5),
    ),
    turns=TurnRules(guard_us=3 * HOUR_US, depth=4),
    reservation=Reservation(wpgs=1),
    joins_first=True,
)


class Town:
    """Jobs come, find homes or wait, use what they use, and end; a journal is kept of it."""

    def __init__(self, path: Path, seed: int) -> None:
        self.rng, self.path = random.Random(seed), path
        self.core = JournalledCore(
            find_policy("atc_h"), path=path, prior=SwitchCosts(), queue=RULES
        )
        self.ground, self.dues = Ground(RULES.reservation), Dues(RULES.weights.half_life_us)
        self.news = News(sites=tuple(SITES))
        self.jobs: dict[JobId, Queued] = {}
        self.written: dict[JobId, Queued] = {}
        self.now_us, self.number = 10 * DAY_US, 0
        self.words: set[str] = set()

    def live(self, passes: int) -> None:
        for _ in range(passes):
            self.now_us += self.rng.randrange(HOUR_US)
            for _ in range(self.rng.randrange(5)):
                self.come()
            for job in [job for job, it in self.jobs.items() if it.placed]:
                if self.rng.random() < 0.15:
                    self.end(job)
            self.look()
        self.core.close()

    def come(self) -> None:
        self.number += 1
        rng, job = self.rng, JobId(self.number)
        self.jobs[job] = Queued(
            job=job, label=str(job), user=rng.choice("abc"), account=rng.choice(("bio", "lab")),
            qos=rng.choice(("normal", "fast", "slow", "gone")), since_us=self.now_us,
            priority=rng.randrange(9), models=("tiny",), host_bytes=1,
            promise=rng.choice((None, "1.3")),
            in_slurm=rng.choice((None,) * 9 + (SOON,)),
        )  # fmt: skip

    def end(self, job: JobId) -> None:
        gone = self.jobs.pop(job)
        owner = Owner(gone.account, gone.user)
        self.dues.add(owner, gone.qos, self.rng.randrange(300 * 10**6), self.now_us)
        self.ground.hear(News(left=(job,)))
        self.news = News(
            sites=self.news.sites,
            settled=tuple(each for each in self.news.settled if each.who.job != job),
            left=(*self.news.left, job),
        )

    def look(self) -> None:
        self.ground.hear(self.news)
        passing = QueuePass(
            RULES, at_us=self.now_us, jobs=tuple(self.jobs.values()), dues=self.dues
        )
        news = QueueNews(
            jobs=tuple(each for job, each in self.jobs.items() if self.written.get(job) != each),
            gone=tuple(job for job in self.written if job not in self.jobs),
            dues=self.dues.news(),
        )
        self.written = dict(self.jobs)
        for each in passing.order:
            if passing.looks_at(each) is None:
                self.tried(passing, each, last=False)
        for each in list(passing.later):
            if passing.looks_again(each) is None:
                self.tried(passing, each, last=True)
        self.words |= {word for _, word in (*passing.told, *passing.said)}
        self.core.passed(news, self.now_us, passing.told, passing.said)

    def tried(self, passing: QueuePass, each: Queued, *, last: bool) -> None:
        if self.rng.random() < 0.05:
            passing.hears(each, UNFIT)
            del self.jobs[each.job]
            return
        reserved = RULES.qos(each.qos).reserved
        who = applicant(each.job, uses(train=40), promise=float(each.promise or 1.1))
        wish = Wish(who=who, rules=FIT, pools=tuple(Pool), reserved=reserved)
        found = self.ground.answer(wish)
        self.core.placed(self.news, wish, found)
        self.news = News()
        if not isinstance(found, Placement):
            passing.finds_none(each, found)
        elif (
            not (last or passing.alone(each))
            and not self.ground.whole.members[found.homes[Pool.TRAIN]]
        ):
            passing.hears(each, LATER)
        else:
            settled = Settled(who=who, homes=found.homes, reserved=reserved)
            self.news = News(settled=(settled,))
            self.ground.hear(self.news)
            passing.hears(each, PLACED)
            self.jobs[each.job] = replace(each, placed=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("journal") / "1.jsonl"
    town = Town(path, seed=3)
    town.live(60)
    assert town.words >= {
        "BeginTime",
        "try", PLACED, LATER, UNFIT, "InvalidQOS", "QOSGrpJobsLimit", "AssocGrpGRESMinutes",
        "behind guard", "promise",
    }, town.words  # fmt: skip
    return path.read_bytes()


@pytest.mark.parametrize("seed", range(5))
def test_what_was_decided_along_the_queue_is_decided_again(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "1.jsonl"
    Town(path, seed).live(40)
    lines = path.read_bytes().count(b"\n")
    assert list(replay(path)) == list(range(2, lines + 1))


Tamper = Callable[[list[Any]], bool]


def _swapped(line: list[Any]) -> bool:
    """The first two that were tried, or waited, change places."""
    if line[0] != "pass" or len(line[3]) < 2:
        return False
    first, second, *_ = runs = line[3]
    first[1][0], second[1][0] = second[1][0], first[1][0]
    return first is runs[0]


def _of_qos(line: list[Any]) -> bool:
    """A job that was refused its QOS asked for another."""
    for job in line[1]["jobs"] if line[0] == "queue" else ():
        if job["qos"] == "gone":
            job["qos"] = "normal"
            return True
    return False


def _used(line: list[Any]) -> bool:
    """Somebody used more than was allowed."""
    for use in line[1]["dues"]["day"] if line[0] == "queue" else ():
        use[4] += 10**9
        return True
    return False


def _no_place(line: list[Any]) -> bool:
    """A job got a place of which no line tells."""
    for told in line[2] if line[0] == "pass" else ():
        if told[1] == "promise":
            told[1] = PLACED
            return True
    return False


def _not_told(line: list[Any]) -> bool:
    """What came of one is left out."""
    return line[0] == "pass" and bool(line[2]) and line[2].pop(0) is not None


@pytest.mark.parametrize("tamper", [_swapped, _of_qos, _used, _no_place, _not_told])
def test_a_journal_that_was_changed_is_told_with_its_line(
    tmp_path: Path, written: bytes, tamper: Tamper
) -> None:
    path, lines = tmp_path / "1.jsonl", written.split(b"\n")
    for number, text in enumerate(lines[:-1], 1):
        line = msgspec.json.decode(text)
        if tamper(line):
            lines[number - 1] = msgspec.json.encode(line)
            break
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadInput, match=rf"{path.name}:(\d+): ") as told:
        list(replay(path))
    at = int(str(told.value).split(":")[1])
    assert at >= number
    assert msgspec.json.decode(lines[at - 1])[0] == "pass"


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (b'"half_life_us":7200000000', b'"half_life_us":72000000000000'),
        (b'"guard_us":10800000000', b'"guard_us":10800000000000'),
        (b'"max_jobs":5', b'"max_jobs":1'),
        (b'"joins_first":true', b'"joins_first":false'),
        (b'"reservation":{"wpgs":1', b'"reservation":{"wpgs":0'),
    ],
)
def test_other_rules_decide_otherwise(
    tmp_path: Path, written: bytes, then: bytes, now: bytes
) -> None:
    path = tmp_path / "1.jsonl"
    head, rest = written.split(b"\n", 1)
    assert then in head
    path.write_bytes(head.replace(then, now) + b"\n" + rest)
    with pytest.raises(BadInput, match=rf"{path.name}:\d+: "):
        list(replay(path))


def test_a_refusal_is_decided_again(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    core = JournalledCore(find_policy("atc_h"), path=path, prior=SwitchCosts(), queue=RULES)
    tally = Tally(RULES.limits)
    subject = Subject(job=JobId(0), user="a", account="bio", qos="normal")
    for _ in range(5):
        tally.submit(subject)
    held = tally.refusal(subject)
    assert held is not None and held.kind is HeldKind.ACCOUNT_SUBMIT
    core.refused(Refused(subject=subject, submitted=tally.submitted(subject), kind=held.kind))
    core.close()
    assert list(replay(path)) == [2]
    text = path.read_bytes()
    path.write_bytes(text.replace(b"[5,5,5,5]", b"[5,4,5,5]"))
    with pytest.raises(BadInput, match=r":2: decided then \"AssocGrpSubmitJobsLimit\", and now nu"):
        list(replay(path))
    path.write_bytes(text.replace(b"[5,5,5,5]", b"[5,5]"))
    with pytest.raises(BadScript, match=":2: is no line of a journal"):
        list(replay(path))

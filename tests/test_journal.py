"""Journals: what a core decided is decided again."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from plexrl_slurm import journal
from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.costs import SwitchCosts
from plexrl_slurm.core.errors import BadInput, BadScript
from plexrl_slurm.core.ground import Ground, News, Wish
from plexrl_slurm.core.ids import CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import (
    AnyEvent,
    Deployment,
    DeploymentPlaced,
    Expected,
    FunctionKind,
    Pool,
    RunEnded,
)
from plexrl_slurm.core.policy import find_policy
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.scheduler import SchedulerCore
from plexrl_slurm.core.sites import Settled
from plexrl_slurm.journal import JournalledCore, replay
from tests.core.harness import World
from tests.core.tailed import EAGER, Tailed, rollouts
from tests.core.test_admission import FIT, SITES, uses
from tests.core.test_admission import job as a_job
from tests.core.workloads import ROLLOUT, TRAIN, crowd


def journalled(path: Path, seed: int = 5) -> None:
    """Write the journal of a crowd with failures, losses and pipelined clients."""

    class Written(World):
        def make_core(self) -> SchedulerCore:
            return JournalledCore(
                find_policy(self.policy),
                path=path,
                prior=SwitchCosts(),
                hold_us=self.hold_us,
                image_every=self.image_every,
            )

    world = Written(seed, wpgs=(TRAIN, ROLLOUT), deaths=0.02, failures=0.02, policy="atc_h")
    crowd(world, trainers=3, samplers=2, steps=4, trouble=0.1)
    world.run()
    assert isinstance(world.core, JournalledCore)
    world.core.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_what_was_paused_is_paused_again(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "1.jsonl"

    class Written(Tailed):
        def make_core(self) -> SchedulerCore:
            return JournalledCore(
                find_policy(self.policy), path=path, prior=SwitchCosts(), tails=EAGER
            )

    world = Written(seed, wpgs=(TRAIN, ROLLOUT), policy="atc_h")
    rollouts(world, jobs=3, each=3, calls=12)
    world.run()
    assert isinstance(world.core, JournalledCore)
    world.core.close()
    text = path.read_text()
    assert len(list(replay(path))) == text.count("\n") - 1
    assert '"Pause"' in text and '"Paused"' in text


def changed(path: Path, number: int, line: bytes) -> Path:
    lines = path.read_bytes().split(b"\n")
    lines[number - 1] = line
    path.write_bytes(b"\n".join(lines))
    return path


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_was_decided_is_decided_again(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "journal" / "1.jsonl"
    journalled(path, seed)
    text = path.read_text()
    assert list(replay(path)) == list(range(2, text.count("\n") + 1))
    for word in ('"Switch"', '"Charge"', '"Run"', '"WpgDown"'):
        assert word in text


def test_another_decision_is_told_with_its_line_and_both(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    journalled(path)
    lines = path.read_bytes().split(b"\n")
    number = next(n for n, line in enumerate(lines, 1) if b'"Switch"' in line)
    changed(path, number, lines[number - 1].replace(b'"Switch"', b'"Snitch"'))
    with pytest.raises(BadInput, match=rf":{number}: decided then .*Snitch.*, and now .*Switch"):
        list(replay(path))


def test_a_line_that_was_not_written_whole_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    journalled(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert len(list(replay(path))) == whole.count(b"\n") - 2


@pytest.mark.parametrize(
    ("number", "line", "sentence"),
    [
        (1, b"{}", ":1: does not begin like a journal"),
        (1, b'["core",9,"hrrs",{}]', ":1: is of format 9, and this version reads 3"),
        (1, b'["core",1,"hrrs",{}]', "replay it with the version of plexrl that wrote it"),
        (1, b'["core",3,"hrrs",{}]', ":1: does not begin like a journal"),
        (1, b'["core",3,"hrrs",{"colour":1},{}]', ":1: does not begin like a journal"),
        (1, b"[" * 100_000, ":1: does not begin like a journal"),
        (3, b"[" * 100_000, ":3: is no line of a journal"),
        (3, b"\x00\xff", ":3: is no line of a journal"),
        (3, b'["handle","NoEvent",{},[]]', ":3: is no line of a journal"),
        (3, b'["sing",1,"x",[]]', ":3: is no line of a journal: unknown verb"),
    ],
)
def test_a_foreign_file_is_refused_with_its_line(
    tmp_path: Path, number: int, line: bytes, sentence: str
) -> None:
    journalled(tmp_path / "1.jsonl")
    with pytest.raises(BadScript, match=sentence):
        list(replay(changed(tmp_path / "1.jsonl", number, line)))


def test_a_journal_that_is_full_ends_and_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MOST_BYTES", 4000)
    journalled(tmp_path / "1.jsonl")
    assert 0 < (tmp_path / "1.jsonl").stat().st_size <= 4000
    assert len(list(replay(tmp_path / "1.jsonl"))) > 2


def test_few_journals_of_earlier_daemons_stay(tmp_path: Path) -> None:
    for number in range(10, 17):
        JournalledCore(
            find_policy("hrrs"), path=tmp_path / f"{number}.jsonl", prior=SwitchCosts()
        ).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{number}.jsonl" for number in range(12, 17)
    ]


def test_a_folder_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").mkdir()
    core = JournalledCore(find_policy("hrrs"), path=tmp_path / "1.jsonl", prior=SwitchCosts())
    assert core.plan(1, CauseId("test")) == []
    assert "cannot be opened" in core.ended


def test_every_event_is_known_by_its_name() -> None:
    assert journal._EVENTS["RunEnded"] is RunEnded
    assert set(journal._EVENTS) == {kind.__name__ for kind in get_args(AnyEvent)}


def placements(path: Path) -> None:
    """Write the journal of jobs that come until one has to wait."""
    core = JournalledCore(find_policy("atc_h"), path=path, prior=SwitchCosts())
    ground = Ground(Reservation())
    news = News(sites=(*SITES, replace(SITES[0], nvme_bytes=1 << 40)))
    for number in range(1, 9):
        wish = Wish(
            who=a_job(number, uses(train=20, sample=8), ends_us=number),
            rules=FIT,
            pools=tuple(Pool),
        )
        ground.hear(news)
        found = ground.answer(wish)
        core.placed(news, wish, found)
        if not isinstance(found, Placement):
            break
        news = News(settled=(Settled(who=wish.who, homes=found.homes),))
    core.close()


def test_placements_are_decided_again_and_another_one_is_told(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    placements(path)
    lines = path.read_bytes().split(b"\n")
    assert len(list(replay(path))) == len(lines) - 2 >= 3
    assert b'"promise"' in lines[-2]  # the last one had to wait
    other = lines[2].replace(b'"homes":{"rollout":"rollout-0"', b'"homes":{"rollout":"rollout-9"')
    assert other != lines[2]
    with pytest.raises(BadInput, match=r":3: decided then .*rollout-9.*, and now .*rollout-0"):
        list(replay(changed(path, 3, other)))
    with pytest.raises(BadScript, match="is no line of a journal"):
        list(replay(changed(path, 3, b'["place",{"who":1},{}]')))


def test_what_was_expected_of_a_job_is_part_of_what_was_heard(tmp_path: Path) -> None:
    path, name = tmp_path / "1.jsonl", DeploymentId("d")
    core = JournalledCore(find_policy("atc_h"), path=path, prior=SwitchCosts())
    deployment = Deployment(
        id=name, job=JobId(1), pool=Pool.TRAIN, wpg=WpgId("train-0"), image_bytes=1, content=name
    )
    expected = Expected(step_us=9, train_us=5, sample_us=3, functions={FunctionKind.OPTIM_STEP: 4})
    core.handle(
        DeploymentPlaced(at_us=1, cause=CauseId("c"), deployment=deployment, expected=expected)
    )
    core.close()
    assert list(replay(path)) == [2]
    fields = msgspec.json.decode(path.read_bytes().split(b"\n")[1])[2]
    assert msgspec.convert(fields, DeploymentPlaced).expected == expected

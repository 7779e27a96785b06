"""A rank process never outlives its agent, and dies of nothing that only one call suffers from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from plexrl_slurm import wire
from plexrl_slurm.engines import ranklink
from plexrl_slurm.engines.rank import TrainRank
from tests.engines.test_fake import make_batch, make_trained

ROOT = Path(__file__).parents[2]


def test_a_rank_whose_agent_ended_before_it_looked_ends_too(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    facts = {
        "wpg": "train-0", "engine": "fake_train", "rank": 0, "world": 1, "gpus": 1,
        "master_port": 0, "agent": f"ipc://{tmp_path}/ranks", "models": {}, "options": {},
        "cores": [], "parent": os.getpid() + 1,
    }  # fmt: skip
    spec.write_text(json.dumps(facts))
    done = subprocess.run(
        [sys.executable, "-m", "plexrl_slurm.engines.rank", str(spec)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 1


class Link:
    """An agent that has these orders, and keeps the answers."""

    def __init__(self, *operations: ranklink.Operation) -> None:
        self._orders = [
            ranklink.encode(ranklink.Order(id=str(number), operation=operation))
            for number, operation in enumerate((*operations, ranklink.Stop()))
        ]
        self.answers: list[ranklink.Report] = []

    def recv(self) -> bytes:
        return self._orders.pop(0)

    def send(self, data: bytes) -> None:
        self.answers.append(ranklink.decode_report(data))


def call(body: wire.Body, *, publish_path: Path | None = None) -> ranklink.Call:
    return ranklink.Call("c", "m", wire.encode(body), str(publish_path or ""))


def test_a_checkpoint_that_cannot_be_written_fails_its_call_and_not_the_rank(
    tmp_path: Path,
) -> None:
    (tmp_path / "runs").touch()
    path = str(tmp_path / "runs" / "a" / "c")
    link = Link(
        call(wire.SaveState(path, "tinker://c")),
        call(wire.Publish("s", path=path), publish_path=tmp_path / "s"),
        call(wire.SaveState(str(tmp_path / "c"), "tinker://c")),
    )
    TrainRank(make_trained(make_batch()), cast("Any", link)).run()
    refused = (
        f"{path} cannot be written (Not a directory): "
        f"a file is where a folder belongs: move it away"
    )
    answers = [cast("ranklink.Answer", answer) for answer in link.answers]
    assert [(answer.ok, answer.error, answer.full) for answer in answers] == [
        (False, refused, False),
        (False, refused, False),
        (True, "", False),
    ]

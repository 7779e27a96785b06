"""state show, verify and export, sinfo --state: shapes of the answers, folders, refusals."""

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from plexrl_slurm.cli import state_export
from tests.cli.conftest import T0, FakeDaemon, make_job

Plexrl = Callable[..., Result]

URI = "tinker://s1-1:train:0/sampler_weights/b"
IMAGE: dict[str, Any] = {
    "id": "s1-1:train:0",
    "kind": "training",
    "model": "tiny",
    "job_id": 1,
    "slurm_id": "101",
    "user": "ada",
    "wpg": "train-0",
    "last_used_us": T0,
    "tiers": [
        {"tier": "device", "seq": None, "part": None, "bytes": 700},
        {"tier": "host", "seq": 4, "part": 0, "bytes": 710},
        {"tier": "durable", "seq": 2, "part": 1, "bytes": 710},
    ],
}


def saved(name: str, kind: str = "sampler_weights", **changes: Any) -> dict[str, Any]:
    return {
        "uri": f"tinker://s1-1:train:0/{kind}/{name}",
        "kind": kind,
        "name": name,
        "deployment": "s1-1:train:0",
        "model": "tiny",
        "step": 3,
        "bytes": 99,
        "created_us": T0,
        **changes,
    }


def state_of(*checkpoints: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "job_id": 1,
        "slurm_id": "101",
        "name": "count1",
        "state": "running",
        "deployments": [{"id": IMAGE["id"], "model": "tiny", "state": "placed"}],
        "images": [IMAGE],
        "checkpoints": list(checkpoints),
        **changes,
    }


def serve(daemon: FakeDaemon, *checkpoints: dict[str, Any], **changes: Any) -> None:
    daemon.jobs = [make_job(1)]
    daemon.answers["GET /jobs/1/state"] = state_of(*checkpoints, **changes)


def serve_files(daemon: FakeDaemon, files: dict[str, bytes], **sums: str) -> None:
    """Pieces of 4 bytes; ``sums`` replaces a file's checksum."""
    daemon.answers["GET /jobs/1/state/files"] = {
        "uri": URI,
        "piece_bytes": 4,
        "files": [
            {
                "name": name,
                "bytes": len(data),
                "version": "v1",
                "sha256": sums.get(name.partition(".")[0], hashlib.sha256(data).hexdigest()),
            }
            for name, data in files.items()
        ],
    }

    def piece() -> Any:
        _, _, asked = daemon.asked[-1]
        assert asked["uri"] == [URI] and asked["version"] == ["v1"]
        at, length = int(asked["offset"][0]), int(asked["length"][0])
        return 200, files[asked["name"][0]][at : at + length]

    daemon.answers["GET /jobs/1/state/piece"] = piece


def test_show_has_a_line_for_each_tier_and_for_each_thing_saved(
    plexrl: Plexrl, daemon: FakeDaemon
) -> None:
    serve(daemon, saved("a", "weights"), saved("b", step=None))
    when = "2026-02-02T02:40:00.000000Z"
    assert plexrl("state", "show", "101").stdout == (
        "Job 101 (count1) is RUNNING.\n"
        "IMAGE        KIND     MODEL WPG     TIER     PROGRESS BYTES LASTUSE\n"
        f"s1-1:train:0 training tiny  train-0 resident -        700   {when}\n"
        f"s1-1:train:0 training tiny  train-0 host     4.0      710   {when}\n"
        f"s1-1:train:0 training tiny  train-0 durable  2.1      710   {when}\n"
        "NAME KIND       STEP BYTES SAVED                       URI\n"
        f"a    checkpoint 3    99    {when} tinker://s1-1:train:0/weights/a\n"
        f"b    sampler    -    99    {when} {URI}\n"
    )
    answer = json.loads(plexrl("state", "show", "101", "--json").stdout)
    assert answer["images"][0]["last_used"] == when
    assert answer["checkpoints"][1]["uri"] == URI


def test_show_tells_of_a_damaged_copy(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    fault = {
        "id": "s1-1:train:0", "node": "n1", "seq": 4, "part": 0,
        "reason": "image rank-0.slab: is damaged: block 3", "dropped": False,
    }  # fmt: skip
    serve(daemon, faults=[fault])
    sentence = (
        "The copy of s1-1:train:0 at 4.0 on the disk of n1 is damaged (image rank-0.slab: is "
        "damaged: block 3): it is kept, because no other copy is as new."
    )
    assert sentence in plexrl("state", "show", "101").stdout
    assert json.loads(plexrl("state", "show", "101", "--json").stdout)["faults"] == [fault]


def test_show_without_a_number_is_of_ones_own_jobs(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    serve(daemon, images=[], deployments=[])
    assert plexrl("state", "show").stdout == (
        "Job 101 (count1) is RUNNING.\nIt has no model, and has saved nothing.\n"
    )
    assert daemon.asked[0][2]["user"] and "ended" not in daemon.asked[0][2]


def test_a_deployment_of_an_ended_job_is_in_no_tier(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    serve(daemon, images=[], state="completed")
    text = plexrl("state", "show", "101", "-h").stdout
    assert text.splitlines()[1].split() == ["s1-1:train:0", "training", "tiny", *["-"] * 5]


def test_sinfo_shows_every_image_and_the_bytes_of_every_tier(
    plexrl: Plexrl, daemon: FakeDaemon
) -> None:
    tier = {"limit": None, "free": None}
    daemon.answers["GET /state"] = {
        "partition": "rlvr",
        "images": [IMAGE, {**IMAGE, "id": "s2-1:train:0", "tiers": [], "last_used_us": 0}],
        "tiers": [
            tier | {"tier": "device", "where": "train-0", "used": 2**29},
            tier | {"tier": "host", "where": "n1", "used": 2**29, "limit": 2**30},
            tier | {"tier": "durable", "where": "", "used": 0, "free": 2**31},
        ],
    }
    lines = plexrl("sinfo", "--state").stdout.splitlines()
    assert lines[0].split()[:3] == ["USER", "JOBID", "IMAGE"]
    assert [line.split()[6] for line in lines[1:5]] == ["resident", "host", "durable", "-"]
    assert [line.split() for line in lines[-3:]] == [
        ["device", "train-0", "0.50", "GiB", "-"],
        ["host", "n1", "0.50", "GiB", "1.00", "GiB"],
        ["durable", "-", "0.00", "GiB", "2.00", "GiB", "free"],
    ]
    assert len(json.loads(plexrl("sinfo", "--state", "--json").stdout)["images"]) == 2


@pytest.mark.parametrize(("fine", "code"), [(True, 0), (False, 65)])
def test_verify_says_which_file_is_damaged_and_exits_so(
    plexrl: Plexrl, daemon: FakeDaemon, fine: bool, code: int
) -> None:
    serve(daemon, saved("a", "weights"), saved("b"))
    file = {"file": "rank-00000.safetensors", "bytes": 9, "state": "fine", "reason": ""}
    bad = {**file, "state": "damaged", "reason": "its checksum is another"}
    daemon.answers["GET /jobs/1/state/verify"] = {
        "uri": URI,
        "kind": "sampler_weights",
        "name": "b",
        "fine": fine,
        "files": [file] if fine else [file, bad],
    }
    done = plexrl("state", "verify", "101", "b")
    assert done.exit_code == code
    assert daemon.asked[-1][2]["uri"] == [URI]
    assert ("damaged" in done.stdout, f"{URI} is not known to be whole:" in done.stderr) == (
        not fine,
        not fine,
    )
    plexrl("state", "verify", "101")
    assert [route for _, route, _ in daemon.asked].count("/jobs/1/state/verify") == 3


def test_verify_of_what_is_not_there_is_not_fine(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    serve(daemon, saved("a"))
    refused = plexrl("state", "verify", "101", "z")
    assert refused.exit_code == 66
    assert "no checkpoint or sampler weights of job 101 named 'z'" in refused.stderr
    assert plexrl("state", "verify", "999").exit_code == 66


def test_export_takes_the_newest_weights_in_pieces_and_never_twice(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path
) -> None:
    late, other = T0 + 5, saved("c", "weights", created_us=T0 + 9)
    serve(daemon, saved("a"), saved("b", created_us=late), other)
    files = {"config.json": b"{}", "empty": b"", "model.safetensors": b"0123456789"}
    serve_files(daemon, files)
    done = plexrl("state", "export", "101", "out", "--json")
    assert json.loads(done.stdout) == {"job": "101", "uri": URI, "path": "out", "bytes": 12}
    assert {path.name: path.read_bytes() for path in (home / "out").iterdir()} == files
    again = plexrl("state", "export", "101", "out")
    assert again.exit_code == 65 and "out exists: name a folder" in again.stderr
    assert [path.name for path in home.iterdir() if "part" in path.name] == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        pytest.param(["102"], 66, "no job '102' that you may see", id="job"),
        pytest.param(["101", "--name", "z"], 65, "no sampler weights named 'z'", id="name"),
        pytest.param(["101", "--name", "a"], 65, "no sampler weights named 'a'", id="kind"),
    ],
)
def test_export_of_what_is_not_there_makes_nothing(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path, words: list[str], code: int, sentence: str
) -> None:
    serve(daemon, saved("a", "weights"), saved("b"))
    done = plexrl("state", "export", words[0], "out", *words[1:])
    assert (done.exit_code, sentence in done.stderr, len(done.stderr.splitlines())) == (
        code,
        True,
        1,
    )
    assert not (home / "out").exists()


def test_export_without_any_weights_says_what_makes_them(
    plexrl: Plexrl, daemon: FakeDaemon
) -> None:
    serve(daemon)
    done = plexrl("state", "export", "101", "out")
    assert done.exit_code == 65 and "save_weights_for_sampler(name) makes them" in done.stderr


def test_damaged_weights_are_not_exported(plexrl: Plexrl, daemon: FakeDaemon, home: Path) -> None:
    serve(daemon, saved("b"))
    serve_files(daemon, {"model.safetensors": b"01234"}, model="0" * 64)
    done = plexrl("state", "export", "101", "out")
    assert done.exit_code == 65 and "model.safetensors is damaged" in done.stderr
    assert [path.name for path in home.iterdir() if "out" in path.name] == []


def test_a_full_disk_is_one_sentence(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(daemon, saved("b"))
    serve_files(daemon, {"model.safetensors": b"01234"})
    real = state_export.os.statvfs  # type: ignore[attr-defined]

    class Full:
        f_bavail, f_frsize = 0, real("/").f_frsize

    monkeypatch.setattr(state_export.os, "statvfs", lambda _: Full)  # type: ignore[attr-defined]
    done = plexrl("state", "export", "101", "out")
    assert (done.exit_code, len(done.stderr.splitlines())) == (74, 1), done.stderr
    assert not (home / "out").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(errno.ENOSPC, 74), (errno.EDQUOT, 74), (errno.EACCES, 77)]
)
def test_a_disk_that_refuses_in_the_middle_leaves_nothing_behind(
    plexrl: Plexrl,
    daemon: FakeDaemon,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: int,
) -> None:
    serve(daemon, saved("b"))
    serve_files(daemon, {"a.json": b"{}", "model.safetensors": b"01234"})
    synced: list[int] = []

    def refuse(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(state_export.os, "fsync", refuse)  # type: ignore[attr-defined]
    done = plexrl("state", "export", "101", "out")
    said = [line for line in done.stderr.splitlines() if "exporting" not in line]  # slow machine
    assert (done.exit_code, len(said)) == (code, 1), done.stderr
    assert [path.name for path in home.iterdir() if "out" in path.name] == []


def test_a_folder_that_appears_meanwhile_is_left_alone(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path
) -> None:
    serve(daemon, saved("b"))
    serve_files(daemon, {"model.safetensors": b"01234"})
    served = daemon.answers["GET /jobs/1/state/piece"]

    def piece() -> Any:
        (home / "out").mkdir(exist_ok=True)
        return served()

    daemon.answers["GET /jobs/1/state/piece"] = piece
    done = plexrl("state", "export", "101", "out")
    assert done.exit_code == 65 and "exists" in done.stderr
    assert list((home / "out").iterdir()) == []
    assert [path.name for path in home.iterdir() if "part" in path.name] == []


def test_a_folder_that_holds_no_model_is_not_imported(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path
) -> None:
    serve(daemon)
    missing = plexrl("state", "import", "101", "nowhere")
    assert missing.exit_code == 65 and "there is no folder nowhere" in missing.stderr
    (home / "empty").mkdir()
    empty = plexrl("state", "import", "101", "empty")
    assert empty.exit_code == 65 and "empty has no weights" in empty.stderr
    several = plexrl("state", "import", "101,101", "empty")
    assert several.exit_code in (2, 65)


@pytest.mark.parametrize(("subject", "deployment"), [("101", ""), ("s1-1:train:0", "s1-1:train:0")])
def test_evict_takes_a_job_or_a_deployment(
    plexrl: Plexrl, daemon: FakeDaemon, subject: str, deployment: str
) -> None:
    serve(daemon)
    row = {"id": "s1-1:train:0", "node": "n1", "to": "durable", "bytes": 7}
    daemon.answers["POST /jobs/1/state/evict"] = {"job_id": 1, "evicted": [row]}
    done = plexrl("state", "evict", subject, "--to", "durable", "--json")
    assert json.loads(done.stdout)["evicted"] == [row]
    assert daemon.body("POST /jobs/1/state/evict") == {"deployment": deployment, "to": "durable"}
    assert "s1-1:train:0 n1 durable 7" in " ".join(plexrl("state", "evict", subject).stdout.split())


def test_evict_says_why_an_image_stays(plexrl: Plexrl, daemon: FakeDaemon) -> None:
    serve(daemon)
    said = {"error": "s1-1:train:0 stays where it is: its node has no nvme_dir", "exit_code": 65}
    daemon.answers["POST /jobs/1/state/evict"] = (400, said)
    done = plexrl("state", "evict", "101")
    assert done.exit_code == 65 and "has no nvme_dir" in done.stderr
    unknown = plexrl("state", "evict", "x:y")
    assert unknown.exit_code == 65 and "neither a job nor a deployment" in unknown.stderr

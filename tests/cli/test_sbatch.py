"""plexrl sbatch: what is submitted, what is refused, and that nothing stays behind."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.core.errors import SlurmRejected
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.local import LocalSlurm
from plexrl_slurm.slurm.port import BatchJob
from tests.cli.conftest import FakeDaemon, make_job

Plexrl = Callable[..., Result]

SCRIPT = """#!/bin/sh
#SBATCH --job-name=count --account=physics
#SBATCH --gpus=4 --mem=1G
#PLEXRL --model=tiny --seed=5
python grpo_count.py
"""


@pytest.fixture
def script(home: Path) -> Path:
    path = home / "count.sh"
    path.write_text(SCRIPT)
    return path


def held_jobs(home: Path) -> list[Path]:
    """Jobs of the local adapter that were not cancelled."""
    found = (home / "state" / "local").glob("*/job.json")
    return [path.parent for path in found if not (path.parent / "cancelled").exists()]


def test_a_job_is_queued_submitted_held_and_bound(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path, home: Path
) -> None:
    done = plexrl("sbatch", "-t", "10", "count.sh", "--steps", "3")
    assert (done.exit_code, done.stdout) == (0, "Submitted batch job 1\n")
    assert daemon.routes() == ["POST /jobs", "POST /jobs/7/bind"]
    assert daemon.body("POST /jobs") == {
        "partition": "rlvr",
        "name": "count",
        "account": "physics",
        "models": ["tiny"],
        "priority": 1,
        "seed": 5,
        "script": "count.sh",
        "options": {"time_limit_us": "600000000"},
    }
    assert daemon.body("POST /jobs/7/bind") == {"slurm_id": "1"}
    (job,) = held_jobs(home)
    facts = json.loads((job / "job.json").read_text())
    assert not (job / "released").exists()
    assert facts["arguments"] == ["--steps", "3"]
    assert facts["environment"]["TINKER_API_KEY"] == "tml-x"
    assert facts["environment"]["PATH"] == os.environ["PATH"]
    assert (facts["workdir"], facts["time_limit_us"]) == (str(home), 600_000_000)
    assert "#SBATCH --mem=1G" in (job / "script").read_text()


def test_what_is_left_out_is_said_on_standard_error(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path
) -> None:
    done = plexrl("sbatch", "-G", "2", "count.sh")
    assert "left out --gpus=4, --gpus=2: the GPUs come from partition rlvr" in done.stderr
    assert "no effect: --mem=1G: partition rlvr runs without Slurm" in done.stderr


def test_parsable_and_json_answers(plexrl: Plexrl, daemon: FakeDaemon, script: Path) -> None:
    assert plexrl("sbatch", "--parsable", "count.sh").stdout == "1\n"
    answer = json.loads(plexrl("sbatch", "--json", "count.sh").stdout)
    assert (answer["job_id"], answer["slurm_id"], answer["models"]) == (7, "2", ["tiny"])


def test_the_command_line_beats_the_environment_and_that_the_script(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_JOB_NAME", "from-env")
    monkeypatch.setenv("SBATCH_ACCOUNT", "env-account")
    monkeypatch.setenv("PLEXRL_SBATCH_PRIORITY", "9")
    plexrl("sbatch", "-J", "from-line", "--seed=6", "--model=a", "--max-slowdown=1.5", "count.sh")
    asked = daemon.body("POST /jobs")
    assert (asked["name"], asked["account"]) == ("from-line", "env-account")
    assert (asked["seed"], asked["priority"], asked["models"]) == (6, 9, ["a"])
    assert asked["options"] == {"max_slowdown": "1.5"}


def test_wrap_and_standard_input(plexrl: Plexrl, daemon: FakeDaemon, home: Path) -> None:
    assert plexrl("sbatch", "--wrap", "echo hi").exit_code == 0
    assert plexrl("sbatch", input="#!/bin/sh\necho ho\n").exit_code == 0
    assert [body["name"] for _, path, body in daemon.asked if path == "/jobs"] == ["wrap", "sbatch"]
    scripts = sorted((home / "state" / "local").glob("*/script"))
    assert scripts[0].read_text().endswith("\necho hi\n")
    assert scripts[1].read_text() == "#!/bin/sh\necho ho\n"


def test_export_chooses_the_environment(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "1")
    plexrl("sbatch", "--export=NONE", "--wrap=true")
    plexrl("sbatch", "--export=MINE,EXTRA=2", "--wrap=true")
    first, second = (
        json.loads(path.read_text())["environment"]
        for path in sorted((home / "state" / "local").glob("*/job.json"))
    )
    assert "MINE" not in first
    assert (second["MINE"], second["EXTRA"]) == ("1", "2")
    assert first["TINKER_API_KEY"] == second["TINKER_API_KEY"] == "tml-x"


def test_wait_ends_with_the_jobs_exit_code(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path
) -> None:
    states = iter(["pending", "running", "failed"])
    daemon.answers["GET /jobs"] = lambda: {
        "jobs": [make_job(7, slurm_id="1", state=next(states), exit_code=3)]
    }
    assert plexrl("sbatch", "--wait", "count.sh").exit_code == 3


def test_a_restart_of_the_daemon_does_not_end_a_wait(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path
) -> None:
    down = (503, {"error": "starting", "exit_code": 69})
    answers = iter([down, {"jobs": [make_job(7, slurm_id="1", state="completed", exit_code=0)]}])
    daemon.answers["GET /jobs"] = lambda: next(answers)
    assert plexrl("sbatch", "--wait", "count.sh").exit_code == 0


def test_test_only_checks_and_submits_nothing(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path, home: Path
) -> None:
    daemon.answers["GET /nodes"] = {"models": [{"name": "tiny"}]}
    done = plexrl("sbatch", "--test-only", "count.sh")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "count.sh is fine for partition rlvr (models: tiny)" in done.stderr
    told = json.loads(plexrl("sbatch", "--test-only", "--json", "count.sh").stdout)
    assert (told["name"], told["submitted"]) == ("count", False)
    refused = plexrl("sbatch", "--test-only", "--model=huge", "count.sh")
    assert refused.exit_code == 65
    assert "unknown model 'huge'; this partition offers: tiny" in refused.stderr
    daemon.answers["GET /nodes"] = {"models": [{"name": "tiny"}], "qos": ["fast", "normal"]}
    assert plexrl("sbatch", "--test-only", "--qos=fast", "count.sh").exit_code == 0
    refused = plexrl("sbatch", "--test-only", "--qos=nope", "count.sh")
    assert refused.exit_code == 65
    assert (
        "unknown qos 'nope'; this partition has fast, normal: submit with one of these"
        in refused.stderr
    )
    assert daemon.routes() == ["GET /nodes"] * 5
    assert held_jobs(home) == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(None, "no such file", id="missing"),
        pytest.param(b"", "batch script is empty", id="empty"),
        pytest.param(b"\x7fELF\0", "NUL", id="binary"),
        pytest.param(b"#!/bin/sh\r\necho\r\n", "DOS line breaks", id="CRLF"),
        pytest.param(b"echo\n", "bad.sh:1: this does not look like a batch script", id="shebang"),
        pytest.param(
            b"#!/bin/sh\n#PLEXRL --modle=x\n",
            "bad.sh:2: unknown #PLEXRL option --modle; did you mean --model?",
            id="unknown option",
        ),
        pytest.param(b"#!/bin/sh\n#PLEXRL\n", "bad.sh:2: malformed #PLEXRL", id="malformed"),
    ],
)
def test_a_bad_script_is_one_sentence_and_asks_the_daemon_nothing(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path, data: bytes | None, words: str
) -> None:
    if data is not None:
        (home / "bad.sh").write_bytes(data)
    done = plexrl("sbatch", "bad.sh")
    assert done.exit_code == 65
    assert done.stderr.startswith("plexrl: error: bad.sh")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert daemon.asked == []


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        pytest.param(["--wrap=x", "count.sh"], 65, "leave the script out", id="wrap and script"),
        pytest.param(["-D", "none", "count.sh"], 65, "there is no such folder", id="chdir"),
        pytest.param(["-o", "none/x", "count.sh"], 65, "for the output none/x", id="output"),
        pytest.param(["-t", "soon", "count.sh"], 2, "invalid time limit 'soon'", id="time"),
        pytest.param(["--seed", "x", "count.sh"], 2, "seed 'x' is not", id="seed"),
        pytest.param(["-p", "other", "count.sh"], 65, "unknown partition 'other'", id="partition"),
        pytest.param(["--nice", "count.sh"], 2, "No such option", id="option"),
    ],
)
def test_a_bad_command_line_is_one_sentence(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path, words: list[str], code: int, sentence: str
) -> None:
    done = plexrl("sbatch", *words)
    assert (done.exit_code, daemon.asked) == (code, [])
    assert done.stderr.startswith("plexrl: error: ")
    assert sentence in done.stderr


def test_an_unknown_partition_in_the_script_is_refused(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path
) -> None:
    (home / "job.sh").write_text("#!/bin/sh\n#SBATCH -p nowhere\ntrue\n")
    done = plexrl("sbatch", "job.sh")
    assert done.exit_code == 65
    assert "unknown partition 'nowhere'; known here: rlvr" in done.stderr


def test_without_a_daemon_nothing_is_left_behind(plexrl: Plexrl, script: Path, home: Path) -> None:
    done = plexrl("sbatch", "count.sh")
    assert done.exit_code == 69
    assert "does not answer" in done.stderr
    assert "plexrl partition up" in done.stderr
    assert not (home / "state").exists()


def test_the_daemons_refusal_keeps_its_sentence_and_exit_code(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path, home: Path
) -> None:
    sentence = "unknown model 'tiny'; this partition offers: small"
    daemon.answers["POST /jobs"] = (404, {"error": sentence, "exit_code": 65})
    done = plexrl("sbatch", "count.sh")
    assert done.exit_code == 65
    assert done.stderr.splitlines()[-1] == f"plexrl: error: {sentence}"
    assert held_jobs(home) == []


def test_an_answer_that_is_no_json_names_the_log(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path
) -> None:
    daemon.answers["POST /jobs"] = (502, b"<html>")
    done = plexrl("sbatch", "count.sh")
    assert done.exit_code == 70
    assert "answered 502" in done.stderr
    assert "partitiond.log" in done.stderr


def test_when_slurm_refuses_the_queue_row_is_cancelled(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: LocalSlurm, _job: BatchJob, *, hold: bool) -> SlurmId:
        assert hold
        raise SlurmRejected(("sbatch",), "Invalid qos specification\n")

    monkeypatch.setattr(LocalSlurm, "submit", refuse)
    done = plexrl("sbatch", "count.sh")
    assert done.exit_code == 1
    assert "plexrl: error: sbatch: Invalid qos specification" in done.stderr
    assert daemon.routes() == ["POST /jobs", "POST /jobs/7/cancel"]
    assert daemon.body("POST /jobs/7/cancel")["reason"].startswith("submission failed: sbatch")


def test_when_the_binding_fails_both_are_cancelled(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path, home: Path
) -> None:
    daemon.answers["POST /jobs/7/bind"] = (503, {"error": "database is locked", "exit_code": 75})
    done = plexrl("sbatch", "count.sh")
    assert done.exit_code == 75
    assert daemon.routes() == ["POST /jobs", "POST /jobs/7/bind", "POST /jobs/7/cancel"]
    assert held_jobs(home) == []


def test_what_cannot_be_undone_is_said_and_the_first_error_is_shown(
    plexrl: Plexrl, daemon: FakeDaemon, script: Path
) -> None:
    daemon.answers["POST /jobs/7/bind"] = (503, {"error": "first", "exit_code": 75})
    daemon.answers["POST /jobs/7/cancel"] = (503, {"error": "second", "exit_code": 1})
    done = plexrl("sbatch", "count.sh")
    assert done.exit_code == 75
    assert "queue row 7 could not be taken back (second)" in done.stderr
    assert done.stderr.splitlines()[-1] == "plexrl: error: first"


def test_a_qos_comes_from_the_command_line_or_the_script(
    plexrl: Plexrl, daemon: FakeDaemon, home: Path
) -> None:
    (home / "fast.sh").write_text("#!/bin/sh\n#PLEXRL --qos=fast\ntrue\n")
    for words, qos in (((), "fast"), (("-q", "slow"), "slow"), (("--plexrl-qos=x",), "x")):
        daemon.asked.clear()
        assert plexrl("sbatch", *words, "fast.sh").exit_code == 0
        assert daemon.body("POST /jobs")["options"] == {"qos": qos}

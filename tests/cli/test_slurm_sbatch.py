"""plexrl sbatch with Slurm programs that do as they are told; tests/slurm_live has real ones."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from click.testing import Result

from plexrl_slurm.cli.slurm_export import exported
from tests.cli.conftest import CONFIG, FakeDaemon
from tests.tree import ROOT

Plexrl = Callable[..., Result]

SLURM = '[hold]\nbackend = "slurm"\n[slurm]\ntimeout_seconds = 1\n'
SCRIPT = "#!/bin/sh\n#SBATCH --gpus=4 -J count\n#PLEXRL --model=tiny --seed=5\ntrue\n"
#: Says what it was given and answers as sbatch does.
SBATCH = """#!/bin/sh
printf '%s\\n' "$@" > argv
env > environment
echo $$ > session
case "$*" in *--help*) cat help; exit;; esac
{body}
"""
QUEUED = "echo Submitted batch job 55"
SCONTROL = "#!/bin/sh\necho 'ClusterName = here'\necho 'TaskProlog = /etc/prolog'\n"


class Fakes:
    """Programs on PATH."""

    def __init__(self, home: Path) -> None:
        self.home = home
        (home / "bin").mkdir()
        self.program("scancel", '#!/bin/sh\necho "$@" > cancelled\n')
        self.program("scontrol", SCONTROL)
        self.program("squeue", "#!/bin/sh\nexit 1\n")
        self.sbatch(QUEUED)
        (home / "help").write_text("      --container-image=X  image\n      --writable  yes\n")

    def program(self, name: str, text: str) -> None:
        (self.home / "bin" / name).write_text(text)
        (self.home / "bin" / name).chmod(0o755)

    def sbatch(self, body: str) -> None:
        self.program("sbatch", SBATCH.format(body=body))

    def argv(self) -> list[str]:
        return (self.home / "argv").read_text().splitlines()

    def environment(self) -> Mapping[str, str]:
        lines = (self.home / "environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def slurm(home: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    (home / "plexrl.toml").write_text(CONFIG + SLURM)
    (home / "count.sh").write_text(SCRIPT)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith(("SBATCH_", "SLURM_"))]:
        monkeypatch.delenv(name)
    return Fakes(home)


def test_options_keep_their_order_and_their_words(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes
) -> None:
    words = ["-vt", "5", "--seed=6", "--comment", "a  b", "-p", "rlvr", "-Gx", "--mem=1", "--json"]
    done = plexrl("sbatch", *words, "--model", "big", "--", "count.sh", "-G", "2")
    assert done.exit_code == 0
    given = slurm.argv()
    assert given[:-3] == ["-vt", "5", "--comment", "a  b", "--mem=1", "--hold", "--"]
    assert (Path(given[-3]).name, given[-2:]) == ("count.sh", ["-G", "2"])
    asked = daemon.body("POST /jobs")
    assert (asked["seed"], asked["models"]) == (6, ["big"])


def test_our_options_have_variables_of_their_own(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLEXRL_SBATCH_MODELS", "a b")
    monkeypatch.setenv("PLEXRL_SBATCH_PRIORITY", "9")
    monkeypatch.setenv("SBATCH_JOB_NAME", "named")
    assert plexrl("sbatch", "--priority=7", "count.sh").exit_code == 0
    asked = daemon.body("POST /jobs")
    assert (asked["models"], asked["priority"], asked["name"]) == (["a", "b"], 9, "named")
    assert "--priority=7" in slurm.argv()  # Slurm's own


def test_our_qos_is_not_slurms_and_the_time_limit_is_told_to_both(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--qos=long", "--plexrl-qos", "fast", "-t", "1:30", "count.sh"]
    assert plexrl("sbatch", *words).exit_code == 0
    assert daemon.body("POST /jobs")["options"] == {"qos": "fast", "time_limit_us": "90000000"}
    assert slurm.argv()[:3] == ["--qos=long", "-t", "1:30"]
    daemon.asked.clear()
    monkeypatch.setenv("PLEXRL_SBATCH_QOS", "slow")
    assert plexrl("sbatch", "--time=nonsense", "count.sh").exit_code == 0  # sbatch's to judge
    assert daemon.body("POST /jobs")["options"] == {"qos": "slow"}
    done = plexrl("sbatch", "--plexrl-qos=a b", "count.sh")
    assert done.exit_code == 2
    assert "qos 'a b' is not a name" in done.stderr


def test_options_of_the_sites_plugins_are_known(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes
) -> None:
    words = ["--container-image", "x", "--writable", "count.sh"]
    assert plexrl("sbatch", *words).exit_code == 0
    assert slurm.argv()[:3] == words[:3]
    done = plexrl("sbatch", "--unwritable", "count.sh")
    assert done.exit_code == 2
    assert "No such option '--unwritable': sbatch has none either" in done.stderr


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        ("ALL", "ALL"),
        ("all,A=1", "all,A=1"),
        ("A=1,B", "A=1,B,KEY,URL"),
        ("NONE", "KEY,URL"),
        ("NIL", "KEY,URL"),
        ("", "KEY,URL"),
    ],
)
def test_export_gets_the_names_of_what_the_job_needs(given: str, passed: str) -> None:
    assert exported(given, ("KEY", "URL")) == passed


def test_the_scripts_own_export_counts_where_nobody_says_otherwise(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "job.sh").write_text("#!/bin/sh\n#SBATCH --export=MINE\ntrue\n")
    plexrl("sbatch", "job.sh")
    assert "--export=MINE,TINKER_API_KEY" in slurm.argv()
    assert slurm.environment()["TINKER_API_KEY"] == "tml-x"
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    plexrl("sbatch", "job.sh")
    assert "--export=TINKER_API_KEY" in slurm.argv()
    plexrl("sbatch", "--export=ALL", "job.sh")
    assert [word for word in slurm.argv() if word.startswith("--export")] == [
        "--export=ALL",
        "--export=ALL",
    ]


def test_an_array_goes_without_credentials_if_its_tasks_get_theirs(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"TINKER_API_KEY": "tml-x", "PLEXRL_JOB_ID": "7", "PLEXRL_PARTITION": "rlvr"}
    daemon.answers["POST /jobs"] = {"job_id": 7, "token": "tml-x", "env": env}
    assert plexrl("sbatch", "-a", "1-3", "--export=MINE", "count.sh").exit_code == 0
    assert not {"TINKER_API_KEY", "PLEXRL_JOB_ID"} & set(slurm.environment())
    assert "--export=MINE,PLEXRL_PARTITION" in slurm.argv()
    slurm.program("scontrol", SCONTROL.replace("/etc/prolog", "(null)"))
    monkeypatch.setenv("SBATCH_ARRAY_INX", "1-3")
    daemon.asked.clear()
    done = plexrl("sbatch", "count.sh")
    assert (done.exit_code, daemon.asked) == (65, [])
    assert "--array needs a TaskProlog" in done.stderr


def test_a_job_that_cannot_be_bound_is_cancelled_with_its_row(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes, home: Path
) -> None:
    daemon.answers["POST /jobs/7/bind"] = (503, {"error": "not now", "exit_code": 75})
    done = plexrl("sbatch", "count.sh")
    assert (done.exit_code, done.stdout) == (75, "")
    assert (home / "cancelled").read_text() == "55\n"
    assert daemon.body("POST /jobs/7/cancel")["reason"] == "submission failed: not now"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        pytest.param("echo sbatch: error: no >&2; exit 3", 3, "sbatch: error: no", id="refused"),
        pytest.param("echo all is well", 1, "", id="no number"),
        pytest.param("kill -9 $$", 137, "", id="killed"),
    ],
)
def test_sbatchs_refusal_is_its_own_and_the_row_is_taken_back(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes, body: str, code: int, words: str
) -> None:
    slurm.sbatch(body)
    done = plexrl("sbatch", "count.sh")
    assert (done.exit_code, words in done.stderr) == (code, True)
    assert "plexrl: error" not in done.stderr
    assert daemon.routes() == ["POST /jobs", "POST /jobs/7/cancel"]


LOST = "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"
FOUND = '#!/bin/sh\necho "54|1|h"\necho "55|$(cat session)|h"\n'


def test_a_lost_answer_is_looked_for_by_the_session(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes
) -> None:
    slurm.program("squeue", FOUND)
    for body in (LOST, "sleep 60"):
        slurm.sbatch(body)
        daemon.asked.clear()
        done = plexrl("sbatch", "count.sh")
        assert "but job 55 is queued" in done.stderr
        assert daemon.body("POST /jobs/7/bind") == {"slurm_id": "55"}


def test_what_is_not_known_is_said(plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes) -> None:
    for body in (LOST, "sleep 60"):
        slurm.sbatch(body)
        daemon.asked.clear()
        done = plexrl("sbatch", "count.sh")
        assert done.exit_code != 0
        assert "whether Slurm queued count is not known: when it answers again" in done.stderr
        assert daemon.routes() == ["POST /jobs", "POST /jobs/7/cancel"]


def test_the_scripts_partition_chooses_among_several(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes, home: Path
) -> None:
    folder = home / "home" / ".config" / "plexrl"
    folder.mkdir(parents=True)
    text = CONFIG.replace('"state"', f'"{home}/state"')
    (folder / "a.toml").write_text(text.replace('"rlvr"', '"other"'))
    (folder / "b.toml").write_text(text + SLURM)
    (home / "plexrl.toml").unlink()
    (home / "job.sh").write_text("#!/bin/sh\n#SBATCH -p rlvr -t 5\ntrue\n")
    assert plexrl("sbatch", "job.sh").exit_code == 0
    assert daemon.body("POST /jobs")["partition"] == "rlvr"
    # Slurm hears nothing of it: its own partition of that name is for plain sbatch.
    assert slurm.argv() == ["--hold", slurm.argv()[1]]
    done = plexrl("sbatch", input="#!/bin/sh\n#SBATCH -p other\ntrue\n")
    assert done.stdout.startswith("Submitted batch job 1\n")  # without Slurm


def test_a_script_is_found_where_sbatch_finds_it(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes, home: Path
) -> None:
    (home / "bin" / "tool.sh").write_text(SCRIPT)
    (home / "sub").mkdir()
    (home / "sub" / "deep.sh").write_text("#!/bin/sh\ntrue\n")
    assert plexrl("sbatch", "tool.sh").exit_code == 0
    assert plexrl("sbatch", "-D", "sub", "deep.sh").exit_code == 0
    assert slurm.argv() == ["-D", "sub", "--hold", "deep.sh"]


def test_submitting_imports_only_what_it_needs() -> None:
    # Each of these takes longer than the whole submission may: see benchmarks/sbatch_prompt.py.
    slow = ("httpx", "ssl", "asyncio", "plexrl_slurm.settings", "plexrl_slurm.slurm.port")
    code = (
        "import sys\n"
        "from plexrl_slurm.cli import client, main, sbatch, slurm_process, slurm_submit\n"
        f"print([name for name in {slow!r} if name in sys.modules])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_help_is_ours_and_version_is_sbatchs(
    plexrl: Plexrl, daemon: FakeDaemon, slurm: Fakes
) -> None:
    assert "Seed of the job's samples" in plexrl("sbatch", "--mail-type=END", "--help").stdout
    slurm.sbatch("echo slurm 99")
    assert plexrl("sbatch", "-V").stdout == "slurm 99\n"
    assert daemon.asked == []

"""plexrl sbatch on a real Slurm: what sbatch is given, what it answers, what is undone.

The daemon is a fake: what the real one does with a bound job is tested elsewhere.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.commands import CommandsSlurm
from tests.cli.conftest import FakeDaemon
from tests.slurm_live import processes, python
from tests.slurm_live.cluster import Cluster, wait_for

pytestmark = pytest.mark.slurm

CONFIG = """
[partition]
name = "rlvr"
state_dir = "{folder}/state"
host_dir = "/dev/shm/plexrl-sbatch-test"
host_bytes = "1GiB"
listen = "127.0.0.1:0"

[hold]
backend = "slurm"

[slurm]
conf = "{conf}"
{more}
"""
ENV = {"TINKER_API_KEY": "tml-secret", "TINKER_BASE_URL": "http://service", "PLEXRL_JOB_ID": "7"}
SCRIPT = """#!/bin/bash
#SBATCH --gpus-per-node=2 --comment="what  we do"
#SBATCH --gres=gpu:1
#PLEXRL --model=tiny --seed=5 --priority=3
echo key=$TINKER_API_KEY mine=$MINE args="$*"
exit ${CODE:-0}
"""


class Site:
    """A partition that has a Slurm, and alice, who submits to it."""

    def __init__(self, cluster: Cluster, folder: Path, more: str) -> None:
        folder.mkdir()
        folder.chmod(0o755)
        self.cluster = cluster
        self.home = cluster.home("plxalice")
        self.config = folder / "plexrl.toml"
        self.config.write_text(
            CONFIG.format(folder=folder, conf=cluster.slurm_conf, more=more), encoding="utf-8"
        )
        self.daemon = FakeDaemon(folder / "state" / "api.sock")
        (folder / "state" / "api.sock").chmod(0o777)
        self.daemon.answers["POST /jobs"] = {"job_id": 7, "token": "tml-secret", "env": ENV}

    @property
    def env(self) -> dict[str, str]:
        return {"PLEXRL_CONFIG": str(self.config), **python.environment()}

    def write(self, name: str, text: str) -> None:
        (self.home / name).write_text(text, encoding="utf-8")

    def plexrl(self, *words: str, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        self.daemon.asked.clear()
        return self.cluster.run(
            "plxalice",
            [python.interpreter(), "-m", "plexrl_slurm.cli.main", *words],
            env={**self.env, **env},
            stdin=stdin,
            seconds=60,
            check=False,
        )

    def submit(self, *words: str, stdin: str = "", **env: str) -> str:
        """Number of the job."""
        done = self.plexrl("sbatch", "--parsable", *words, stdin=stdin, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def facts(self, job: str) -> dict[str, str]:
        """``scontrol show job``, its words cut at blanks."""
        said = self.cluster.run("root", ["scontrol", "-o", "show", "job", job]).stdout
        return dict(word.split("=", 1) for word in said.split(" ") if "=" in word)

    def queue(self) -> list[str]:
        return self.cluster.run("root", ["squeue", "-h", "-o", "%i"]).stdout.split()

    def output(self, job: str, *, file: str | None = None) -> str:
        """What the job writes when it is let go, as its owner may."""
        self.cluster.run("root", ["scontrol", "release", job])
        self.cluster.wait_job(job, "COMPLETED", "FAILED")
        return (self.home / (file or f"slurm-{job}.out")).read_text(encoding="utf-8")


@pytest.fixture
def site(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Site]:
    more = getattr(request, "param", 'controller_partition = "cpu"')
    found = Site(cluster, cluster.folder / f"site-{time.monotonic_ns()}", more)
    found.write("count.sh", SCRIPT)
    yield found
    found.daemon.close()
    cluster.run("root", ["scancel", "-u", "plxalice"])


def test_the_job_is_held_in_the_controllers_partition_with_its_credentials(site: Site) -> None:
    done = site.plexrl("sbatch", "-p", "rlvr", "-t", "7", "count.sh", "--steps", "a b", MINE="1")
    number = done.stdout.split()[-1]
    assert (done.returncode, done.stdout) == (0, f"Submitted batch job {number}\n")
    assert site.daemon.routes() == ["POST /jobs", "POST /jobs/7/bind"]
    assert site.daemon.body("POST /jobs/7/bind") == {"slurm_id": number}
    assert site.daemon.body("POST /jobs") == {
        "partition": "rlvr",
        "name": "count.sh",
        "account": "",
        "models": ["tiny"],
        "priority": 3,
        "seed": 5,
        "script": "count.sh",
        "options": {"time_limit_us": "420000000"},
    }
    facts = site.facts(number)
    assert (facts["JobName"], facts["Partition"], facts["TimeLimit"]) == (
        "count.sh",
        "cpu",
        "00:07:00",
    )
    assert (facts["JobState"], facts["Reason"]) == ("PENDING", "JobHeldUser")
    assert "gres/gpu" not in facts["TRES"]
    assert "left out --gpus-per-node=2, --gres=gpu:1: the GPUs come" in done.stderr
    kept = site.cluster.run("root", ["scontrol", "write", "batch_script", number, "-"]).stdout
    assert kept.splitlines()[1:3] == [
        '#SBATCH --comment="what  we do"',
        "##SBATCH --gres=gpu:1",
    ]
    assert site.output(number) == "key=tml-secret mine=1 args=--steps a b\n"


@pytest.mark.parametrize("site", [""], indirect=True)
def test_without_a_controller_partition_the_users_own_or_slurms_default_is_taken(
    site: Site,
) -> None:
    site.write("ours.sh", "#!/bin/sh\n#SBATCH -p rlvr -J ours\ntrue\n")
    # Slurm has a partition rlvr too: it is for plain sbatch.
    assert site.facts(site.submit("-p", "rlvr", "count.sh"))["Partition"] == "cpu"
    assert site.facts(site.submit("ours.sh"))["Partition"] == "cpu"
    assert site.facts(site.submit("--wrap=true", SBATCH_PARTITION="rlvr"))["Partition"] == "cpu"
    assert site.facts(site.submit("-p", "preemptable", "ours.sh"))["Partition"] == "preemptable"
    assert site.daemon.body("POST /jobs")["partition"] == "rlvr"


def test_another_partition_than_ours_is_refused_where_the_site_has_chosen(site: Site) -> None:
    done = site.plexrl("sbatch", "-p", "gpu", "count.sh")
    assert (done.returncode, site.daemon.asked) == (65, [])
    assert "unknown partition 'gpu'; known here: rlvr" in done.stderr
    assert site.facts(site.submit("-p", "cpu", "count.sh"))["Partition"] == "cpu"


def test_everything_else_is_sbatchs_business(site: Site) -> None:
    first = site.submit("--wrap=true")
    job = site.submit(
        *("--dep", f"afterany:{first}", "-Aresearch", "-c2", "-J", "my job", "--mail-type=END"),
        *("--mail-user", "a@b", "-o", "out-%j-%x.txt", "--nice=3", "--requeue", "count.sh"),
        SBATCH_TIMELIMIT="9",
    )
    facts = site.facts(job)
    assert facts["Dependency"].startswith(f"afterany:{first}")
    assert (facts["Account"], facts["NumCPUs"], facts["TimeLimit"]) == (
        "research",
        "2",
        "00:09:00",
    )
    assert (facts["MailUser"], facts["Requeue"]) == ("a@b", "1")
    assert facts["StdOut"] == f"{site.home}/out-{job}-my"  # and " job.txt"
    asked = site.daemon.body("POST /jobs")
    assert (asked["name"], asked["account"]) == ("my job", "research")
    site.cluster.run("root", ["scancel", first])
    assert "key=tml-secret" in site.output(job, file=f"out-{job}-my job.txt")


@pytest.mark.parametrize(
    ("export", "said"),
    [
        ("ALL", "key=tml-secret mine=1 args=\n"),
        ("NONE", "key=tml-secret mine= args=\n"),
        ("MINE,OTHER=2", "key=tml-secret mine=1 args=\n"),
        ("ALL,OTHER=3", "key=tml-secret mine=1 args=\n"),
    ],
)
def test_export_keeps_its_meaning_and_the_key_is_in_no_argument(
    site: Site, export: str, said: str
) -> None:
    job = site.submit(f"--export={export}", "count.sh", MINE="1", OTHER="x")
    shown = site.cluster.run("root", ["scontrol", "show", "job", job]).stdout
    assert "tml-secret" not in shown
    assert site.output(job) == said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--export-file=vars"], "key=tml-secret mine=file args=\n"),
        (["--export-file=7"], "key=tml-secret mine=file args=\n"),
        (["--export-file=vars", "--export=OTHER=1"], "key=tml-secret mine=file args=\n"),
        (["--export-file=vars", "--export=NONE"], "key=tml-secret mine= args=\n"),
    ],
)
def test_an_export_file_is_all_that_the_job_gets_and_its_key(
    site: Site, words: list[str], said: str
) -> None:
    (site.home / "vars").write_bytes(b"MINE=file\0TINKER_API_KEY=old\0")
    command = " ".join(("plexrl() {", python.interpreter(), '-m plexrl_slurm.cli.main "$@"; };'))
    line = f"{command} plexrl sbatch --parsable {' '.join(words)} count.sh 7<vars"
    done = site.cluster.run("plxalice", ["bash", "-c", line], env={**site.env, "MINE": "env"})
    assert site.output(done.stdout.strip()) == said


def test_the_secret_is_in_no_command_line(site: Site) -> None:
    # A sbatch that tells what it was given, before it does its work.
    (site.home / "bin").mkdir(exist_ok=True)
    spy = site.home / "bin" / "sbatch"
    spy.write_text(f'#!/bin/sh\necho "$@" > {site.home}/argv\nexec /usr/bin/sbatch "$@"\n')
    spy.chmod(0o755)
    (site.home / "argv").touch()
    (site.home / "argv").chmod(0o666)
    path = f"{site.home}/bin:/usr/bin:/bin"
    job = site.submit("--export=MINE", "--model=tiny", "--seed", "1", "count.sh", "x", PATH=path)
    given = (site.home / "argv").read_text().strip()
    names = ",".join(ENV)
    assert given.startswith("--parsable --export=MINE --hold --partition=cpu --export=MINE,")
    assert f"--export=MINE,{names} /tmp/plexrl-sbatch-" in given
    assert given.endswith("/count.sh x")
    assert "tml-secret" not in given
    assert "key=tml-secret" in site.output(job)
    assert not list(Path("/tmp").glob("plexrl-sbatch-*/count.sh"))


def test_a_script_without_gpus_is_given_to_sbatch_where_it_lies(site: Site) -> None:
    site.write("plain.sh", "#!/bin/sh\n#SBATCH -J p\ntrue\n")
    assert site.facts(site.submit("plain.sh"))["Command"] == f"{site.home}/plain.sh"


def test_a_script_may_come_by_standard_input_or_be_a_command(site: Site) -> None:
    by_stdin = site.submit("-o", "in.txt", stdin=SCRIPT, MINE="2")
    assert site.daemon.body("POST /jobs")["name"] == "sbatch"
    wrapped = site.submit("-o", "wrap.txt", "--wrap", 'echo "$TINKER_API_KEY" "a  b"')
    assert site.daemon.body("POST /jobs")["name"] == "wrap"
    assert site.facts(by_stdin)["JobName"] == "sbatch"
    assert site.output(by_stdin, file="in.txt") == "key=tml-secret mine=2 args=\n"
    assert site.output(wrapped, file="wrap.txt") == "tml-secret a  b\n"


def test_requests_for_gpus_in_options_and_variables_are_left_out(site: Site) -> None:
    done = site.plexrl(
        *("sbatch", "--parsable", "-QG2", "--gpus-per-t=1", "--wrap=true"),
        SBATCH_GPUS="4",
        SBATCH_GRES="gpu:1",
    )
    assert "left out SBATCH_GPUS=4, SBATCH_GRES=gpu:1, -G2, --gpus-per-t=1:" in done.stderr
    assert "gres/gpu" not in site.facts(done.stdout.strip())["TRES"]


def test_answers_are_sbatchs(site: Site) -> None:
    done = site.plexrl("sbatch", "-Qv", "--wrap=true")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    number = site.daemon.body("POST /jobs/7/bind")["slurm_id"]
    assert site.facts(number)["JobState"] == "PENDING"
    done = site.plexrl("sbatch", "--parsable", "-M", "plexrl", "--wrap=true")
    bound = site.daemon.body("POST /jobs/7/bind")["slurm_id"]
    assert done.stdout == f"{bound};plexrl\n"
    answer = json.loads(site.plexrl("sbatch", "--json", "count.sh").stdout)
    assert (answer["job_id"], answer["name"], answer["models"]) == (7, "count.sh", ["tiny"])
    assert answer["slurm_id"] in site.queue()
    assert site.plexrl("sbatch", "--version").stdout.startswith("slurm")
    assert "Seed of the job" in site.plexrl("sbatch", "-n1", "-h").stdout


def test_a_hold_of_the_users_own_is_told_to_the_daemon(site: Site) -> None:
    site.submit("-H", "--wrap=true")
    assert site.daemon.body("POST /jobs")["options"] == {"hold": "user"}
    site.submit("--max-slowdown=1.5", "--plexrl-priority=9", stdin="#!/bin/sh\n#SBATCH -H\ntrue\n")
    asked = site.daemon.body("POST /jobs")
    assert (asked["priority"], asked["options"]) == (9, {"max_slowdown": "1.5", "hold": "user"})


def test_an_array_is_one_submission_without_anybodys_key(site: Site) -> None:
    # The cluster has no TaskProlog; what that does is tested with plain sbatch.
    (site.home / "bin").mkdir(exist_ok=True)
    scontrol = site.home / "bin" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'TaskProlog = /etc/plexrl/prolog'\n")
    scontrol.chmod(0o755)
    path = f"{site.home}/bin:/usr/bin:/bin"
    array = site.submit("--array=1-2", "-o", "task-%a.txt", "count.sh", PATH=path)
    scontrol.unlink()
    assert site.daemon.body("POST /jobs/7/bind") == {"slurm_id": array}
    port = CommandsSlurm(site.cluster.slurm_conf)
    tasks = port.queued(SlurmId(array))
    assert [(number, each.user, each.account, each.name) for number, each in tasks.items()] == [
        (f"{array}_{index}", "plxalice", "research", "count.sh") for index in (1, 2)
    ]
    assert port.queued(SlurmId("99999")) == {}
    site.cluster.run("root", ["scontrol", "release", array])
    site.cluster.wait_job(array, "COMPLETED")
    assert (site.home / "task-2.txt").read_text() == "key= mine= args=\n"


def test_slurms_own_words_and_exit_code_when_it_refuses(site: Site) -> None:
    done = site.plexrl("sbatch", "-A", "nosuch", "count.sh")
    assert (done.returncode, done.stdout) == (1, "")
    words = "Batch job submission failed: Invalid account or account/partition combination"
    assert f"sbatch: error: {words} specified" in done.stderr
    assert "plexrl: error" not in done.stderr
    assert site.daemon.routes() == ["POST /jobs", "POST /jobs/7/cancel"]
    assert words in site.daemon.body("POST /jobs/7/cancel")["reason"]
    assert site.plexrl("sbatch", "--time=x", "count.sh").returncode == 255
    assert site.queue() == []


def test_a_bond_that_fails_takes_the_job_back(site: Site) -> None:
    site.daemon.answers["POST /jobs/7/bind"] = (409, {"error": "no such luck", "exit_code": 70})
    done = site.plexrl("sbatch", "count.sh")
    assert (done.returncode, done.stdout) == (70, "")
    assert done.stderr.splitlines()[-1] == "plexrl: error: no such luck"
    assert site.daemon.routes() == ["POST /jobs", "POST /jobs/7/bind", "POST /jobs/7/cancel"]
    assert site.queue() == []


def test_without_a_daemon_slurm_is_not_asked(site: Site) -> None:
    site.daemon.answers["POST /jobs"] = (503, {"error": "not now", "exit_code": 75})
    done = site.plexrl("sbatch", "count.sh")
    assert (done.returncode, site.queue()) == (75, [])


def test_wait_ends_as_sbatch_does(site: Site) -> None:
    words = [python.interpreter(), "-m", "plexrl_slurm.cli.main", "sbatch", "-W", "count.sh"]
    env = site.cluster.env("plxalice") | site.env | {"CODE": "5"}
    with subprocess.Popen(
        words, cwd=site.home, env=env, text=True, stdout=subprocess.PIPE, **alice()
    ) as waiting:
        assert waiting.stdout is not None
        number = waiting.stdout.readline().split()[-1]
        assert site.daemon.routes()[-1] == "POST /jobs/7/bind"
        site.cluster.run("root", ["scontrol", "release", number])
        assert waiting.wait(timeout=60) == 5


def test_test_only_asks_both_and_submits_nothing(site: Site) -> None:
    site.daemon.answers["GET /nodes"] = {"models": [{"name": "tiny"}]}
    done = site.plexrl("sbatch", "--test-only", "count.sh")
    assert (done.returncode, done.stdout) == (0, "")
    assert "count.sh is fine for partition rlvr (models: tiny)" in done.stderr
    assert "to start at" in done.stderr
    assert "in partition cpu" in done.stderr
    assert site.plexrl("sbatch", "--test-only", "--model=huge", "count.sh").returncode == 65
    assert site.plexrl("sbatch", "--test-only", "-N99", "count.sh").returncode == 1
    assert (site.daemon.routes(), site.queue()) == (["GET /nodes"], [])


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        pytest.param(["--array=1-3", "count.sh"], 65, "needs a TaskProlog", id="array"),
        pytest.param(["-M", "other", "count.sh"], 65, "are on cluster plexrl", id="cluster"),
        pytest.param(["-n1", ":", "-n1", "count.sh"], 65, "submit one component", id="het line"),
        pytest.param(["het.sh"], 65, "het.sh:2: a controller is one process", id="het script"),
        pytest.param(["--uid=root", "count.sh"], 65, "become that user", id="uid"),
        pytest.param(["--zebra", "count.sh"], 2, "No such option '--zebra'", id="unknown"),
        pytest.param(["--seed=x", "count.sh"], 2, "seed 'x' is not", id="seed"),
        pytest.param(["none.sh"], 65, "none.sh: no such file", id="no script"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_queued(
    site: Site, words: list[str], code: int, sentence: str
) -> None:
    site.write("het.sh", "#!/bin/sh\n#SBATCH hetjob\ntrue\n")
    done = site.plexrl("sbatch", *words)
    assert (done.returncode, done.stdout, site.daemon.asked) == (code, "", [])
    assert done.stderr.startswith("plexrl: error: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_site_without_its_programs_or_its_configuration_says_so(site: Site) -> None:
    done = site.plexrl("sbatch", "count.sh", PATH="/nonexistent")
    assert (done.returncode, site.daemon.asked) == (75, [])
    assert "there is no sbatch on PATH" in done.stderr
    text = site.config.read_text()
    site.config.write_text(text.replace("etc/slurm.conf", "etc/none.conf"))
    done = site.plexrl("sbatch", "count.sh")
    assert (done.returncode, site.daemon.asked) == (75, [])
    assert "etc/none.conf: correct SLURM_CONF, or `conf` in [slurm]" in done.stderr


def alice() -> dict[str, Any]:
    return processes.identity("plxalice")


def stubborn(site: Site, *, after: str) -> dict[str, str]:
    """Environment with an sbatch that does its work and then (or first) does not answer."""
    (site.home / "bin").mkdir(exist_ok=True)
    spy = site.home / "bin" / "sbatch"
    spy.write_text(f"#!/bin/sh\n{after}\n")
    spy.chmod(0o755)
    return {"PATH": f"{site.home}/bin:/usr/bin:/bin"}


@pytest.mark.parametrize(
    "site", ['controller_partition = "cpu"\ntimeout_seconds = 2'], indirect=True
)
def test_a_submission_that_got_no_answer_is_looked_for(site: Site) -> None:
    other = site.submit("-J", "other", "--wrap=true")
    env = stubborn(site, after='/usr/bin/sbatch "$@" >/dev/null; sleep 60')
    done = site.plexrl("sbatch", "--json", "count.sh", **env)
    number = json.loads(done.stdout)["slurm_id"]
    assert set(site.queue()) == {other, number}
    assert f"sbatch did not answer within 2 s, but job {number} is queued" in done.stderr
    assert site.daemon.body("POST /jobs/7/bind") == {"slurm_id": number}
    done = site.plexrl("sbatch", "count.sh", **stubborn(site, after="sleep 60"))
    assert done.returncode == 75
    assert "within 2 s, and Slurm has no job of it: try again later" in done.stderr
    assert site.daemon.routes() == ["POST /jobs", "POST /jobs/7/cancel"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_takes_everything_back(site: Site, how: signal.Signals) -> None:
    env = stubborn(site, after='/usr/bin/sbatch "$@" >/dev/null; touch done; sleep 60')
    (site.home / "done").unlink(missing_ok=True)
    with subprocess.Popen(
        [python.interpreter(), "-m", "plexrl_slurm.cli.main", "sbatch", "count.sh"],
        cwd=site.home,
        env=site.cluster.env("plxalice") | site.env | env,
        stderr=subprocess.PIPE,
        text=True,
        **alice(),
    ) as running:
        wait_for((site.home / "done").exists, "sbatch has submitted", seconds=20)
        assert site.queue() != []
        os.kill(running.pid, how)
        _, said = running.communicate(timeout=30)
    assert running.returncode == 130
    assert said.splitlines()[-1] == "plexrl: error: interrupted"
    assert site.queue() == []
    assert site.daemon.routes() == ["POST /jobs", "POST /jobs/7/cancel"]

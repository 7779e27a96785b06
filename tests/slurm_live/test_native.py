"""Plain ``sbatch -p rlvr`` on a real Slurm, with the files that ``plexrl admin install`` writes."""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from click.testing import CliRunner

from plexrl_slurm.cli.main import cli
from plexrl_slurm.slurm.native import Marked, read_mark
from plexrl_slurm.slurm.site_files import task_prolog
from tests.model_folders import make_model_folder
from tests.slurm_live.cluster import Cluster

pytestmark = pytest.mark.slurm

ALICE, SERVICE = "plxalice", "plxsvc"
SETTINGS = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "/dev/shm/plexrl-native-test"
host_bytes = "1GiB"

[slurm]
conf = "{conf}"
controller_partition = "cpu"
service_user = "plxsvc"

[hold]
backend = "slurm"
qos = "held"

[[hold.component]]
pool = "train"
partition = "gpu"

[[hold.component]]
pool = "rollout"
partition = "gpu"

[[wpg]]
pool = "train"
engine = "fake_train"

[[wpg]]
pool = "rollout"
engine = "fake_sample"

[[model]]
name = "{model}"
path = "models/tiny"
"""
SCRIPT = """#!/bin/bash
#SBATCH --output=%j.out
#PLEXRL --model=tiny --seed=7
echo key=$TINKER_API_KEY
srun bash -c 'echo step=$TINKER_API_KEY asked=$ASKED'
env | grep -E '^SLURM_.*(GPU|GRES)' | sed s/^/left=/
"""
#: Stands for plexrl in TaskProlog.
PLEXRL = """#!/bin/sh
[ "$FAIL" = yes ] && { echo broken >&2; exit 3; }
echo "export TINKER_API_KEY=tml-$SLURM_JOB_ID-${SLURM_ARRAY_TASK_ID:-none}"
echo "export ASKED=${ASKED}x"
"""


class Site:
    """A cluster of its own with our files beside its slurm.conf."""

    def __init__(self) -> None:
        self.cluster = Cluster.temporary(nodes=2, gpus=2)
        self.folder = self.cluster.folder
        self.conf_dir = self.cluster.slurm_conf.parent
        self.prolog = self.conf_dir / "plexrl_task_prolog.sh"
        self.cluster.settings["task_prolog"] = str(self.prolog)
        make_model_folder(self.folder / "models" / "tiny")
        self.settings = self.folder / "rlvr.toml"
        self.answer: dict[str, Any] = {}

    def install(self, model: str = "tiny") -> None:
        """What an administrator does, except that the unit goes elsewhere."""
        conf = self.cluster.slurm_conf
        self.settings.write_text(SETTINGS.format(conf=conf, model=model), encoding="utf-8")
        stage = self.folder / "stage"
        staged = stage / self.cluster.job_submit_script.relative_to("/")
        if staged.exists():
            shutil.copystat(self.cluster.job_submit_script, staged)
        argv = ["admin", "install", "--json", "--config", str(self.settings)]
        done = CliRunner().invoke(cli, [*argv, "--prefix", str(stage)])
        assert done.exit_code == 0, done.output
        self.answer = json.loads(done.stdout)
        shutil.copytree(stage / self.conf_dir.relative_to("/"), self.conf_dir, dirs_exist_ok=True)
        plexrl = self.folder / "plexrl"
        plexrl.write_text(PLEXRL, encoding="utf-8")
        plexrl.chmod(0o755)
        self.prolog.write_text(task_prolog({"rlvr": self.settings}, plexrl=plexrl))

    def put(self, loader: str) -> None:
        """Another job_submit.lua; slurmctld compares whole seconds."""
        place = self.cluster.job_submit_script
        stamp = int(max(time.time(), place.stat().st_mtime)) + 1
        place.write_text(loader)
        os.utime(place, (stamp, stamp))

    def refused(self, *argv: str, script: str = SCRIPT) -> str:
        """What the user reads."""
        done = self.cluster.run(ALICE, argv, stdin=script, check=False)
        assert done.returncode != 0
        return done.stderr

    def shown(self, job: str, field: str) -> str:
        words = self.cluster.run("root", ["scontrol", "show", "job", job]).stdout.split()
        return next((w.partition("=")[2] for w in words if w.startswith(f"{field}=")), "")

    def output(self, job: str) -> list[str]:
        self.cluster.wait_job(job, "COMPLETED")
        return (self.cluster.home(ALICE) / f"{job}.out").read_text().splitlines()

    def release(self, job: str) -> None:
        self.cluster.run(SERVICE, ["scontrol", "release", job])


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    made = Site()
    try:
        with made.cluster:
            made.install()
            yield made
    finally:
        shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_left(site: Site) -> Iterator[None]:
    yield
    site.cluster.run("root", ["scancel", "-u", ALICE])


def test_a_job_is_marked_held_moved_and_runs_with_credentials_when_released(site: Site) -> None:
    done = site.cluster.run(
        ALICE,
        ["sbatch", "--parsable", "-p", "rlvr", "--gres=gpu:2", "--cpus-per-gpu=1"],
        stdin=SCRIPT,
    )
    job = done.stdout.strip()
    assert done.stderr.startswith("sbatch: plexrl: left out gpu:2, ")
    assert read_mark(site.shown(job, "AdminComment")) == Marked(
        partition="rlvr", models=("tiny",), seed=7
    )
    assert site.shown(job, "Partition") == "cpu"
    assert site.shown(job, "Reason") == "JobHeldUser"
    site.release(job)
    assert site.output(job) == [f"key=tml-{job}-none", f"step=tml-{job}-none asked=x"]


def test_a_job_with_an_empty_environment_gets_its_credentials_too(site: Site) -> None:
    job = site.cluster.sbatch(ALICE, "-p", "rlvr", "--export=NONE", script=SCRIPT)
    site.release(job)
    assert site.output(job)[0] == f"key=tml-{job}-none"


def test_every_task_of_an_array_is_held_and_has_credentials_of_its_own(site: Site) -> None:
    script = SCRIPT.replace("%j", "%A_%a")
    env = {"TINKER_API_KEY": "tml-of-the-parent", "PLEXRL_JOB_ID": "1", "TINKER_BASE_URL": "u"}
    argv = ["sbatch", "--parsable", "-p", "rlvr", "--array=1-2"]
    array = site.cluster.run(ALICE, argv, stdin=script, env=env).stdout.strip()
    denied = site.cluster.run(ALICE, ["scontrol", "release", f"{array}_2"], check=False)
    assert "Access/permission denied" in denied.stderr
    assert set(site.cluster.state(array).split()) == {"PENDING"}
    site.release(f"{array}_1")
    site.cluster.wait_job(f"{array}_1", "COMPLETED")
    lines = (site.cluster.home(ALICE) / f"{array}_1.out").read_text().splitlines()
    assert lines[0].endswith("-1")
    assert lines[1].removeprefix("step=").startswith(lines[0].removeprefix("key="))
    assert "PENDING" in site.cluster.state(array)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("--seed", "--sead", "script:3: unknown #PLEXRL option --sead; did you mean --seed?"),
        ("tiny", "huge", "script:3: unknown model 'huge'; this partition offers: tiny"),
    ],
)
def test_a_mistake_is_refused_at_submission(site: Site, old: str, new: str, sentence: str) -> None:
    said = site.refused("sbatch", "-p", "rlvr", script=SCRIPT.replace(old, new))
    assert said.splitlines()[0] == f"sbatch: error: plexrl: {sentence}"
    assert site.cluster.run(ALICE, ["squeue", "-h", "--me"]).stdout == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["srun", "-p", "rlvr", "true"], "takes batch scripts only"),
        (["salloc", "-p", "rlvr", "true"], "takes batch scripts only"),
        (["sbatch", "-p", "rlvr", "--hold"], "--hold is not possible in partition rlvr"),
        (["sbatch", "-p", "gpu,rlvr"], "name one partition"),
    ],
)
def test_what_cannot_be_a_job_of_ours_is_refused(site: Site, argv: list[str], words: str) -> None:
    assert words in site.refused(*argv)


def test_a_heterogeneous_job_is_refused(site: Site) -> None:
    script = SCRIPT.replace("#PLEXRL", "#SBATCH -p cpu\n#SBATCH hetjob\n#SBATCH -p rlvr\n#PLEXRL")
    assert "no heterogeneous jobs" in site.refused("sbatch", script=script)


def test_the_owner_may_do_everything_but_let_it_go(site: Site) -> None:
    job = site.cluster.sbatch(ALICE, "-p", "rlvr", script=SCRIPT)
    for change in (["release", job], ["update", f"JobId={job}", "Priority=9"]):
        denied = site.cluster.run(ALICE, ["scontrol", *change], check=False)
        assert "Access/permission denied" in denied.stderr
    for comment in ("AdminComment=", "AdminComment=plexrl:1:rlvr:model=other"):
        site.cluster.run(ALICE, ["scontrol", "update", f"JobId={job}", comment], check=False)
    assert site.shown(job, "AdminComment") == "plexrl:1:rlvr:model=tiny;seed=7"
    site.cluster.run(ALICE, ["scontrol", "update", f"JobId={job}", "TimeLimit=1", "Comment=mine"])
    site.cluster.run(ALICE, ["scontrol", "hold", job])
    assert site.cluster.state(job) == "PENDING"
    site.cluster.run(ALICE, ["scancel", job])
    site.cluster.wait_job(job, "CANCELLED")


def test_jobs_of_other_partitions_are_not_touched(site: Site) -> None:
    done = site.cluster.run(
        ALICE, ["sbatch", "--parsable", "-p", "gpu", "--gres=gpu:1"], stdin=SCRIPT
    )
    assert "the #PLEXRL lines have no effect in this partition" in done.stderr
    job = done.stdout.strip()
    assert site.output(job)[:2] == ["key=", "step= asked="]
    assert site.shown(job, "AdminComment") == ""
    assert site.cluster.run(ALICE, ["srun", "-p", "gpu", "--gres=gpu:1", "true"]).stderr == ""


def test_a_task_prolog_that_finds_nobody_does_not_fail_the_job(site: Site) -> None:
    job = site.cluster.sbatch(ALICE, "-p", "rlvr", "--export=ALL,FAIL=yes", script=SCRIPT)
    site.release(job)
    first, *rest = site.output(job)
    assert first.startswith("plexrl: no credentials from ")
    assert rest == ["key=", "step= asked="]


def test_slurmctld_reads_a_changed_catalogue_by_itself(site: Site) -> None:
    job = site.cluster.sbatch(ALICE, "-p", "rlvr", script=SCRIPT)
    site.install(model="other")
    try:
        assert "this partition offers: other" in site.refused("sbatch", "-p", "rlvr")
        assert site.cluster.state(job) == "PENDING"
    finally:
        site.install()
    site.cluster.sbatch(ALICE, "-p", "rlvr", script=SCRIPT)


def test_a_broken_module_stops_nobody(site: Site) -> None:
    module = site.conf_dir / "plexrl.lua"
    text = module.read_text()
    module.write_text("this is not Lua")
    site.put(site.cluster.job_submit_script.read_text())
    try:
        site.cluster.run(ALICE, ["srun", "-p", "gpu", "true"])
    finally:
        module.write_text(text)
        site.put(site.cluster.job_submit_script.read_text())
    log = (site.folder / "log" / "slurmctld.log").read_text()
    assert "plexrl: " in log


def test_the_rules_of_the_site_come_first(site: Site) -> None:
    ours = site.cluster.job_submit_script.read_text()
    _, first, *rest = ours.splitlines()
    rule = 'if job.name == "no" then return slurm.ERROR end return slurm.SUCCESS'
    assert first.startswith("function slurm_job_submit(")
    site.put("\n".join([f"function slurm_job_submit(job) {rule} end", *rest]))
    try:
        assert "plexrl" not in site.refused("sbatch", "-p", "rlvr", "-J", "no")
        job = site.cluster.sbatch(ALICE, "-p", "rlvr", "-J", "yes", script=SCRIPT)
        assert site.shown(job, "AdminComment").startswith("plexrl:1:rlvr:")
    finally:
        site.put(ours)


def test_the_spank_option_declares_models(site: Site) -> None:
    source = files("plexrl_slurm.slurm") / "spank" / "plexrl.c"
    plugin = site.conf_dir / "plexrl_spank.so"
    argv = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(plugin)]
    subprocess.run([*argv, str(source)], check=True, timeout=60)
    stack = site.conf_dir / "plugstack.conf"
    stack.write_text(f"optional {plugin}\n")
    try:
        options = ("-p", "rlvr", "--export=NONE", "--plexrl-model=tiny")
        job = site.cluster.sbatch(ALICE, *options, script="#!/bin/sh\ntrue\n")
        assert read_mark(site.shown(job, "AdminComment")) == Marked(
            partition="rlvr", models=("tiny",)
        )
        said = site.refused("sbatch", "-p", "rlvr", "--plexrl-model=tiny", "--plexrl-model=x")
        assert "--plexrl-model: unknown model 'x'; this partition offers: tiny" in said
        in_script = SCRIPT.replace("#PLEXRL", "#SBATCH --plexrl-model=\n#PLEXRL")
        assert "--plexrl-model needs a name" in site.refused("sbatch", script=in_script)
    finally:
        stack.write_text("")


def test_slurms_accounting_takes_the_printed_commands(site: Site) -> None:
    for each in site.answer["commands"]:
        argv = shlex.split(each["command"])
        done = site.cluster.run("root", argv, check=False)
        assert done.returncode == 0 or "Nothing" in done.stdout + done.stderr, each["command"]
    asked = ["sacctmgr", "-nP", "show", "user", SERVICE, "withassoc", "format=admin,account,qos"]
    assert "Operator|plexrl|held,normal" in site.cluster.run("root", asked).stdout


def test_systemd_finds_no_fault_in_the_unit(site: Site) -> None:
    folder = site.folder / "stage" / "etc" / "systemd" / "system"
    unit = folder / "plexrl-partitiond@rlvr.service"
    shutil.copy(folder / "plexrl-partitiond@.service", unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "plexrl-partitiond" not in done.stderr, done.stderr

"""``plexrl doctor``: each mistake has its line, and its remedy."""

import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from plexrl_slurm.cli import doctor_daemon, doctor_host, doctor_slurm
from plexrl_slurm.cli.doctor import FAIL, OK, WARN, Check, Said, all_checks, as_text, examine
from plexrl_slurm.cli.doctor_facts import Facts
from plexrl_slurm.cli.main import cli
from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.db import schema
from plexrl_slurm.db.engine import open_database
from tests.model_folders import make_model_folder
from tests.munge import PrivateMunge

CONFIG = """
[partition]
name = "rlvr"
state_dir = "state"
host_dir = "/dev/shm/plexrl-doctor-test"
host_bytes = "1GiB"
listen = "127.0.0.1:{port}"
{partition}

[slurm]
conf = "slurm.conf"
controller_partition = "{controllers}"
service_user = "{user}"
munge_socket = "munge/munge.sock"

[hold]
backend = "slurm"
qos = "{qos}"
account = "{account}"
time_limit = "1-00:00:00"

[[hold.component]]
pool = "train"
partition = "gpu"
gpus_per_node = {gpus}

[[hold.component]]
pool = "rollout"
partition = "gpu"
gpus_per_node = 1

[[wpg]]
pool = "train"
engine = "{engine}"

[[wpg]]
pool = "rollout"
engine = "fake_sample"

[[model]]
name = "tiny"
path = "models/tiny"
"""
NODE = {
    "name": "n1",
    "state": "idle",
    "state_flags": [],
    "gres": "gpu:h200:4",
    "partitions": ["gpu", "cpu"],
    "features": "",
}
CONF = {
    "ClusterName": "c",
    "SLURM_VERSION": "22.05.8",
    "SLURM_CONF": "/nowhere/slurm.conf",
    "SlurmUser": "slurm(64030)",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageTRES": "cpu,gres/gpu",
    "AccountingStoreFlags": "job_comment",
    "JobRequeue": "1",
    "JobSubmitPlugins": "lua",
    "TaskProlog": "/bin/true",
}
GOOD = {
    "sinfo --version": "slurm-wlm 22.05.8\n",
    "scontrol show partition --oneliner --all": (
        "PartitionName=gpu AllowAccounts=ALL MaxTime=UNLIMITED State=UP\n"
        "PartitionName=cpu AllowAccounts=ALL MaxTime=UNLIMITED State=UP\n"
    ),
    "sinfo --json --all": json.dumps({"errors": [], "nodes": [NODE]}),
    "sacctmgr -nP show user user=daemon format=user,adminlevel,defaultaccount": (
        "daemon|Operator|rl\n"
    ),
    "sacctmgr -nP show assoc user=daemon account=rl format=account,qos,maxwall": "rl|high|\n",
    "sacctmgr -nP show qos name=high format=name": "high\n",
    "sacctmgr -nP show qos name=high format=name,maxwall": "high|\n",
}


class Site:
    """A folder with settings, and a Slurm that answers what a test wants."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "rlvr.toml"
        self.conf = dict(CONF)
        self.answers: dict[str, str | Exception] = dict(GOOD)
        self.skew = 0
        self.mounts: str | None = None
        make_model_folder(folder / "models" / "tiny")
        (folder / "slurm.conf").touch()
        self.write()

    def write(self, **changes: object) -> None:
        values = {"port": 0, "partition": "", "controllers": "cpu", "user": "daemon", "gpus": 3}
        values |= {"qos": "high", "account": "rl", "engine": "fake_train"}
        self.path.write_text(CONFIG.format(**(values | changes)), encoding="utf-8")

    def ask(self, *argv: str) -> str:
        key = " ".join(argv)
        if key == "scontrol show config" and key not in self.answers:
            lines = "".join(f"{name} = {value}\n" for name, value in self.conf.items())
            return f"Configuration data as of {int(time.time()) + self.skew}\n{lines}"
        answer = self.answers.get(key, "")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def facts(self) -> Facts:
        return Facts(self.path, ask=self.ask, mounts=self.mounts)

    def says(self, look: Callable[[Facts], Any]) -> list[Said]:
        return list(look(self.facts()))

    def wrong(self, look: Callable[[Facts], Any]) -> Said:
        """The only line that is not OK."""
        (found,) = [said for said in self.says(look) if said[0] != OK]
        return found


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "PLEXRL_"))]:
        monkeypatch.delenv(name)
    return Site(tmp_path)


def test_a_good_slurm_has_no_fault(site: Site) -> None:
    for check in doctor_slurm.CHECKS:
        if check.name not in ("installed", "agents"):
            said = site.says(check.look)
            assert [state for state, _ in said] == [OK] * len(said), said


# ---- the runner ------------------------------------------------------------------------------


def run(site: Site, *looks: Callable[[Facts], Any], **limits: float) -> list[tuple[str, str, str]]:
    checks = [
        Check(name="settings" if index == 0 else f"check{index}", look=look, hangs="unplug it")
        for index, look in enumerate(looks)
    ]
    found = examine(site.facts(), checks, **limits)
    return [(each.check, each.state, each.sentence) for each in found]


def test_a_check_that_breaks_is_a_line_and_the_others_go_on(site: Site) -> None:
    def breaks(_: Facts) -> list[Said]:
        raise KeyError("x")

    def refused(_: Facts) -> list[Said]:
        raise SlurmRejected(("sacctmgr", "show"), "no\n such thing")

    found = run(site, breaks, refused, lambda _: [(OK, "fine")], lambda _: [])
    assert found[0][1:] == (FAIL, "this check failed itself (KeyError: 'x'): please report it")
    assert found[1][1:] == (FAIL, "`sacctmgr show` was refused: no such thing")
    assert found[2][1:] == (OK, "fine")
    assert found[3][1:] == (OK, "nothing to do here")


def test_a_check_that_hangs_is_left_behind(site: Site) -> None:
    def hangs(_: Facts) -> list[Said]:
        time.sleep(5)
        return []

    begun = time.monotonic()
    found = run(site, hangs, lambda _: [(OK, "fine")], limit_s=0.05)
    assert time.monotonic() - begun < 2
    assert found[0][1:] == (FAIL, "no answer within 0.05 s: unplug it")
    assert found[1][1:] == (OK, "fine")


def test_wrong_settings_are_said_and_nothing_else_is_looked_at(site: Site) -> None:
    site.write(engine="nope")
    found = examine(site.facts(), all_checks())
    assert [(each.check, each.state) for each in found] == [
        ("settings", FAIL),
        ("not checked", WARN),
    ]
    assert "wpg[0].engine" in found[0].sentence


def test_a_silent_slurm_is_said_once(site: Site) -> None:
    site.answers["scontrol show config"] = SlurmUnavailable("start slurmctld")
    found = examine(site.facts(), doctor_slurm.CHECKS)
    assert [each.sentence for each in found if each.state == FAIL] == ["start slurmctld"]
    assert "accounts, holds, controllers" in found[-1].sentence


def test_a_silent_slurmdbd_does_not_keep_slurmctld_from_being_asked(site: Site) -> None:
    site.answers[USER] = SlurmUnavailable("start slurmdbd")
    checks = [check for check in doctor_slurm.CHECKS if check.slurm]
    found = examine(site.facts(), checks)
    assert [each.check for each in found if each.state == FAIL] == ["accounts"]
    assert "not checked" not in {each.check for each in found}


def test_the_command_exits_with_1_if_something_failed(site: Site) -> None:
    site.write(engine="nope")
    done = CliRunner().invoke(cli, ["doctor", "--config", str(site.path)])
    assert done.exit_code == 1
    assert done.stdout.startswith("FAIL  settings ")
    assert done.stdout.rstrip().endswith("0 OK, 1 WARN, 1 FAIL")
    done = CliRunner().invoke(cli, ["doctor", "--json", "--config", str(site.path)])
    assert done.exit_code == 1
    assert {each["state"] for each in json.loads(done.stdout)} == {FAIL, WARN}


# ---- Slurm -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "state", "words"),
    [
        ("AccountingStorageTRES", "cpu", FAIL, "AccountingStorageTRES has no gres/gpu"),
        ("AccountingStoreFlags", "job_comment,job_env", WARN, "has job_env"),
        ("AccountingStoreFlags", "(null)", WARN, "has no job_comment"),
        ("JobRequeue", "0", WARN, "set JobRequeue=1"),
        ("JobSubmitPlugins", "(null)", WARN, "add JobSubmitPlugins=lua to slurm.conf"),
        ("TaskProlog", "(null)", WARN, "TaskProlog=/nowhere/plexrl_task_prolog.sh to slurm.conf"),
        ("TaskProlog", "/nowhere/p.sh", WARN, "must, on every node"),
    ],
)
def test_lines_of_slurm_conf(site: Site, name: str, value: str, state: str, words: str) -> None:
    site.conf[name] = value
    found = site.wrong(doctor_slurm.configuration)
    assert found[0] == state and words in found[1]


USER = "sacctmgr -nP show user user=daemon format=user,adminlevel,defaultaccount"
ASSOC = "sacctmgr -nP show assoc user=daemon account=rl format=account,qos,maxwall"


@pytest.mark.parametrize(
    ("question", "answer", "words"),
    [
        (USER, "", "sacctmgr -i add user daemon Account=rl AdminLevel=Operator"),
        (USER, "daemon|None|rl\n", "sacctmgr -i modify user daemon set AdminLevel=Operator"),
        (ASSOC, "", "may not submit on account 'rl' ([hold] account): sacctmgr -i add account rl"),
        (ASSOC, "rl|normal|\n", "sacctmgr -i modify user daemon where account=rl set qos+=high"),
        (ASSOC, "rl|high|01:00:00\n", "longer than MaxWall of the association of daemon"),
        ("sacctmgr -nP show qos name=high format=name", "", "sacctmgr -i add qos high"),
        (
            "sacctmgr -nP show qos name=high format=name,maxwall",
            "high|12:00:00\n",
            "longer than MaxWall of QOS high (12:00:00)",
        ),
    ],
)
def test_what_slurms_accounts_lack(site: Site, question: str, answer: str, words: str) -> None:
    site.answers[question] = answer
    found = site.wrong(doctor_slurm.admin_level)
    assert found[0] == FAIL and words in found[1]


def test_without_accounts_only_slurms_own_user_may_release_jobs(site: Site) -> None:
    site.conf["AccountingStorageType"] = "accounting_storage/none"
    assert "only root and slurm may release" in site.wrong(doctor_slurm.admin_level)[1]
    site.conf["SlurmUser"] = "daemon(1)"
    assert site.wrong(doctor_slurm.admin_level)[0] == WARN


def test_a_hold_that_can_never_start(site: Site) -> None:
    site.write(gpus=8)
    state, words = site.wrong(doctor_slurm.holds)
    assert state == FAIL and "(at most 4): lower gpus_per_node" in words


def test_a_partition_that_is_down(site: Site) -> None:
    shown = "scontrol show partition --oneliner --all"
    site.answers[shown] = str(GOOD[shown]).replace("State=UP", "State=DOWN")
    said = [words for state, words in site.says(doctor_slurm.holds) if state == WARN]
    assert all("scontrol update PartitionName=gpu State=UP" in words for words in said)
    assert "PartitionName=cpu State=UP" in site.wrong(doctor_slurm.controllers)[1]


def test_the_controllers_partition(site: Site) -> None:
    site.write(controllers="nope")
    assert "Slurm has cpu, gpu" in site.wrong(doctor_slurm.controllers)[1]
    text = site.path.read_text().replace('controller_partition = "nope"\n', "")
    site.path.write_text(text)
    assert "set it to a partition without GPUs" in site.wrong(doctor_slurm.controllers)[1]


@pytest.mark.parametrize(("skew", "state"), [(-10, WARN), (400, FAIL)])
def test_a_clock_that_is_off(site: Site, skew: int, state: str) -> None:
    site.skew = skew
    found = site.wrong(doctor_slurm.slurmctld)
    assert found[0] == state and "let chronyd or ntpd set both" in found[1]


def test_programs_of_another_version(site: Site) -> None:
    site.answers["sinfo --version"] = "slurm 24.11.5\n"
    assert (
        "programs here are 24.11.5 and slurmctld is 22.05.8"
        in (site.wrong(doctor_slurm.slurmctld)[1])
    )


def test_files_of_admin_install(site: Site, tmp_path: Path) -> None:
    said = site.says(doctor_slurm.installed)
    assert len(said) == 4
    assert all("plexrl admin install --config" in words for _, words in said)
    (tmp_path / "plexrl.lua").write_text("-- older")
    (tmp_path / "job_submit.lua").write_text("-- the site's")
    words = [words for _, words in site.says(doctor_slurm.installed)]
    assert any("plexrl.lua is not what this version and these settings want" in w for w in words)
    assert any("is the site's own and does not load plexrl.lua" in w for w in words)


def test_an_address_that_nodes_cannot_reach(site: Site) -> None:
    assert "write an address of this host" in site.wrong(doctor_slurm.reachable)[1]


# ---- this host -------------------------------------------------------------------------------


def test_a_user_that_does_not_exist(site: Site) -> None:
    site.write(user="nobody-at-all")
    state, words = site.wrong(doctor_host.service_user)
    assert state == FAIL and "useradd --system --create-home nobody-at-all" in words


def test_a_service_that_is_root(site: Site) -> None:
    site.write(user="root")
    warned = [words for state, words in site.says(doctor_host.service_user) if state == WARN]
    assert "give [slurm] service_user a user of its own" in warned[0]


def test_an_engine_that_is_not_installed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor_host, "_version", lambda name: None if name == "deepspeed" else "1.0"
    )
    site.write(engine="deepspeed")
    state, words = site.wrong(doctor_host.versions)
    assert state == FAIL and "engine deepspeed needs deepspeed, which is not installed" in words


def test_a_state_folder_of_somebody_else(site: Site) -> None:
    state_dir = site.folder / "state"
    (state_dir / "keys").mkdir(parents=True)
    (state_dir / "keys" / "token.key").touch()
    (state_dir / "keys" / "token.key").chmod(0o644)
    state_dir.chmod(0o755)
    site.write(user="nobody")
    site.mounts = "server:/x / nfs4 rw 0 0\n"
    words = [words for state, words in site.says(doctor_host.state_dir) if state != OK]
    assert f"chown -R nobody {state_dir}" in words[0]
    assert f"chmod 0711 {state_dir}" in words[1]
    assert "must be readable by nobody only" in words[2]
    assert "token.key must be readable by nobody only" in words[3]


def test_a_state_folder_that_is_not_there_yet(site: Site) -> None:
    site.mounts = "server:/x / nfs4 rw 0 0\n"
    site.folder.chmod(0o755)
    state, words = site.wrong(doctor_host.state_dir)
    assert state == FAIL and "install -d -o daemon" in words
    site.folder.chmod(0o777)
    assert "the daemon makes it" in site.wrong(doctor_host.state_dir)[1]


def test_a_state_folder_that_nodes_cannot_see(site: Site) -> None:
    site.folder.chmod(0o777)
    site.mounts = "/dev/sda1 / ext4 rw 0 0\n"
    warned = [words for _, words in site.says(doctor_host.state_dir)]
    assert any("on a local file system (ext4), and held nodes must see it" in w for w in warned)


def test_a_host_tier_on_a_disk(site: Site) -> None:
    site.mounts = "/dev/sda1 / ext4 rw 0 0\n"
    assert "choose a folder below /dev/shm" in site.wrong(doctor_host.host_dir)[1]


def test_a_host_tier_without_room(site: Site) -> None:
    site.path.write_text(site.path.read_text().replace("1GiB", "900TiB"))
    site.mounts = "shm /dev/shm tmpfs rw 0 0\n"
    assert "or lower it" in site.wrong(doctor_host.host_dir)[1]


def test_a_database_that_is_not_made_or_not_of_this_version(site: Site) -> None:
    assert "the daemon makes it" in site.wrong(doctor_host.database)[1]
    state = site.folder / "state"
    state.mkdir()
    engine = open_database(f"sqlite:///{state}/plexrl.sqlite")
    site.write(user="root")
    assert "without our tables" in site.wrong(doctor_host.database)[1]
    schema.upgrade(engine)
    engine.dispose()
    assert [state for state, _ in site.says(doctor_host.database)] == [OK]
    file = state / "plexrl.sqlite"
    file.chmod(0o644)
    assert site.wrong(doctor_host.database) == (
        WARN, f"others may read every job in {file} (mode 0644): chmod o= {file}*",
    )  # fmt: skip
    file.chmod(0o640)
    assert [state for state, _ in site.says(doctor_host.database)] == [OK]
    site.mounts = "server:/x / nfs4 rw 0 0\n"
    assert "use PostgreSQL" in site.wrong(doctor_host.database)[1]


def test_a_port_that_is_taken(site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        site.write(port=taken.getsockname()[1])
        state, words = site.wrong(doctor_host.port)
        assert state == FAIL and "is taken by another program" in words
    assert [state for state, _ in site.says(doctor_host.port)] == [OK]


@pytest.mark.munge
def test_a_munge_that_is_stopped(site: Site) -> None:
    assert "start munged on this host" in site.wrong(doctor_host.munge)[1]
    munged = PrivateMunge(site.folder / "munge").start()
    try:
        assert [state for state, _ in site.says(doctor_host.munge)] == [OK]
    finally:
        munged.stop()
    munged.socket.touch()
    assert "makes no credential" in site.wrong(doctor_host.munge)[1]


# ---- the daemon ------------------------------------------------------------------------------


def told(**changes: Any) -> list[Said]:
    """What is made of a daemon's answer."""
    answer = {
        "draining": False,
        "trouble": [],
        "holds": [],
        "wpgs": [],
        "excluded_nodes": [],
        **changes,
    }

    class Seen:
        daemon = answer
        sure = type("S", (), {"partition": "rlvr", "state_dir": Path("/s")})()

    return list(doctor_daemon.daemon(Seen()))  # type: ignore[arg-type]


HOLD = {"id": "h1", "slurm_id": "7", "state": "up", "nodes": ["n1"], "reason": "", "lost_nodes": 0}


def test_a_daemon_that_does_not_run(site: Site) -> None:
    state, words = site.wrong(doctor_daemon.daemon)
    assert state == WARN and "systemctl start plexrl-partitiond@rlvr" in words


def test_a_daemon_and_its_holds() -> None:
    assert told(holds=[HOLD])[1] == (OK, "hold h1 (Slurm job 7) is up on n1")
    pending = HOLD | {"state": "pending", "reason": "Resources"}
    assert "waits in Slurm (Resources): squeue --start -j 7" in told(holds=[pending])[1][1]
    assert "has lost 1 node(s)" in told(holds=[HOLD | {"lost_nodes": 1}])[2][1]
    assert told()[1][0] == WARN


def test_what_a_daemon_complains_about() -> None:
    assert (FAIL, "the daemon says: Slurm is away") in told(trouble=["Slurm is away"])
    wpg = {"id": "train-0", "node": "n1", "state": "down", "reason": "torch sees 0 GPUs"}
    assert "WPG train-0 on n1 is down: torch sees 0 GPUs" in told(wpgs=[wpg])[-1][1]
    node = {"node": "n2", "until_us": 1_796_000_000_000_000, "reason": "it failed"}
    assert "node n2 is left out of holds until" in told(excluded_nodes=[node])[-1][1]
    assert "restart the daemon" in told(version="0.0.1")[0][1]


def test_the_table_has_a_line_for_each_finding(site: Site) -> None:
    found = examine(site.facts(), [Check(name="settings", look=lambda _: [], hangs="")])
    assert as_text(found) == "OK    settings  nothing to do here\n\n1 OK, 0 WARN, 0 FAIL"

"""``plexrl admin install``."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from plexrl_slurm.cli.admin import closed_to_others
from plexrl_slurm.cli.main import cli
from plexrl_slurm.settings import check
from plexrl_slurm.slurm.templates import fill
from tests.model_folders import make_model_folder

CONFIG = """
[partition]
name = "{name}"
state_dir = "state-{name}"
host_dir = "/dev/shm/plexrl-admin-test"
host_bytes = "1GiB"

[slurm]
conf = "slurm.conf"
controller_partition = "cpu"
service_user = "daemon"

[hold]
backend = "slurm"
qos = "held"

[[hold.component]]
pool = "train"
partition = "gpu"
gpus_per_node = 1

[[hold.component]]
pool = "rollout"
partition = "gpu"
gpus_per_node = 1

[[wpg]]
pool = "train"
engine = "fake_train"

[[wpg]]
pool = "rollout"
engine = "fake_sample"

[[model]]
name = "tiny"
path = "models/tiny"
"""


class Site:
    """A folder with one partition's settings, and another one to write into."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "rlvr.toml"
        self.prefix = folder / "root"
        self.add("rlvr")
        make_model_folder(folder / "models" / "tiny")

    def add(self, name: str, text: str = CONFIG) -> None:
        (self.folder / f"{name}.toml").write_text(text.format(name=name))

    def at(self, path: Path | str) -> Path:
        return self.prefix / Path(path).relative_to("/")

    @property
    def slurm(self) -> Path:
        """Where the files for Slurm go."""
        return self.at(self.folder)

    def call(self, *words: str) -> Result:
        argv = ["admin", "install", "--config", str(self.config), "--prefix", str(self.prefix)]
        return CliRunner().invoke(cli, [*argv, *words])

    def install(self, *words: str) -> dict[str, Any]:
        done = self.call("--json", *words)
        assert done.exit_code == 0, done.output
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def states(answer: dict[str, Any]) -> dict[str, str]:
    return {Path(file["path"]).name: file["state"] for file in answer["files"]}


UNIT = "plexrl-partitiond@.service"
FILES = (UNIT, "plexrl.lua", "job_submit.lua", "plexrl_task_prolog.sh")


def test_everything_is_written_and_a_second_run_changes_nothing(site: Site) -> None:
    first = site.install()
    assert states(first) == dict.fromkeys(FILES, "written")
    assert first["changed"] is True
    before = {Path(f["path"]): Path(f["path"]).stat().st_mtime_ns for f in first["files"]}
    second = site.install()
    assert states(second) == dict.fromkeys(FILES, "unchanged")
    assert second["changed"] is False
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert "everything was in place already" in site.call().stderr


def test_the_files_say_what_the_settings_say(site: Site) -> None:
    site.install()
    module = (site.slurm / "plexrl.lua").read_text()
    assert '["rlvr"]' in module
    assert '"tiny"' in module
    assert "[0] = true, [1] = true" in module  # root and the service user, daemon
    loader = (site.slurm / "job_submit.lua").read_text()
    assert f'pcall(dofile, "{site.folder}/plexrl.lua")' in loader
    prolog = site.slurm / "plexrl_task_prolog.sh"
    assert os.access(prolog, os.X_OK)
    unit = site.at(f"/etc/systemd/system/{UNIT}").read_text()
    assert "User=daemon" in unit
    assert f"{site.folder}/%i.toml" in unit


def test_every_partition_beside_it_is_in_the_module(site: Site) -> None:
    site.add("big")
    (site.folder / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    site.install()
    module = (site.slurm / "plexrl.lua").read_text()
    assert '["rlvr"]' in module
    assert '["big"]' in module


def test_two_partitions_may_not_share_a_name_in_slurm(site: Site) -> None:
    site.add("twin", CONFIG.replace('conf = "slurm.conf"', 'conf = "slurm.conf"\npartition="rlvr"'))
    done = site.call()
    assert done.exit_code == 78
    assert "2 settings files here have the Slurm partition 'rlvr'" in done.stderr


def test_a_changed_catalogue_is_read_by_slurmctld(site: Site) -> None:
    site.install()
    loader = site.slurm / "job_submit.lua"
    os.utime(loader, (1, 1))
    text = site.config.read_text()
    site.config.write_text(text.replace('name = "tiny"', 'name = "tiny-2"'))
    answer = site.install()
    assert states(answer)["plexrl.lua"] == "replaced"
    assert states(answer)["job_submit.lua"] == "unchanged"
    assert "tiny-2" in (site.slurm / "plexrl.lua").read_text()
    assert loader.stat().st_mtime > 1


def test_a_job_submit_of_the_sites_own_is_left_alone(site: Site) -> None:
    own = site.slurm / "job_submit.lua"
    own.parent.mkdir(parents=True)
    own.write_text("function slurm_job_submit() return 0 end\nreturn slurm.SUCCESS\n")
    answer = site.install()
    assert states(answer)["job_submit.lua.plexrl"] == "beside"
    assert own.read_text().startswith("function slurm_job_submit()")
    (sentence,) = [each for each in answer["notes"] if "left alone" in each]
    lines = sentence.splitlines()[1:]
    assert len(lines) == 2
    own.write_text(own.read_text().replace("return slurm", "\n".join(lines) + "\nreturn slurm"))
    assert states(site.install())["job_submit.lua"] == "kept"


def test_a_dry_run_writes_nothing(site: Site) -> None:
    answer = site.install("--dry-run")
    assert states(answer) == dict.fromkeys(FILES, "written")
    assert answer["changed"] is False
    assert not site.prefix.exists()
    assert "nothing was written" in site.call("--dry-run").stderr


def test_lines_that_slurm_conf_lacks_are_printed_with_their_purpose(site: Site) -> None:
    (site.folder / "slurm.conf").write_text(
        "JobSubmitPlugins=throttle\nTaskProlog=/opt/own.sh # ours\nAccountingStorageTRES=gres/gpu\n"
    )
    lines = {line["line"]: line for line in site.install()["slurm_conf"]}
    assert lines["JobSubmitPlugins=throttle,lua"]["present"] is False
    assert lines["AccountingStorageTRES=gres/gpu"]["present"] is True
    (prolog,) = [line for text, line in lines.items() if text.startswith("TaskProlog=")]
    assert "or keep yours and call this one" in prolog["purpose"]
    text = site.call().stdout
    assert "AccountingStoreFlags=job_comment  # " in text
    assert "AccountingStorageTRES" not in text


def test_accounting_commands_name_the_service_user(site: Site) -> None:
    commands = [each["command"] for each in site.install()["commands"]]
    assert commands == [
        'sacctmgr -i add account plexrl Description="PlexRL holds"',
        "sacctmgr -i add user daemon Account=plexrl AdminLevel=Operator",
        "sacctmgr -i add qos held Priority=1000",
        "sacctmgr -i modify user daemon where account=plexrl set qos+=held",
    ]


def test_a_service_user_that_does_not_exist_is_named(site: Site) -> None:
    site.config.write_text(site.config.read_text().replace('"daemon"', '"no-such-user"'))
    assert any("there is no user no-such-user: useradd" in each for each in site.install()["notes"])


def test_without_settings_an_example_is_written_and_nothing_else(site: Site) -> None:
    site.config.unlink()
    answer = site.install()
    example = site.at(site.config)
    assert [file["path"] for file in answer["files"]] == [str(example)]
    assert "edit it, then run this again" in answer["notes"][0]
    found = check(example)
    assert found.settings is None
    assert all("my-model" in problem for problem in found.problems), found.problems


def test_the_example_with_a_model_that_exists_has_no_mistake(site: Site) -> None:
    values = dict(name="rlvr", user="daemon", slurm_conf="/etc/slurm/slurm.conf", path="x")
    values |= {"controllers": "cpu", "gpus": "gpu", "model": str(site.folder / "models" / "tiny")}
    site.config.write_text(fill("partition.toml.j2", values))
    found = check(site.config)
    assert found.problems == ()
    assert states(site.install()) == dict.fromkeys(FILES, "written")


def uncommented(text: str) -> str:
    """The example with every default written out."""
    lines = (line.removeprefix("# ") if " = " in line[:30] else line for line in text.splitlines())
    return "\n".join(lines) + "\n"


def test_every_default_of_the_example_is_a_key_that_exists(site: Site) -> None:
    values = dict(name="rlvr", user="daemon", slurm_conf="/etc/slurm/slurm.conf", path="x")
    values |= {"controllers": "cpu", "gpus": "gpu", "model": str(site.folder / "models" / "tiny")}
    site.config.write_text(uncommented(fill("partition.toml.j2", values)))
    assert "\ntls_ca = " in site.config.read_text()
    problems = [each for each in check(site.config).problems if "max_context_length" not in each]
    assert problems == []


def test_a_local_partition_has_nothing_to_install(site: Site) -> None:
    text = site.config.read_text().replace('backend = "slurm"', 'backend = "local"')
    head, _, rest = text.partition("[slurm]")
    site.config.write_text(head + "[hold]\n[[wpg]]" + rest.partition("[[wpg]]")[2])
    done = site.call()
    assert done.exit_code == 65
    assert 'backend is "local"' in done.stderr


def test_who_may_not_write_is_told_so_and_nothing_is_written(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda place, mode: "systemd" not in str(place))
    site.at("/etc/systemd/system").mkdir(parents=True)
    done = site.call()
    assert done.exit_code == 77
    assert "run this as root, or give --prefix DIR" in done.stderr
    assert not site.slurm.exists()


def test_a_program_that_users_cannot_reach_is_found(tmp_path: Path) -> None:
    assert closed_to_others(Path("/usr/bin/env")) is None
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    link = closed / "env"
    link.symlink_to("/usr/bin/env")
    first = closed_to_others(link)
    assert first is not None
    assert first in link.parents
    assert first.stat().st_mode & 1 == 0

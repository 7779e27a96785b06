"""The script of a hold: what sbatch is told, and what runs on the nodes."""

import dataclasses
import errno
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import Denied, StorageFull
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.daemons.agent_config import AgentConfig, devices_of, visible_gpus
from plexrl_slurm.daemons.hold_hygiene import refuse_others
from plexrl_slurm.daemons.hold_job import comment_of, is_hold, is_of_another, submit_hold
from plexrl_slurm.settings import Settings, WpgSettings
from plexrl_slurm.slurm.port import BatchJob, JobStatus, SlurmState
from plexrl_slurm.slurm_settings import ComponentSettings, HoldSettings, SlurmSettings

GOLDEN = Path(__file__).parents[1] / "golden" / "hold.sbatch"


class Port:
    """Keeps what was submitted."""

    job: BatchJob

    def submit(self, job: BatchJob, *, hold: bool) -> SlurmId:
        assert not hold
        self.job = job
        return SlurmId("7")


def settings(folder: Path, **hold: Any) -> Settings:
    components = (
        ComponentSettings(
            pool="train",
            partition="gpu",
            nodes=2,
            gpus_per_node=4,
            gpu_type="h200",
            constraint="nvlink&ib",
            options=("--cpus-per-task=8", "--mem=0"),
        ),
        ComponentSettings(pool="rollout", partition="gpu2", gpus_per_node=2),
    )
    return Settings(
        partition="rlvr",
        state_dir=folder,
        database_url="",
        host_dir=Path("/dev/shm/plexrl"),
        host_bytes=1,
        hold=HoldSettings(backend="slurm", **{"components": components} | hold),
        slurm=SlurmSettings(),
    )


def submitted(folder: Path, exclude: tuple[str, ...] = (), **hold: Any) -> BatchJob:
    port: Any = Port()
    submit_hold(port, settings(folder, **hold), "h3", endpoint="tcp://10.0.0.1:5", exclude=exclude)
    job: BatchJob = port.job
    return job


def test_the_script_is_the_golden_one(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    job = submitted(tmp_path, ("n7", "n9"), qos="holds", account="service", comment="see the wiki")
    text = job.script.replace(str(tmp_path), "/shared/rlvr")
    if request.config.getoption("--bless"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert job.name == "plexrl-hold-rlvr" and job.output == f"{tmp_path}/holds/h3.log"


def comment(folder: Path, **hold: Any) -> str:
    return comment_of(settings(folder, **hold), "h3")


def hold(folder: Path, said: str, **facts: Any) -> tuple[bool, bool]:
    """Whether the daemon of ``folder`` takes a Slurm job for a hold, and for another daemon's."""
    values: dict[str, Any] = {"name": "plexrl-hold-rlvr", "uid": os.getuid()}
    status = JobStatus(state=SlurmState.RUNNING, comment=said, **(values | facts))
    ours = settings(folder)
    return is_hold(ours, status), is_of_another(ours, status)


def test_a_hold_is_known_by_its_name_its_user_and_the_state_dir_in_its_comment() -> None:
    here, other = Path("/shared/rlvr"), Path("/shared/rlvr-2")
    for own in ("", "see the wiki in /shared/rlvr-2"):
        assert hold(here, comment(here, comment=own)) == (True, False)
        assert hold(here, comment(other, comment=own)) == (True, True)
        assert hold(other, comment(here, comment=own)) == (True, True)
    assert hold(here, "plexrl hold h1 of partition rlvr") == (True, False)
    assert not hold(here, comment(here), uid=os.getuid() + 1)[0]
    assert not hold(here, comment(here), leader=SlurmId("6"))[0]
    assert not hold(here, comment(here), name="mine")[0]
    assert not hold(here, "mine")[0]
    assert not hold(here, "plexrl hold h1 of partition rlvr2 in /shared/rlvr")[0]


def test_a_daemon_refuses_to_share_a_partition_with_one_of_another_state_dir() -> None:
    here, other = Path("/shared/rlvr"), Path("/shared/old")
    values: dict[str, Any] = {"name": "plexrl-hold-rlvr", "uid": os.getuid()}

    def job(folder: Path) -> JobStatus:
        return JobStatus(state=SlurmState.PENDING, comment=comment(folder), **values)

    refuse_others(settings(here), {SlurmId("7"): job(here)})
    with pytest.raises(
        Denied, match=r"Slurm job 8, .* in /shared/old'.* here is /shared/rlvr: take"
    ):
        refuse_others(settings(here), {SlurmId("7"): job(here), SlurmId("8"): job(other)})


def test_the_script_is_bash_and_its_files_are_the_services_own(tmp_path: Path) -> None:
    job = submitted(tmp_path)
    done = subprocess.run(["bash", "-n"], input=job.script.encode(), capture_output=True)
    assert done.returncode == 0, done.stderr
    holds = tmp_path / "holds"
    assert holds.stat().st_mode & 0o777 == 0o700
    assert (holds / "h3.sh").stat().st_mode & 0o777 == 0o700
    assert "--exclude" not in job.script and "--qos" not in job.script


def test_a_full_disk_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StorageFull, match=r"holds has .* are needed: free space there"):
        submitted(tmp_path)


def test_a_hold_of_one_component_is_no_heterogeneous_job(tmp_path: Path) -> None:
    job = submitted(tmp_path, components=settings(tmp_path).hold.components[:1])
    assert "hetjob" not in job.script and "--het-group" not in job.script
    assert "\nkeep 0 &\nwait\n" in job.script


def test_an_agent_learns_its_node_from_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(tmp_path)
    monkeypatch.setenv("SLURMD_NODENAME", "n4")
    monkeypatch.setenv("PLEXRL_COMPONENT", "1")
    config = AgentConfig.read(tmp_path / "holds" / "h3.json")
    assert (config.agent, config.hold, config.node, config.component) == ("h3.1.n4", "h3", "n4", 1)
    assert config.host_dir == "/dev/shm/plexrl/rlvr/n4/h3.1"
    assert config.snapshots_dir == f"{tmp_path}/snapshots"


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, None),
        ({"SLURM_JOB_ID": "7"}, None),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "2,5"}, ["2", "5"]),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_only_slurms_own_gpus_count(environment: dict[str, str], gpus: list[str] | None) -> None:
    assert visible_gpus(environment) == gpus


def test_a_wpg_gets_its_share_of_the_nodes_gpus_or_says_that_they_are_not_there() -> None:
    assert devices_of([2, 3], ["4", "5", "6", "7"]) == "6,7"
    assert devices_of([0, 1], ["4"]) is None
    assert devices_of([0], []) is None
    assert devices_of([0], None) == devices_of([], ["4"]) == ""


def test_without_slurm_a_wpg_of_two_nodes_has_two_agents_with_folders_of_their_own(
    tmp_path: Path,
) -> None:
    port: Any = Port()
    local = dataclasses.replace(
        settings(tmp_path),
        hold=HoldSettings(),
        slurm=None,
        wpgs=(WpgSettings(pool="train", engine="fake_train", gpus=2, nodes=2),),
    )
    submit_hold(port, local, "h3", endpoint="tcp://127.0.0.1:5", exclude=())
    configs = [
        AgentConfig.read(tmp_path / "holds" / name) for name in ("h3.json", "h3.localhost-2.json")
    ]
    assert [config.node for config in configs] == ["localhost", "localhost-2"]
    assert len({config.agent for config in configs}) == len({c.host_dir for c in configs}) == 2
    for loop, word in (("h3.sh", "first"), ("h3.localhost-2.sh", "second")):
        (tmp_path / "holds" / loop).write_text(f"#!/bin/sh\nsleep 0.1\necho {word}\n")
    done = subprocess.run(
        ["bash", "-c", port.job.script], capture_output=True, text=True, timeout=10, check=True
    )
    assert sorted(done.stdout.split()) == ["first", "second"]

"""The local adapter: batch scripts as detached processes, known by their folders."""

import os
import pwd
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import SlurmRejected
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.local import LocalSlurm, _as_user
from plexrl_slurm.slurm.port import ENDED, BatchJob, JobStatus, SlurmState


@pytest.fixture
def slurm(tmp_path: Path) -> LocalSlurm:
    return LocalSlurm(tmp_path / "local")


@pytest.fixture
def started(slurm: LocalSlurm) -> Iterator[list[SlurmId]]:
    """Jobs to cancel at the end."""
    jobs: list[SlurmId] = []
    yield jobs
    for job in jobs:
        slurm.cancel(job)


def job(tmp_path: Path, script: str, **more: object) -> BatchJob:
    values: dict[str, object] = {
        "name": "test",
        "script": f"#!/bin/sh\n{script}\n",
        "workdir": tmp_path,
        "environment": {"PATH": os.environ["PATH"], "WHO": "me"},
    }
    return BatchJob(**(values | more))  # type: ignore[arg-type]


def end_of(slurm: LocalSlurm, number: SlurmId, seconds: float = 20.0) -> JobStatus:
    deadline = time.monotonic() + seconds
    while (status := slurm.states([number])[number]).state not in ENDED:
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


def test_a_held_job_waits_for_its_release_and_then_runs(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "echo $WHO $SLURM_JOB_ID $1", arguments=("x",)), hold=True)
    assert slurm.states([number])[number].state is SlurmState.PENDING
    assert slurm.states([number])[number].reason == "JobHeldUser"
    slurm.release(number)
    assert end_of(slurm, number) == JobStatus(state=SlurmState.COMPLETED, exit_code=0)
    assert (tmp_path / f"slurm-{number}.out").read_text() == f"me {number} x\n"


def test_a_second_release_does_not_run_it_twice(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "echo once", output="%x.out"), hold=True)
    slurm.release(number)
    end_of(slurm, number)
    slurm.release(number)
    time.sleep(0.2)
    assert (tmp_path / "test.out").read_text() == "once\n"


def test_the_exit_code_of_the_script_is_kept(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "exit 7"), hold=False)
    assert end_of(slurm, number) == JobStatus(state=SlurmState.FAILED, exit_code=7)


def test_a_script_whose_output_cannot_be_opened_fails(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "true", output="nowhere/x.out"), hold=False)
    assert end_of(slurm, number) == JobStatus(state=SlurmState.FAILED, exit_code=127)


def test_cancel_ends_the_script_and_what_it_started(slurm: LocalSlurm, tmp_path: Path) -> None:
    script = "sleep 300 & echo $! > child; wait"
    number = slurm.submit(job(tmp_path, script), hold=False)
    child = tmp_path / "child"
    deadline = time.monotonic() + 10
    while not (child.exists() and child.read_text().strip()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    slurm.cancel(number)
    assert end_of(slurm, number).state is SlurmState.CANCELLED
    pid = int(child.read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, f"{pid} lives"
        time.sleep(0.02)


def test_a_script_that_ignores_term_is_killed_in_the_end(
    slurm: LocalSlurm, tmp_path: Path, started: list[SlurmId]
) -> None:
    number = slurm.submit(job(tmp_path, "trap '' TERM; while :; do sleep 0.1; done"), hold=False)
    started.append(number)
    time.sleep(0.5)
    slurm.cancel(number)
    assert end_of(slurm, number, 25).state is SlurmState.CANCELLED


def test_a_held_job_that_is_cancelled_never_runs(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "touch ran"), hold=True)
    slurm.cancel(number)
    slurm.release(number)
    assert slurm.states([number])[number].state is SlurmState.CANCELLED
    assert not (tmp_path / "ran").exists()


def test_the_time_limit_ends_a_job_as_timeout(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "sleep 300", time_limit_us=300_000), hold=False)
    assert end_of(slurm, number).state is SlurmState.TIMEOUT


def test_an_unknown_job_is_left_out_and_cannot_be_cancelled(slurm: LocalSlurm) -> None:
    assert slurm.states([SlurmId("99"), SlurmId("../x")]) == {}
    with pytest.raises(SlurmRejected, match="Invalid job id"):
        slurm.cancel(SlurmId("99"))


def test_numbers_are_never_given_twice(slurm: LocalSlurm, tmp_path: Path) -> None:
    numbers = [slurm.submit(job(tmp_path, "true"), hold=True) for _ in range(5)]
    assert numbers == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_job_whose_runner_was_killed_has_failed_unless_it_was_cancelled(
    slurm: LocalSlurm, tmp_path: Path, cancelled: bool
) -> None:
    number = slurm.submit(job(tmp_path, "sleep 1"), hold=False)
    runner = tmp_path / "local" / number / "runner"
    deadline = time.monotonic() + 10
    while not runner.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if cancelled:  # and its runner had no room to write how it ended
        (tmp_path / "local" / number / "cancelled").touch()
    os.kill(int(runner.read_text().split()[0]), 9)
    failed = JobStatus(state=SlurmState.FAILED, exit_code=137, reason="NodeFail")
    ended = JobStatus(state=SlurmState.CANCELLED, exit_code=0)
    assert end_of(slurm, number) == (ended if cancelled else failed)


def test_what_a_script_left_in_a_session_of_its_own_ends_with_it(
    slurm: LocalSlurm, tmp_path: Path
) -> None:
    script = "setsid sh -c 'echo $$ > child; exec sleep 300' & while ! [ -s child ]; do :; done"
    number = slurm.submit(job(tmp_path, script), hold=False)
    assert end_of(slurm, number).state is SlurmState.COMPLETED
    assert not Path(f"/proc/{(tmp_path / 'child').read_text().strip()}").exists()


def test_a_limit_beyond_all_timers_is_no_limit(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "true", time_limit_us=10**19), hold=False)
    assert end_of(slurm, number).state is SlurmState.COMPLETED


def test_a_release_that_was_cut_short_is_made_up_for(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "echo once"), hold=True)
    (tmp_path / "local" / number / "released").touch()  # and the daemon died
    assert slurm.states([number])[number].state is SlurmState.PENDING
    slurm.release(number)
    assert end_of(slurm, number).state is SlurmState.COMPLETED


def test_a_runner_that_cannot_start_is_a_rejection(
    slurm: LocalSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = slurm.submit(job(tmp_path, "true"), hold=True)
    monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
    with pytest.raises(SlurmRejected, match="nothing"):
        slurm.release(number)
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SlurmRejected, match="exit code 1"):
        slurm.release(number)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _noise(path: Path) -> None:
    path.write_bytes(b"\xff" * 10_000)


@pytest.mark.parametrize("make", [_fifo, _link, _noise, Path.mkdir])
def test_a_foreign_exit_file_is_an_end_and_no_accident(
    slurm: LocalSlurm, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    number = slurm.submit(job(tmp_path, "true"), hold=True)
    make(tmp_path / "local" / number / "exit")
    assert slurm.states([number])[number].state is SlurmState.FAILED


def test_no_link_in_a_job_folder_is_followed(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "true"), hold=True)
    folder = tmp_path / "local" / number
    for name in ("cancelled", "released"):
        (folder / name).symlink_to(tmp_path / "made")
    slurm.cancel(number)
    slurm.release(number)
    assert not (tmp_path / "made").exists()
    (tmp_path / "local" / "77").symlink_to(folder)
    assert slurm.states([SlurmId("77")]) == {}


def test_a_job_folder_cannot_name_somebody_elses_process(slurm: LocalSlurm, tmp_path: Path) -> None:
    number = slurm.submit(job(tmp_path, "true"), hold=True)
    folder = tmp_path / "local" / number
    fields = Path("/proc/1/stat").read_text().rsplit(")", 1)[1].split()
    (folder / "runner").write_text(f"1 {fields[19]}")
    if os.geteuid() == 0:  # else process 1 is foreign already
        assert slurm.states([number])[number].state is SlurmState.RUNNING
        os.chown(folder, 65534, 65534)
    assert slurm.states([number])[number].state is SlurmState.FAILED


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts other users' jobs")
def test_nothing_of_root_stays_with_a_users_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nobody = pwd.getpwnam("nobody")
    monkeypatch.setenv("SECRET_OF_ROOT", "x")
    options = _as_user(nobody.pw_uid, nobody.pw_gid)
    shown = subprocess.run(
        ["/bin/sh", "-c", "id -u; id -G; env"], capture_output=True, text=True, **options
    ).stdout
    uid, groups, *environment = shown.splitlines()
    assert uid == str(nobody.pw_uid)
    assert "0" not in groups.split()
    assert not any("SECRET_OF_ROOT" in line for line in environment)


def test_a_cancel_before_the_script_has_begun_ends_it(slurm: LocalSlurm, tmp_path: Path) -> None:
    for _ in range(5):
        number = slurm.submit(job(tmp_path, "sleep 300"), hold=True)
        slurm.release(number)
        slurm.cancel(number)
        assert end_of(slurm, number).state is SlurmState.CANCELLED


def test_poll_gives_every_job_and_nothing_else_that_lies_there(
    slurm: LocalSlurm, tmp_path: Path
) -> None:
    assert slurm.poll() == {}
    held = slurm.submit(job(tmp_path, "true"), hold=True)
    ended = slurm.submit(job(tmp_path, "exit 3"), hold=False)
    end_of(slurm, ended)
    (tmp_path / "local" / "77").mkdir()
    (tmp_path / "local" / "notes").touch()
    assert {number: status.state for number, status in slurm.poll().items()} == {
        held: SlurmState.PENDING,
        ended: SlurmState.FAILED,
    }

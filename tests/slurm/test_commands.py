"""The adapter of Slurm's programs, against faked ones that have what was recorded."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm import invoke
from plexrl_slurm.slurm.commands import CommandsSlurm
from plexrl_slurm.slurm.port import SlurmState
from tests.slurm import contract
from tests.slurm.fake_world import FakeWorld, make_fake

RECORD = {
    "JobIDRaw": "70",
    "JobID": "70",
    "State": "CANCELLED by 1001",
    "User": "plxalice",
    "UID": "1001",
    "Account": "lab",
    "Start": "1796001834",
    "End": "1796001835",
    "Submit": "1796001830",
    "ElapsedRaw": "1",
    "AllocTRES": "cpu=1,gres/gpu=2",
    "NodeList": "n1",
    "ExitCode": "0:15",
    "JobName": "job",
    "Partition": "all",
}


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeWorld:
    fake = make_fake(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    return FakeWorld(fake, CommandsSlurm(timeout_s=5))


class TestContract(contract.Contract):
    """Every adapter's cases."""


def records(world: FakeWorld, *many: dict[str, str]) -> None:
    with world.fake.state() as state:
        state["records"] = [RECORD | fields for fields in many]


def test_poll_is_one_question_however_many_jobs_there_are(world: FakeWorld) -> None:
    for _ in range(50):
        world.fake.submit()
    assert len(world.service.poll()) == 50
    assert len(world.fake.calls()) == 1


def test_a_forgotten_job_is_as_accounting_has_it(world: FakeWorld) -> None:
    records(world, {}, {"JobIDRaw": "72", "JobID": "71_4", "State": "FAILED", "ExitCode": "3:0"})
    asked = [SlurmId("70"), SlurmId("71_4"), SlurmId("71"), SlurmId("99")]
    found = world.service.states(asked)
    assert {job: (status.state, status.exit_code) for job, status in found.items()} == {
        "70": (SlurmState.CANCELLED, 143),
        "71_4": (SlurmState.FAILED, 3),
        "71": (SlurmState.FAILED, 3),
    }
    assert len(world.calls("squeue")) == len(world.calls("sacct")) == 1


def test_accounting_that_does_not_answer_leaves_a_forgotten_job_unsure(world: FakeWorld) -> None:
    known = SlurmId(world.fake.submit())
    with world.fake.state() as state:
        state["accounting"] = "down"
    found = world.service.states([known, SlurmId("70")])
    assert found[known].state is SlurmState.PENDING
    assert found[SlurmId("70")].state is SlurmState.UNSURE
    assert "slurmdbd does not answer" in found[SlurmId("70")].reason


def test_without_accounting_slurmctlds_word_is_the_last(world: FakeWorld) -> None:
    with world.fake.state() as state:
        state["accounting"] = False
    assert world.service.states([SlurmId("70")]) == {}
    assert world.service.past([SlurmId("70")]) == {}


def test_a_task_cancelled_while_it_waited_has_no_record_and_is_cancelled(world: FakeWorld) -> None:
    array = world.fake.submit(array="0,2")
    asked = [SlurmId(f"{array}_1"), SlurmId(f"{array}_2"), SlurmId("99_1")]
    found = world.service.states(asked)
    assert {job: status.state for job, status in found.items()} == {
        asked[0]: SlurmState.CANCELLED,
        asked[1]: SlurmState.PENDING,
    }
    assert (found[asked[0]].array_id, found[asked[0]].array_task) == (array, 1)
    with world.fake.state() as state:
        state["accounting"] = "down"
    assert world.service.states(asked)[asked[0]].state is SlurmState.UNSURE


def test_tasks_that_scancel_of_a_user_cancelled_while_they_waited_are_cancelled(
    world: FakeWorld,
) -> None:
    """As seen with 22.05: the array's record stays, and has forgotten its tasks."""
    array = world.fake.submit(array="1-3")
    world.fake.change(array, job_state="CANCELLED", array_task_string="")
    asked = [SlurmId(f"{array}_{task}") for task in (1, 2, 3)]
    assert world.service.poll()[SlurmId(array)].state is SlurmState.CANCELLED
    found = world.service.states(asked)
    assert [found[job].state for job in asked] == [SlurmState.CANCELLED] * 3
    assert [found[job].array_task for job in asked] == [1, 2, 3]


def test_tasks_that_never_started_are_found_in_their_arrays_record(world: FakeWorld) -> None:
    """slurmctld has forgotten it, and sacct finds it by the array's number only."""
    records(world, {"JobIDRaw": "71", "JobID": "71_[1,3]", "State": "CANCELLED by 0"})
    asked = [SlurmId("71_1"), SlurmId("71_2"), SlurmId("71_3")]
    found = world.service.states(asked)
    assert [found[job].state for job in asked] == [SlurmState.CANCELLED] * 3
    assert [
        next(word for word in words if word.startswith("--jobs=")) for words in world.calls("sacct")
    ] == ["--jobs=71_1,71_2,71_3", "--jobs=71"]


def test_past_asks_for_every_incarnation(world: FakeWorld) -> None:
    records(world, {"State": "REQUEUED"}, {"Start": "1796001999", "AdminComment": "gpu_s=3"})
    first, second = world.service.past([SlurmId("70")])[SlurmId("70")]
    assert (first.word, second.word) == ("REQUEUED", "CANCELLED")
    assert (second.gpus, second.admin_comment) == (2, "gpu_s=3")
    assert "--duplicates" in world.calls("sacct")[0]


def test_a_comment_cannot_pretend_to_be_a_record(world: FakeWorld) -> None:
    asked = [SlurmId("70"), SlurmId("71")]
    world.service.past(asked)
    (words,) = world.calls("sacct")
    old = next(word for word in words if word.startswith("--delimiter=")).partition("=")[2]
    forged = old.join(["71", "71", "COMPLETED", *[""] * 16])
    records(world, {"Comment": f"x\n{forged}"})
    assert set(world.service.past(asked)) == {"70"}


def test_submit_gives_the_job_its_environment_and_nothing_of_ours(
    world: FakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_HOLD", "1")
    monkeypatch.setenv("SECRET", "ours")
    number = world.user.submit(
        contract.job(
            world,
            "echo $1",
            "--mem=1",
            environment={"A": "1\n2", "B": "3"},
            arguments=("an argument", "--hold"),
            time_limit_us=61_000_000,
            error="err",
        ),
        hold=True,
    )
    assert number == "1"
    ((script, variables),) = world.calls("script")
    assert (script, variables) == ("#!/bin/bash\necho $1\n", "SLURM_JOB_NAME=contract\0A=1\n2\0B=3")
    (words,) = world.calls("sbatch")
    assert words[-2:] == ["an argument", "--hold"]
    assert {"--time=2", "--hold", "--mem=1", "--error=err", "--output=slurm-%j.out"} <= set(words)
    assert not Path(words[-3]).exists()


def test_a_job_that_sbatch_queued_before_it_hung_is_found_again(world: FakeWorld) -> None:
    world.set_mode("late")
    slurm = CommandsSlurm(timeout_s=1)
    assert slurm.submit(contract.job(world), hold=True) == "1"
    assert slurm.submit(contract.job(world), hold=True) == "2"


def test_a_job_that_is_not_there_after_sbatch_hung_may_come_yet(world: FakeWorld) -> None:
    world.set_mode("hang")
    with pytest.raises(SlurmUnavailable, match="Slurm may have queued the job all the same"):
        CommandsSlurm(timeout_s=0.5).submit(contract.job(world), hold=True)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("hang", "squeue took more than 0.5 s: slurmctld does not answer"),
        ("down", "squeue got no answer"),
        ("munge", "start munged on this host"),
        ("key", "all hosts have the same munge.key"),
        ("garbage", "squeue printed something that is no answer"),
    ],
)
def test_no_answer_says_why_and_what_to_do(world: FakeWorld, mode: str, words: str) -> None:
    world.set_mode(mode)
    begun = time.monotonic()
    with pytest.raises(SlurmUnavailable, match=words):
        CommandsSlurm(timeout_s=0.5 if mode == "hang" else 5).poll()
    assert time.monotonic() - begun < 4


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("down", "slurmctld does not answer: see `scontrol ping`"),
        ("munge", "start munged on this host"),
        ("key", "same munge.key"),
    ],
)
def test_an_order_that_reached_nobody_is_not_refused(
    world: FakeWorld, mode: str, words: str
) -> None:
    number = SlurmId(world.fake.submit())
    world.set_mode(mode)
    for order in (world.service.release, world.service.cancel, world.service.hold):
        with pytest.raises(SlurmUnavailable, match=words):
            order(number)
    with pytest.raises(SlurmUnavailable, match=words):
        world.user.submit(contract.job(world), hold=True)


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    program = tmp_path / "hang"
    program.write_text(f"#!/bin/sh\nsleep 60 & echo $! > {tmp_path}/child; wait\n")
    program.chmod(0o755)
    with pytest.raises(SlurmUnavailable, match="hang took more than 1 s"):
        invoke.run([str(program)], env={"PATH": "/bin:/usr/bin"}, timeout_s=1)
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_what_a_program_said_before_it_hung_is_the_cause(tmp_path: Path) -> None:
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\necho 's_p_parse_file: cannot stat file x' >&2; sleep 60\n")
    program.chmod(0o755)
    with pytest.raises(SlurmUnavailable, match=r"slurm.conf cannot be found: set `conf`"):
        invoke.run([str(program)], env={"PATH": "/bin:/usr/bin"}, timeout_s=1)


def test_a_munge_that_does_not_listen_is_the_cause_of_a_silent_hang(tmp_path: Path) -> None:
    program, conf = tmp_path / "squeue", tmp_path / "slurm.conf"
    program.write_text("#!/bin/sh\nsleep 60\n")
    program.chmod(0o755)
    address = tmp_path / "sock"
    env = {"PATH": "/bin:/usr/bin", "SLURM_CONF": str(conf)}
    conf.write_text(f"AuthType=auth/munge\nAuthInfo=socket={address},cred_expire=9\n")
    with pytest.raises(SlurmUnavailable, match=r"took more than 1 s: MUNGE .* start munged"):
        invoke.run([str(program)], env=env, timeout_s=1)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(address))
        listening.listen()
        assert not invoke.munge_is_down(str(conf))
    assert invoke.munge_is_down(str(conf))
    conf.write_text(f"AuthType=auth/none\nAuthInfo=socket={address}\n")
    assert not invoke.munge_is_down(str(conf))
    assert not invoke.munge_is_down(str(tmp_path / "nothing"))


def test_a_slurm_conf_that_is_not_there_is_said_at_once(world: FakeWorld, tmp_path: Path) -> None:
    with pytest.raises(SlurmUnavailable, match=r"nowhere/slurm.conf does not exist: slurm.conf"):
        CommandsSlurm(tmp_path / "nowhere" / "slurm.conf").poll()
    assert world.fake.calls() == []


def test_a_machine_without_slurm_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmUnavailable, match=r"cannot run squeue .*install Slurm's client"):
        CommandsSlurm().poll()


def test_programs_get_the_configuration_and_none_of_their_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SQUEUE_FORMAT", "SLURM_TIME_FORMAT", "SLURM_CLUSTERS", "SACCT_FORMAT"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("SLURM_CONF", "/elsewhere")
    env = invoke.environment(tmp_path / "slurm.conf")
    assert env["SLURM_CONF"] == str(tmp_path / "slurm.conf")
    assert env["LC_ALL"] == "C"
    assert env["SLURM_TIME_FORMAT"] == "%s"
    assert not {"SQUEUE_FORMAT", "SLURM_CLUSTERS", "SACCT_FORMAT"} & set(env)
    assert invoke.environment(None)["SLURM_CONF"] == "/elsewhere"


def test_nodes_of_a_newer_slurm_are_asked_of_scontrol(world: FakeWorld) -> None:
    world.set_mode("newer")
    assert set(world.service.nodes()) == {"n1", "n2", "n3", "n4"}
    assert set(world.service.nodes()) == {"n1", "n2", "n3", "n4"}
    assert len(world.calls("sinfo")) == 1


def test_a_note_goes_to_accounting_and_not_to_the_users_comment(world: FakeWorld) -> None:
    world.service.annotate(SlurmId("7_2"), "gpu_s=1.5 of b")
    (words,) = world.calls("sacctmgr")
    assert words == [
        *("--immediate", "modify", "job", "where", "jobid=7_2", "set"),
        "AdminComment=gpu_s=1.5 of b",
    ]


def test_a_note_that_the_service_may_not_write_is_refused(world: FakeWorld) -> None:
    with world.fake.state() as state:
        state["operator"] = False
    with pytest.raises(SlurmRejected, match="doesn't have privilege"):
        world.service.annotate(SlurmId("7"), "note")


def test_without_accounting_a_note_stays_with_slurmctld(world: FakeWorld) -> None:
    number = SlurmId(world.fake.submit())
    with world.fake.state() as state:
        state["accounting"] = False
    world.service.annotate(number, "note")
    assert world.service.poll()[number].admin_comment == "note"


def test_several_threads_may_ask_at_once(world: FakeWorld) -> None:
    number = SlurmId(world.fake.submit())
    seen: list[int] = []
    threads = [
        threading.Thread(target=lambda: seen.append(len(world.service.states([number]))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1, 1]


def test_a_signal_that_ends_a_program_is_no_refusal(tmp_path: Path) -> None:
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\nkill -9 $$\n")
    program.chmod(0o755)
    answer = invoke.run([str(program)], env={}, timeout_s=5)
    with pytest.raises(SlurmUnavailable, match="squeue was ended by signal 9"):
        invoke.checked(answer)


def test_a_refusal_does_not_name_the_program_twice() -> None:
    answer = invoke.Answer(
        argv=("/usr/bin/sbatch", "x"),
        code=1,
        out=b"",
        err="sbatch: error: plexrl: unknown model 'x'\nsbatch: error: Batch job failed\n",
    )
    with pytest.raises(SlurmRejected) as refused:
        invoke.checked(answer)
    words = "plexrl: unknown model 'x'\nBatch job failed"
    assert refused.value.stderr == words
    assert str(refused.value) == f"sbatch: {words}"

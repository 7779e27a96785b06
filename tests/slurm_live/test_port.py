"""The adapters of a real Slurm, on a real one: as an Operator, on another user's jobs."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.choose import make_cluster_port
from plexrl_slurm.slurm.commands import CommandsSlurm
from plexrl_slurm.slurm.eligible import held_by_slurm
from plexrl_slurm.slurm.port import ClusterPort, SlurmState
from plexrl_slurm.slurm.pyslurm_port import PyslurmSlurm
from tests.slurm import contract
from tests.slurm_live.as_user import port_of
from tests.slurm_live.cluster import Cluster, wait_for
from tests.slurm_live.services import munged

pytestmark = pytest.mark.slurm

TIMEOUT_S = 4.0
#: pyslurm has to be that of this machine's Slurm; where there is none, its double plays it.
ADAPTERS = ["commands"]
if isinstance(make_cluster_port("auto"), PyslurmSlurm):
    ADAPTERS.append("pyslurm")


class LiveWorld:
    """plxalice's jobs, plxsvc's Operator."""

    def __init__(self, cluster: Cluster, port: ClusterPort) -> None:
        self.cluster, self.name = cluster, "plxalice"
        self.folder = cluster.home("plxalice")
        self.user, self.service = port_of("plxalice", port), port_of("plxsvc", port)

    def heterogeneous(self) -> SlurmId:
        """A running one."""
        number = self.user.submit(contract.job(self, contract.HETEROGENEOUS), hold=False)
        contract.until(self.service, number, lambda job: job.state is SlurmState.RUNNING)
        return number

    def silence(self) -> None:
        """slurmctld is killed."""
        self.cluster.kill_slurmctld()

    def answer_again(self) -> None:
        """Until here."""
        self.cluster.start_slurmctld()


@pytest.fixture(params=ADAPTERS)
def world(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[LiveWorld]:
    port = make_cluster_port(request.param, cluster.slurm_conf, TIMEOUT_S)
    yield LiveWorld(cluster, port)
    if cluster.pid("slurmctld") is None:
        cluster.start_slurmctld()
    cluster.run("root", ["scancel", "-u", "plxalice"])


class TestContract(contract.Contract):
    """Every adapter's cases."""


def ended(world: LiveWorld, number: SlurmId) -> None:
    """Wait for the job's end, in accounting too."""

    def is_there() -> bool:
        past = world.service.past([number]).get(number, ())
        return bool(past) and past[-1].end_us is not None

    wait_for(is_there, f"{number} has ended in accounting", seconds=30)


def test_an_end_is_the_same_to_slurmctld_and_to_accounting(world: LiveWorld) -> None:
    number = world.user.submit(contract.job(world, "exit 3"), hold=False)
    status = contract.until(
        world.service, number, lambda job: job.state not in (SlurmState.PENDING, SlurmState.RUNNING)
    )
    status = contract.until(world.service, number, lambda job: job.state is SlurmState.FAILED)
    ended(world, number)
    assert (status.exit_code, status.word) == (3, "FAILED")
    (record,) = world.service.past([number])[number]
    assert (record.exit_code, record.user, record.nodes) == (3, "plxalice", status.nodes)
    assert (record.start_us, record.end_us) == (status.start_us, status.end_us)
    forgotten = CommandsSlurm(world.cluster.slurm_conf).ended([number])[number]
    assert (forgotten.state, forgotten.exit_code) == (SlurmState.FAILED, 3)
    assert (forgotten.user, forgotten.end_us) == (status.user, status.end_us)


def test_the_script_gets_its_environment_and_arguments(world: LiveWorld) -> None:
    number = world.user.submit(
        contract.job(
            world,
            'echo "$1|$A|${HOME-none}|$SBATCH_HOLD"',
            environment={"A": "one\ntwo", "SBATCH_HOLD": "1", "PATH": "/usr/bin:/bin"},
            arguments=("x y",),
            output="%x-%j.out",
        ),
        hold=False,
    )
    ended(world, number)
    output = world.folder / f"contract-{number}.out"
    assert output.read_text() == "x y|one\ntwo|none|1\n"


def test_who_is_not_an_operator_has_no_say_in_anothers_job(world: LiveWorld) -> None:
    number = world.user.submit(contract.job(world), hold=True)
    other = port_of("plxbob", CommandsSlurm(world.cluster.slurm_conf, TIMEOUT_S))
    for order in (other.release, other.hold, other.cancel):
        with pytest.raises(SlurmRejected, match=r"denied|Invalid user id"):
            order(number)
    world.service.hold(number)
    with pytest.raises(SlurmRejected, match="denied"):
        world.user.release(number)
    assert world.service.poll()[number].held


def test_one_poll_of_fifty_jobs_is_one_question(world: LiveWorld) -> None:
    numbers = {world.user.submit(contract.job(world), hold=True) for _ in range(50)}
    world.cluster.run("root", ["sdiag", "--reset"])
    jobs = world.service.poll()
    shown = world.cluster.run("root", ["sdiag"]).stdout
    assert numbers <= set(jobs)
    by_user = dict(re.findall(r"^\s*(\w+)\s+\( *\d+\) count:(\d+)", shown, re.MULTILINE))
    assert by_user.get("plxsvc") == "1"


def test_a_note_of_an_operator_is_in_sacct_beside_the_users_comment(world: LiveWorld) -> None:
    lives = world.user.submit(contract.job(world, "sleep 2", "--comment=mine"), hold=False)
    array = world.user.submit(
        contract.job(world, "true", "--comment=mine", "--array=1,2"), hold=False
    )
    wait_for(lambda: lives in world.service.past([lives]), "the record", seconds=20)
    world.service.annotate(lives, "GPU_s=1.5, while it lived; 'x'")
    one, two = SlurmId(f"{array}_1"), SlurmId(f"{array}_2")
    for number in (lives, one, two):
        ended(world, number)
    world.service.annotate(one, "gpu_s=2 after its end")
    past = world.service.past([lives, one, two])
    assert {job: (many[-1].admin_comment, many[-1].comment) for job, many in past.items()} == {
        # So sacctmgr writes it.
        lives: ("gpu_s=1.5, while it lived; `x`", "mine"),
        one: ("gpu_s=2 after its end", "mine"),
        two: ("", "mine"),
    }
    with pytest.raises(SlurmRejected, match=r"privilege|denied"):
        world.user.annotate(lives, "mine")


def test_slurmctlds_own_note_wins_at_the_end_and_loses_after_it(world: LiveWorld) -> None:
    number = world.user.submit(contract.job(world, "sleep 3"), hold=False)
    world.cluster.run("root", ["scontrol", "update", f"JobId={number}", "AdminComment=plexrl:1:a:"])
    assert world.service.poll()[number].admin_comment == "plexrl:1:a:"
    wait_for(lambda: number in world.service.past([number]), "the record", seconds=20)
    world.service.annotate(number, "too early")
    ended(world, number)
    assert world.service.past([number])[number][-1].admin_comment == "plexrl:1:a:"
    world.service.annotate(number, "in time")
    assert world.service.past([number])[number][-1].admin_comment == "in time"


def test_a_requeued_job_keeps_its_number_and_has_a_record_for_each_time(world: LiveWorld) -> None:
    number = world.user.submit(contract.job(world, "sleep 100", "--requeue"), hold=False)
    contract.until(world.service, number, lambda job: job.state is SlurmState.RUNNING)
    world.cluster.run("plxalice", ["scontrol", "requeue", number])
    contract.until(
        world.service, number, lambda job: job.state is SlurmState.PENDING and job.restarts == 1
    )
    time.sleep(2)
    world.service.start_now(number)
    contract.until(world.service, number, lambda job: job.state is SlurmState.RUNNING)
    world.service.cancel(number)
    ended(world, number)
    first, second = world.service.past([number])[number]
    assert (first.word, second.word) == ("REQUEUED", "CANCELLED")
    world.service.annotate(number, "of the last one")
    notes = [record.admin_comment for record in world.service.past([number])[number]]
    assert notes == ["", "of the last one"]
    assert first.start_us is not None
    assert second.start_us is not None
    assert first.start_us < second.start_us


def test_a_long_and_ragged_array_is_not_cut(world: LiveWorld) -> None:
    indices = [*range(1, 300, 7), *range(301, 420, 3)]
    listed = ",".join(map(str, indices))
    array = world.user.submit(contract.job(world, "true", f"--array={listed}"), hold=True)
    found = {job.array_task for job in world.service.poll().values() if job.array_id == array}
    assert found == set(indices)


def test_waiting_tasks_that_scancel_of_their_user_took_are_cancelled(world: LiveWorld) -> None:
    array = world.user.submit(contract.job(world, "sleep 100", "--array=1-3"), hold=True)
    tasks = [SlurmId(f"{array}_{task}") for task in (1, 2, 3)]
    world.cluster.run("root", ["scancel", "--user", "plxalice"])

    def states() -> list[SlurmState]:
        return [status.state for status in world.service.states(tasks).values()]

    wait_for(lambda: states() == [SlurmState.CANCELLED] * 3, "all are cancelled", seconds=15)


def test_a_held_job_has_its_dependency_and_its_time_to_begin(world: LiveWorld) -> None:
    """Also when the dependency has come true: slurmctld does not look at it while it is held."""
    port = CommandsSlurm(world.cluster.slurm_conf)
    first = world.user.submit(contract.job(world, "true"), hold=False)
    wish = contract.job(world, "true", f"--dependency=afterany:{first}")
    after = world.user.submit(wish, hold=True)
    later = world.user.submit(contract.job(world, "true", "--begin=now+1hour"), hold=True)
    ended(world, first)
    known = port.poll()
    for status in (known[after], port.queued(after)[after]):
        assert status.dependency == f"afterany:{first}(unfulfilled)"
    now_us = time.time_ns() // 1000
    for status in (known[later], port.queued(later)[later]):
        assert status.eligible_us is not None
        assert 3_400_000_000 < status.eligible_us - now_us < 3_700_000_000
    assert held_by_slurm(after, known, now_us) is None
    held = held_by_slurm(later, known, now_us)
    assert held is not None
    assert held.word == "BeginTime"


def test_a_job_that_slurm_refuses_is_refused_in_its_words(world: LiveWorld) -> None:
    for option, words in (
        ("--account=nobody", "Invalid account"),
        ("--partition=nowhere", "Invalid partition name"),
        ("--gres=gpu:9", "Requested node configuration is not available"),
    ):
        with pytest.raises(SlurmRejected, match=words):
            world.user.submit(contract.job(world, "true", option), hold=False)
    number = world.user.submit(contract.job(world), hold=True)
    with pytest.raises(SlurmRejected, match="too long"):
        world.service.set_comment(number, "x" * 9000)


def test_a_drained_and_a_lost_node_are_not_usable(world: LiveWorld) -> None:
    world.cluster.set_node("n4", "DRAIN", "looked at")
    drained = world.service.nodes()["n4"]
    world.cluster.set_node("n4", "RESUME")
    assert (drained.usable, drained.reason) == (False, "looked at")
    wait_for(lambda: world.service.nodes()["n4"].usable, "n4 is back")
    world.cluster.set_node("n4", "DOWN")
    assert not world.service.nodes()["n4"].usable
    world.cluster.set_node("n4", "RESUME")
    wait_for(lambda: world.service.nodes()["n4"].usable, "n4 is back")


def test_a_job_has_the_gpus_it_asks_for_and_the_node_lends_them(world: LiveWorld) -> None:
    number = world.user.submit(
        contract.job(world, "sleep 100", "--gres=gpu:3", "--partition=gpu", "--nodelist=n2"),
        hold=True,
    )
    assert world.service.poll()[number].gpus == 3
    world.service.release(number)
    running = contract.until(world.service, number, lambda job: job.state is SlurmState.RUNNING)
    assert (running.gpus, running.nodes) == (3, ("n2",))
    node = world.service.nodes()["n2"]
    assert (node.gpus, node.gpus_used) == (4, 3)


class Munge:
    """A munged of our own for a client's slurm.conf: one that may be killed."""

    def __init__(self, cluster: Cluster) -> None:
        self.folder = Path(f"{cluster.folder}-munge")
        self.folder.mkdir(mode=0o755)
        self.conf = self.folder / "slurm.conf"
        self.socket = self.folder / "sock"
        text = cluster.slurm_conf.read_text()
        self.conf.write_text(text.replace(str(cluster.munge_socket), str(self.socket)))
        for name in ("gres.conf", "cgroup.conf", "plugstack.conf"):
            shutil.copy(cluster.slurm_conf.with_name(name), self.folder)
        self._running: subprocess.Popen[bytes] | None = None

    def start(self, key: bytes | None) -> None:
        """With the cluster's key, or one of its own."""
        where = self.folder / ("same" if key else "other")
        where.mkdir(mode=0o755)
        if key:
            (where / "munge.key").touch(mode=0o600)
            (where / "munge.key").write_bytes(key)
        argv = munged(where, self.socket)
        foreground = argv if "--foreground" in argv else [*argv, "--foreground"]
        user = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
        shutil.chown(self.folder, "munge")
        self._running = subprocess.Popen([*user, *foreground, "--force"])
        wait_for(self.socket.is_socket, "munged")

    def kill(self) -> None:
        """No farewell: its socket stays."""
        if self._running is not None:
            self._running.kill()
            self._running.wait()
            self._running = None


@pytest.fixture
def munge(cluster: Cluster) -> Iterator[Munge]:
    made = Munge(cluster)
    yield made
    made.kill()
    shutil.rmtree(made.folder)


def answers(question: Callable[[], object]) -> bool:
    try:
        question()
    except SlurmUnavailable:
        return False
    return True


def test_munge_that_is_dead_or_has_another_key_is_named(
    world: LiveWorld, munge: Munge, cluster: Cluster
) -> None:
    number = world.user.submit(contract.job(world), hold=True)
    port = port_of("plxsvc", CommandsSlurm(munge.conf, TIMEOUT_S))
    munge.start((cluster.munge_socket.parent / "munge.key").read_bytes())
    wait_for(lambda: answers(port.poll), "an answer")
    assert number in port.poll()
    munge.kill()
    for question in (
        port.poll,
        port.nodes,
        lambda: port.release(number),
        lambda: port.cancel(number),
        lambda: port.past([number]),
        lambda: port.annotate(number, "note"),
    ):
        with pytest.raises(SlurmUnavailable, match="start munged on this host"):
            question()
    munge.socket.unlink(missing_ok=True)
    munge.start(None)
    for question in (
        port.poll,
        lambda: port.release(number),
        lambda: port.cancel(number),
        lambda: port.past([number]),
    ):
        with pytest.raises(SlurmUnavailable, match=r"have the same munge\.key"):
            question()
    assert world.service.poll()[number].held

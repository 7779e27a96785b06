"""A whole partition on the private cluster: real daemon, real holds, engines that are fake."""

import contextlib
import json
import os
import signal
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plexrl_slurm.cli.client import Client
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.db.ledger import Flaw, gaps
from plexrl_slurm.settings import read_site
from tests.slurm_live import python
from tests.slurm_live.cluster import Cluster, ClusterError, wait_for
from tests.slurm_live.processes import identity
from tests.slurm_live.stuck import free_gpus, unstick

SERVICE = "plxsvc"

SETTINGS = """
[partition]
name = "rlvr"
state_dir = "{folder}/state"
database_url = "sqlite:///{folder}/ledger.db"
host_dir = "{host}"
{partition}

[slurm]
adapter = "commands"
conf = "{conf}"
controller_partition = "cpu"
munge_socket = "{munge}"
poll_seconds = {poll}

[hold]
backend = "slurm"
{hold}

[[hold.component]]
pool = "train"
partition = "{slurm_partition}"
nodes = {train_nodes}
gpus_per_node = {gpus}
gpu_type = "h200"

[[hold.component]]
pool = "rollout"
partition = "{slurm_partition}"
nodes = {rollout_nodes}
gpus_per_node = {gpus}

[[wpg]]
pool = "train"
engine = "{train_engine}"
{train_shape}
options = {train}

[[wpg]]
pool = "rollout"
engine = "{rollout_engine}"
count = {rollout_nodes}
options = {rollout}

[[model]]
name = "tiny"
path = "{model}"
dtype = "float32"
max_context_length = 256
"""


class Partition:
    """Runs as the service user; everything that it starts ends with :meth:`close`."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        model: Path,
        *,
        hold: Mapping[str, Any] | None = None,
        train: Mapping[str, Any] | None = None,
        rollout: Mapping[str, Any] | None = None,
        engines: tuple[str, str] = ("fake_train", "fake_sample"),
        nodes: tuple[int, int] = (1, 1),
        train_shape: Mapping[str, Any] | None = None,
        gpus: int = 1,
        slurm_partition: str = "gpu",
        partition: Mapping[str, Any] | None = None,
        poll_seconds: float = 0.5,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        folder.mkdir()
        folder.chmod(0o755)
        self.cluster, self.folder = cluster, folder
        state = folder / "state"
        state.mkdir()
        state.chmod(0o711)
        for path in (folder, state):
            _give(path)
        self.config = folder / "plexrl.toml"
        self.config.write_text(
            SETTINGS.format(
                folder=folder,
                host=cluster.host_dir,
                conf=cluster.slurm_conf,
                munge=cluster.munge_socket,
                poll=poll_seconds,
                hold=_lines({"agent_timeout_seconds": 5, "durable_every": 2} | dict(hold or {})),
                partition=_lines(
                    {"host_bytes": "1GiB", "listen": "127.0.0.1:0"} | dict(partition or {})
                ),
                slurm_partition=slurm_partition,
                train_nodes=nodes[0],
                train_shape=_lines(train_shape or {"count": nodes[0]}),
                rollout_nodes=nodes[1],
                gpus=gpus,
                train_engine=engines[0],
                rollout_engine=engines[1],
                train=_inline(train or {}),
                rollout=_inline(rollout or {}),
                model=model,
            ),
            encoding="utf-8",
        )
        self.site = read_site(self.config)
        self.daemon: subprocess.Popen[bytes] | None = None
        self._environment = dict(environment or {})

    # -- the daemon --------------------------------------------------------------------------
    def start(self, *, up: bool = True, seconds: float = 90) -> None:
        """Start the daemon; with ``up``, return when all its WPGs are."""
        env = self.cluster.env(SERVICE) | python.environment() | self._environment
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = subprocess.Popen(
                [python.interpreter(), "-m", "plexrl_slurm.daemons.partitiond", str(self.config)],
                stdout=log,
                stderr=log,
                env=env,
                cwd=self.folder,
                **identity(SERVICE),  # type: ignore[call-overload]
            )
        if up:
            self.wait_up(seconds=seconds)
        else:
            wait_for(self.answers, self.what, seconds=seconds)

    def wait_up(self, *, seconds: float = 90) -> None:
        """Wait until there is a hold with all its WPGs up; if Slurm is stuck, help it once."""
        try:
            wait_for(self.up, self.what, seconds=seconds)
        except ClusterError:
            found = self._help()
            wait_for(self.up, lambda: f"{self.what()}; before: {found}", seconds=2 * seconds)

    def _help(self) -> str:
        """End what Slurm does not end; said in the summary of the test run."""
        found = unstick(self.cluster)
        warnings.warn(f"Slurm was stuck: {found}; {self._hold_logs()}", stacklevel=3)
        return found

    def _hold_logs(self) -> str:
        logs = sorted((self.folder / "state").glob("**/holds/*.log"))
        return "; ".join(f"{log.name}: {log.read_text(errors='replace')[-600:]}" for log in logs)

    def what(self) -> str:
        """For the sentence of a wait that was in vain."""
        return f"the partition, whose log ends: {self.log()[-3000:]}"

    def log(self) -> str:
        return (self.folder / "daemon.log").read_text(encoding="utf-8")

    def answers(self) -> bool:
        assert self.daemon is not None and self.daemon.poll() is None, self.log()[-3000:]
        with contextlib.suppress(Exception):
            self.nodes()
            return True
        return False

    def up(self) -> bool:
        """Whether there is a hold with all its WPGs up."""
        if not self.answers():
            return False
        nodes = self.nodes()
        states = [wpg["state"] for wpg in nodes["wpgs"]]
        return bool(states) and not {"starting", "down"} & set(states)

    def kill_daemon(self) -> None:
        """With -9."""
        assert self.daemon is not None
        self.daemon.kill()
        self.daemon.wait()

    def stop_daemon(self) -> None:
        """With TERM."""
        assert self.daemon is not None
        self.daemon.terminate()
        assert self.daemon.wait(timeout=30) == 0

    def close(self) -> None:
        """End the daemon, and the service's and the users' jobs."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        for seconds in (15, 30):  # a message that got lost is said again
            for user in (SERVICE, "plxalice", "plxbob"):
                self.cluster.run("root", ["scancel", "-u", user], check=False)
            with contextlib.suppress(ClusterError):
                wait_for(lambda: not self.cluster.steps(), "the end of the jobs", seconds=seconds)
                break
        else:
            self._help()
            wait_for(lambda: not self.cluster.steps(), "the end of the jobs", seconds=60)
        if found := free_gpus(self.cluster):
            warnings.warn(f"Slurm was stuck: {found}", stacklevel=2)

    # -- asking ------------------------------------------------------------------------------
    def client(self) -> Client:
        return Client(self.site)

    def nodes(self) -> dict[str, Any]:
        with self.client() as client:
            return client.nodes()

    def holds(self) -> dict[str, dict[str, Any]]:
        return {hold["id"]: hold for hold in self.nodes()["holds"]}

    def wpgs(self) -> dict[str, dict[str, Any]]:
        return {wpg["id"]: wpg for wpg in self.nodes()["wpgs"]}

    def agent_pids(self) -> dict[str, int]:
        return {agent["name"]: int(agent["pid"]) for agent in self.nodes()["agents"]}

    def rank_pid(self, wpg: str, rank: int = 0) -> int:
        return int(self.wpgs()[wpg]["pids"][rank])

    def flaws(self) -> list[Flaw]:
        """Faults in the books, from the database itself."""
        with self.database() as session:
            found: list[Flaw] = []
            for (hold,) in session.connection().exec_driver_sql("select id from holds"):
                found += gaps(session, hold)
            return found

    def query(self, sql: str) -> list[Any]:
        with self.database() as session:
            return [tuple(row) for row in session.connection().exec_driver_sql(sql)]

    @contextlib.contextmanager
    def database(self) -> Iterator[Any]:
        engine = open_database(self.site.database_url)
        try:
            with transaction(engine, read_only=True) as session:
                yield session
        finally:
            engine.dispose()

    # -- users -------------------------------------------------------------------------------
    def plexrl(
        self, user: str, *words: str, stdin: str = "", seconds: float = 60, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """The command line, as a user has it."""
        return self.cluster.run(
            user,
            [python.interpreter(), "-m", "plexrl_slurm.cli.main", *words],
            env={"PLEXRL_CONFIG": str(self.config), **python.environment(), **env},
            stdin=stdin,
            seconds=seconds,
            check=False,
        )

    def submit(self, user: str, script: str, *options: str) -> str:
        """Slurm's number of a job of ``plexrl sbatch``."""
        done = self.plexrl(user, "sbatch", "--parsable", *options, stdin=script)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, slurm_id: str) -> dict[str, Any]:
        with self.client() as client:
            return client.job(slurm_id)

    def wait_job(self, slurm_id: str, *states: str, seconds: float = 60) -> dict[str, Any]:
        """Wait until the daemon says one of ``states``."""
        wait_for(
            lambda: self.job(slurm_id)["state"] in states,
            lambda: f"job {slurm_id}: {self.job(slurm_id)}; {self.log()[-2000:]}",
            seconds=seconds,
        )
        return self.job(slurm_id)

    def output(self, user: str, slurm_id: str) -> str:
        path = self.cluster.home(user) / f"slurm-{slurm_id}.out"
        return path.read_text(encoding="utf-8") if path.exists() else ""


def freeze(pid: int) -> None:
    """As a network that fails: the process says nothing, and does not know."""
    _ours(pid)
    os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def kill(pid: int) -> None:
    """With -9, and only what is certainly ours."""
    _ours(pid)
    os.kill(pid, signal.SIGKILL)


def _ours(pid: int) -> None:
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"plexrl_slurm" in command, command


def _give(path: Path) -> None:
    user = identity(SERVICE)
    os.chown(path, int(user["user"]), int(user["group"]))  # type: ignore[arg-type]


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in values.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_inline(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)

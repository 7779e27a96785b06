"""A whole partition for tests: real daemon, agent and ranks as processes, engines that are fake."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from plexrl_slurm.cli.client import Client
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.db.engine import open_database, transaction
from plexrl_slurm.db.ledger import Flaw, gaps
from plexrl_slurm.journal import replay
from plexrl_slurm.settings import read_site
from plexrl_slurm.slurm.local import LocalSlurm
from plexrl_slurm.slurm.port import BatchJob
from tests.scenarios.warm import Daemon, warm

REPOSITORY = Path(__file__).resolve().parents[2]


def wait_until(what: Callable[[], Any], *, seconds: float = 60.0, name: str = "it") -> Any:
    """The first true value of ``what``; fails if it takes longer than ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {name}")
        time.sleep(0.05)


class Job:
    """A job whose controller is the test itself; its Slurm job only sleeps."""

    def __init__(
        self, partition: "Partition", *, seed: int, models: list[str], seconds: int = 600
    ) -> None:
        """``seconds``: how long its Slurm job sleeps."""
        self.partition = partition
        with partition.client() as client:
            row = client.submit(
                {
                    "partition": "test",
                    "name": "job",
                    "account": "a",
                    "models": models,
                    "priority": 1,
                    "seed": seed,
                    "script": "sleep",
                    "options": {},
                }
            )
            self.id, self.token = int(row["job_id"]), str(row["token"])
            self.url = str(row["env"]["TINKER_BASE_URL"])
            self.slurm_id = partition.slurm.submit(
                BatchJob(
                    name="job",
                    script=f"#!/bin/sh\nexec sleep {seconds}\n",
                    workdir=partition.folder,
                    environment={"PATH": os.environ["PATH"]},
                ),
                hold=True,
            )
            client.bind(self.id, self.slurm_id)
        wait_until(lambda: self.row()["state"] == "running", name="the job to run")

    def row(self) -> dict[str, Any]:
        with self.partition.client() as client:
            return client.job(self.slurm_id)

    def service(self) -> Any:
        """A ``tinker.ServiceClient`` with this job's key; it is closed with the partition."""
        import tinker

        client = tinker.ServiceClient(base_url=self.url, api_key=self.token)
        self.partition.clients.append(client)
        return client

    def cancel(self) -> None:
        with self.partition.client() as client:
            client.cancel(self.id, reason="the test is over")


class Partition:
    """Starts in a second; everything it starts ends with :meth:`close`."""

    def __init__(
        self,
        folder: Path,
        *,
        train: Mapping[str, Any] | None = None,
        rollout: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        hold: Mapping[str, Any] | None = None,
        sharing: Mapping[str, Any] | None = None,
        engines: tuple[str, str] = ("fake_train", "fake_sample"),
        train_gpus: int = 1,
        train_nodes: int = 1,
        shared: Mapping[str, Any] | None = None,
        database_url: str | None = None,
        tables: str = "",
        model: Path,
    ) -> None:
        """``tables``: more of the settings file."""
        self.folder = folder
        #: Lines of both WPG tables, if they take turns on the same GPUs.
        self.shared = {} if shared is None else {"shared": "both", **shared}
        self.engines, self.train_gpus, self.train_nodes = engines, train_gpus, train_nodes
        self.sharing = {"placement": "spread", "max_jobs": 64} if sharing is None else sharing
        self.database_url = database_url or f"sqlite:///{folder / 'ledger.db'}"
        self.host = Path("/dev/shm") / f"plexrl-test-{os.getpid()}-{folder.name}"
        self.host.mkdir(mode=0o700)
        self.config = folder / "plexrl.toml"
        self.config.write_text(
            _toml(self, train or {}, rollout or {}, settings or {}, hold or {}, model) + tables,
            encoding="utf-8",
        )
        self.site = read_site(self.config)
        self.slurm = LocalSlurm(self.site.jobs_dir)
        self.daemon: Daemon | None = None
        #: Of the SDK, for this partition's jobs.
        self.clients: list[Any] = []

    def start(self, *, seconds: float = 60.0) -> None:
        """Start the daemon; returns when its WPGs are up."""
        with (self.folder / "daemon.log").open("ab") as log:
            self.daemon = warm("plexrl_slurm.daemons.partitiond").start(str(self.config), log=log)
        log_file = self.folder / "daemon.log"
        wait_until(self._up, seconds=seconds, name=f"the partition to be up; see {log_file}")

    def _up(self) -> bool:
        assert self.daemon is not None
        assert self.daemon.poll() is None, (self.folder / "daemon.log").read_text()[-2000:]
        with contextlib.suppress(Exception):
            wpgs = self.nodes()["wpgs"]
            return bool(wpgs) and all(wpg["state"] not in ("starting", "down") for wpg in wpgs)
        return False

    def client(self) -> Client:
        return Client(self.site)

    def nodes(self) -> dict[str, Any]:
        with self.client() as client:
            return client.nodes()

    def agent_pid(self, node: str = "localhost") -> int:
        (agent,) = [a for a in self.nodes()["agents"] if a["node"] == node]
        return int(agent["pid"])

    def rank_pid(self, wpg: str, rank: int = 0) -> int:
        (view,) = [view for view in self.nodes()["wpgs"] if view["id"] == wpg]
        return int(view["pids"][rank])

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

    def flaws(self) -> list[Flaw]:
        """Faults in the books, from the database itself."""
        engine = open_database(self.database_url)
        try:
            with transaction(engine, read_only=True) as session:
                found: list[Flaw] = []
                for (hold,) in session.connection().exec_driver_sql("select id from holds"):
                    found += gaps(session, hold)
                return found
        finally:
            engine.dispose()

    def query(self, sql: str) -> list[Any]:
        engine = open_database(self.database_url)
        try:
            with transaction(engine, read_only=True) as session:
                return [tuple(row) for row in session.connection().exec_driver_sql(sql)]
        finally:
            engine.dispose()

    def images(self) -> list[Path]:
        return sorted(self.host.rglob("slot-*"))

    def snapshots(self) -> list[Path]:
        return sorted(self.host.rglob("*.safetensors"))

    def published(self, job: Job, name: str) -> Any:
        """Content of a named snapshot's durable copy, as the fake engine wrote it."""
        pattern = f"job{job.slurm_id}-*/sampler_weights/{name}"
        (path,) = (self.folder / "state" / "checkpoints").glob(pattern)
        file = path / "model.safetensors" if path.is_dir() else path
        return msgspec.msgpack.decode(file.read_bytes())

    def close(self) -> None:
        """End the daemon, the hold and the jobs, and delete the host tier."""
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait()
        for client in self.clients:
            client.holder.close()  # or its threads ask for a daemon that is gone, and complain
        jobs = self.site.jobs_dir
        ids = [SlurmId(path.name) for path in jobs.iterdir()] if jobs.exists() else []
        for job in ids:
            self.slurm.cancel(job)
        wait_until(
            lambda: all(
                status.state not in ("RUNNING",) for status in self.slurm.states(ids).values()
            ),
            seconds=20,
            name="the jobs to end",
        )
        shutil.rmtree(self.host, ignore_errors=True)


def kill(pid: int) -> None:
    """With -9, and only what is certainly ours."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    assert b"plexrl_slurm" in command, command
    os.kill(pid, signal.SIGKILL)


def _toml(
    partition: Partition,
    train: Mapping[str, Any],
    rollout: Mapping[str, Any],
    settings: Mapping[str, Any],
    hold: Mapping[str, Any],
    model: Path,
) -> str:
    values = {"host_bytes": "1GiB", **settings}
    extra = _lines(values)
    return f"""
[partition]
name = "test"
state_dir = "state"
database_url = "{partition.database_url}"
host_dir = "{partition.host}"
listen = "127.0.0.1:0"
{extra}

[hold]
backend = "local"
{_lines(hold)}

[sharing]
{_lines(partition.sharing)}

[[wpg]]
pool = "train"
engine = "{partition.engines[0]}"
gpus = {partition.train_gpus}
nodes = {partition.train_nodes}
{_lines(partition.shared)}
options = {_inline(train)}

[[wpg]]
pool = "rollout"
engine = "{partition.engines[1]}"
gpus = {partition.train_gpus if partition.shared else 1}
{_lines(partition.shared)}
options = {_inline(rollout)}

[[model]]
name = "tiny"
path = "{model}"
dtype = "float32"
max_context_length = 256
"""


def _lines(values: Mapping[str, Any]) -> str:
    return "\n".join(f"{key} = {_inline(value)}" for key, value in values.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        inside = ", ".join(f"{key} = {_inline(each)}" for key, each in value.items())
        return "{" + inside + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_inline(each) for each in value) + "]"
    return json.dumps(value)


@contextlib.contextmanager
def running(folder: Path, *, seconds: float = 60.0, **options: Any) -> Iterator[Partition]:
    """A partition that is up, and gone afterwards."""
    partition = Partition(folder, **options)
    try:
        partition.start(seconds=seconds)
        yield partition
    finally:
        partition.close()
    # Whatever a test did to it: what the daemons decided is decided again.
    journals = sorted((partition.folder / "state" / "journal").glob("*.jsonl"))
    assert journals
    for journal in journals:
        assert list(replay(journal))

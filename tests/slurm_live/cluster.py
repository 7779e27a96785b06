"""A real Slurm cluster on one machine, for tests and demos: nothing of it outlives ``stop``.

slurmctld, several slurmd, munged and, if wanted, slurmdbd with MariaDB, all with files, sockets
and keys of their own. Needs root and the packages that scripts/setup.sh installs.
``python -m tests.slurm_live.cluster start|status|stop FOLDER`` runs one from a shell.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import leavings
from tests.slurm_live import configuration, processes, services
from tests.slurm_live.daemons import Daemons
from tests.slurm_live.processes import ClusterError, CommandFailed, Process, wait_for

__all__ = ["Cluster", "ClusterError", "CommandFailed", "wait_for"]

#: The host tier: each cluster's folder here has one of each node.
SHARED_MEMORY = Path("/dev/shm")

#: sinfo's words for a node that is there.
RESPONDS = frozenset({"idle", "mixed", "allocated", "completing", "draining", "drained"})


class Cluster:
    """A private cluster in ``folder``; a context manager that starts and stops it.

    Its folder must be one that every user may enter (not pytest's ``tmp_path``); see
    :meth:`temporary`.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        nodes: int = 4,
        gpus: int = 4,
        cpus: int = 64,
        memory_mb: int = 64_000,
        gpuless_nodes: int = 0,
        database: bool = True,
        port_base: int | None = None,
        job_submit: Path | str | None = None,
        task_prolog: Path | str | None = None,
        credential_seconds: int = 120,
        extra: Iterable[str] = (),
    ) -> None:
        #: Arguments to make the same one again (see :meth:`load`).
        self.settings: dict[str, Any] = {
            "nodes": nodes,
            "gpus": gpus,
            "cpus": cpus,
            "memory_mb": memory_mb,
            "gpuless_nodes": gpuless_nodes,
            "database": database,
            "port_base": port_base,
            "job_submit": None if job_submit is None else str(job_submit),
            "task_prolog": None if task_prolog is None else str(task_prolog),
            "credential_seconds": credential_seconds,
            "extra": list(extra),
        }
        self.folder = Path(folder).resolve()
        self.name = "plexrl"
        self.database = database
        gpuless = tuple(f"c{index + 1}" for index in range(gpuless_nodes))
        #: Nodes with GPUs, then those without ("c1", ...).
        self.nodes = (*(f"n{index + 1}" for index in range(nodes)), *gpuless)
        self.shape = configuration.Shape(
            nodes=self.nodes, gpuless=gpuless, gpus=gpus, cpus=cpus, memory_mb=memory_mb
        )
        self.slurm_conf = self.folder / "etc" / "slurm.conf"
        self.job_submit_script = self.folder / "etc" / "job_submit.lua"
        self.munge_socket = self.folder / "munge" / "sock"
        #: Its ``<node>`` and ``*/<node>`` go with the node: give it to agents as host_dir.
        mark = hashlib.sha256(str(self.folder).encode()).hexdigest()[:8]
        self.host_dir = SHARED_MEMORY / f"plexrl-{self.folder.name}-{mark}"
        #: Likewise, for nvme_dir.
        self.nvme_dir = self.folder / "nvme"
        self._daemons = Daemons(self.folder)
        #: In the environment of its daemons, should a pid file never have been written.
        self._mark = {"PLEXRL_CLUSTER": str(self.folder)}

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """The cluster that another process started in ``folder``."""
        path = Path(folder) / "cluster.json"
        if not path.exists():
            raise ClusterError(f"{folder}: no cluster was started there")
        return cls(folder, **json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def temporary(cls, **settings: Any) -> Self:
        """One in a new folder that says whose it is, after removing those of dead owners."""
        top = leavings.top()  # those of an earlier run are there as well
        for old in top.glob("plexrl-slurm-*"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                pid, started = json.loads((old / "owner.json").read_text(encoding="utf-8"))
                if not Process(pid, started).alive():
                    cls(old).stop()
                    shutil.rmtree(old)
        folder = Path(tempfile.mkdtemp(prefix="plexrl-slurm-", dir=top))
        folder.chmod(0o755)
        found = processes.look(os.getpid())
        assert found is not None
        owner = [found[0].pid, found[0].started]
        (folder / "owner.json").write_text(json.dumps(owner), encoding="utf-8")
        return cls(folder, **settings)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # ---- as a whole -------------------------------------------------------------------------

    def start(self) -> None:
        """Up, with every node responding; jobs of a start before it are still known."""
        services.require(self.folder, database=self.database)
        self._end_everything(patience=5)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        services.make_users()
        self._make_folders()
        self._write_conf()
        self._spawn("munged", services.munged(self.folder / "munge", self.munge_socket), "munge")
        if self.database:
            self._start_database()
        self._daemons.wait(self.munge_socket.is_socket, "munged")
        self._spawn("slurmctld", ["slurmctld", "-D"])
        self._daemons.wait(self._answers, "slurmctld")
        # Not earlier: a slurmd that finds nobody to register with waits to be asked.
        for name in self.nodes:
            self._spawn_slurmd(name)
        self._daemons.wait(self._all_up, "all nodes up")

    def stop(self) -> None:
        """End everything that belongs to this cluster, jobs too; its folder stays."""
        if self.slurm_conf.exists() and self._daemons.find("slurmctld") is not None:
            with contextlib.suppress(ClusterError):
                if jobs := self.run("root", ["squeue", "-h", "-o", "%A"], seconds=5).stdout.split():
                    self.run("root", ["scancel", *jobs], seconds=5)
                wait_for(lambda: not self.steps(), "end of the jobs", seconds=3)
        self._end_everything(patience=10)
        shutil.rmtree(self.host_dir, ignore_errors=True)

    def _end_everything(self, *, patience: float) -> None:
        """First Slurm, then what it writes to, then whatever calls this cluster its own."""
        names, below = self._daemons.names(), {"munged", "mariadbd", "slurmdbd"}
        for name in names:
            if name.startswith("slurmd."):
                self._daemons.kill(name)  # TERM would make it wait for steps, and for slurmctld
        self._daemons.end(names - below, patience=patience)
        self._daemons.end(names & below, patience=patience)
        while rest := self.steps() | processes.with_environment(self._mark):
            processes.kill(processes.below(rest))

    def steps(self) -> set[Process]:
        """Everything that runs on its nodes, except for their daemons."""
        return {process for name in self.nodes for process in self.on_node(name)}

    def on_node(self, name: str) -> set[Process]:
        """Step daemons, tasks and whatever they started, unless it dropped its environment."""
        marks = {"SLURM_CONF": str(self.slurm_conf), "SLURMD_NODENAME": name}
        # Step daemons of 24.11 have no environment, but stay where their slurmd was started.
        steps = processes.working_in(self.folder / "spool" / name, "slurmstepd")
        return (processes.with_environment(marks) | steps) - self._daemons.living()

    # ---- commands ---------------------------------------------------------------------------

    def home(self, user: str) -> Path:
        """A folder of the user's own."""
        return self.folder / "home" / user

    def env(self, user: str = "root") -> dict[str, str]:
        """The clean environment of a user's login on this cluster."""
        return {
            "SLURM_CONF": str(self.slurm_conf),
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.home(user)),
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
        }

    def run(
        self,
        user: str,
        argv: Sequence[str | Path],
        *,
        seconds: float = 30,
        check: bool = True,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Run as ``user`` at home, ``env`` added; :class:`CommandFailed` unless it ended well."""
        return processes.run(
            [str(word) for word in argv],
            user=user,
            env=self.env(user) | dict(env or {}),
            cwd=cwd or self.home(user),
            seconds=seconds,
            stdin=stdin,
            check=check,
        )

    def sbatch(self, user: str, *options: str, script: str = "sleep 300") -> str:
        """Queue a script that bash runs; its id."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        return self.run(user, ["sbatch", "--parsable", *options], stdin=text).stdout.strip()

    def state(self, job: str) -> str:
        """Slurm's word for the job's state; of several parts, each one's, in order."""
        asked = self.run("root", ["squeue", "-h", "-t", "all", "-o", "%T", "-j", job], check=False)
        return " ".join(asked.stdout.split())

    def wait_job(self, job: str, *states: str, seconds: float = 30) -> None:
        """Wait until all of its parts are in one of ``states``."""

        def reached() -> bool:
            now = self.state(job).split()
            return bool(now) and set(now) <= set(states)

        def what() -> str:
            asked = ["squeue", "-h", "-t", "all", "-o", "%i is %T (%r)", "-j", job]
            return f"{self.run('root', asked, check=False).stdout}, not {' or '.join(states)}"

        wait_for(reached, what, seconds=seconds)

    def wait_node(self, name: str, *states: str, seconds: float = 60) -> None:
        """Wait until Slurm says one of ``states`` of a node, such as ``down*``."""
        wait_for(
            lambda: self.node_state(name) in states,
            lambda: f"{name} is {self.node_state(name)}, not {' or '.join(states)}",
            seconds=seconds,
        )

    def set_node(self, name: str, state: str, reason: str = "test") -> None:
        """``scontrol update``: DOWN, DRAIN, RESUME, ..."""
        words = [f"NodeName={name}", f"State={state}", f"Reason={reason}"]
        self.run("root", ["scontrol", "update", *words])

    def node_state(self, name: str) -> str:
        """As ``sinfo`` says it, such as ``mixed`` or ``down*``."""
        return self.run("root", ["sinfo", "-h", "-p", "cpu", "-n", name, "-o", "%T"]).stdout.strip()

    def set_job_submit(self, script: Path | str | None) -> None:
        """Put a job_submit.lua in place; slurmctld reads it again by itself."""
        fresh = self.job_submit_script.with_suffix(".new")
        shutil.copyfile(script or configuration.CONF / "job_submit.lua", fresh)
        fresh.chmod(0o644)
        fresh.replace(self.job_submit_script)

    # ---- loss -------------------------------------------------------------------------------

    def kill_slurmctld(self, *, saved: bool = True) -> None:
        """KILL: no farewell to anybody. What is not ``saved`` before, it will have forgotten.

        slurmctld writes a few seconds late, and much later where others keep the disk busy; one
        more job makes it write (root's, cancelled).
        """
        if saved:
            job = self.sbatch("root", "--hold", "-J", "saved")
            now = time.time()  # before what makes it write, or it may have written already
            self.run("root", ["scancel", job])
            wait_for(lambda: self._written_us() > now * 1e6, self._unsaved, seconds=180)
        self._daemons.kill("slurmctld")

    def _written_us(self) -> float:
        """When slurmctld wrote its jobs last; 0 if it never has."""
        file = self.folder / "state" / "job_state"
        return file.stat().st_mtime_ns / 1e3 if file.exists() else 0

    def _unsaved(self) -> str:
        log = (self.folder / "log" / "slurmctld.log").read_text(errors="replace")
        return f"{log[-3000:]}\nthe jobs are saved (last {self._written_us():.0f})"

    def stop_slurmctld(self) -> None:
        """With TERM: it saves what it knows."""
        self._daemons.end({"slurmctld"}, patience=60)

    def start_slurmctld(self) -> None:
        """Start it again and wait until it answers."""
        # -i: newer ones refuse to go on without every state file, some of which are written late.
        self._spawn("slurmctld", ["slurmctld", "-D", "-i"])
        self._daemons.wait(self._answers, "slurmctld")

    def kill_slurmd(self, name: str) -> None:
        """KILL the daemon alone: the node's steps live on."""
        self._daemons.kill(f"slurmd.{name}")

    def start_slurmd(self, name: str) -> None:
        """Start it again and wait until it listens and is said to respond."""
        self._spawn_slurmd(name)
        address = ("127.0.0.1", self.settings["port_base"] + 2 + self.nodes.index(name))
        self._daemons.wait(lambda: configuration.listens(address), f"slurmd of {name}")
        self._daemons.wait(lambda: self.node_state(name) in RESPONDS, f"node {name} is back")

    def lose_node(self, name: str) -> None:
        """What a power cut does: all of the node's processes and its local files, at once.

        A process that dropped its environment and left its parent cannot be found.
        """
        daemon = self._daemons.find(f"slurmd.{name}")
        mine = self.on_node(name) | ({daemon} if daemon else set())
        while mine:
            gone = processes.below(mine)
            processes.freeze(gone)  # or a step daemon would still report that its task was killed
            processes.kill(gone)
            mine = self.on_node(name)
        self._daemons.kill(f"slurmd.{name}")
        for path in self.local_folders(name):
            shutil.rmtree(path, ignore_errors=True)

    def bring_back(self, name: str) -> None:
        """Repair a lost node: empty, and known to Slurm."""
        self._make_local_folders(name)
        self.start_slurmd(name)

    def local_folders(self, name: str) -> tuple[Path, ...]:
        """What only this node has: spool, shared memory, NVMe."""
        tops = (self.host_dir, self.nvme_dir)
        found = [path for top in tops for path in (top / name, *top.glob(f"*/{name}"))]
        return (self.folder / "spool" / name, *found)

    # ---- parts ------------------------------------------------------------------------------

    def pid(self, daemon: str) -> int | None:
        """Number of ``slurmctld``, ``slurmd.n1``, ``munged``, ...; ``None`` if it does not run."""
        process = self._daemons.find(daemon)
        return None if process is None else process.pid

    def _spawn(
        self, name: str, argv: Sequence[str], user: str = "root", cwd: str = "log", **env: str
    ) -> None:
        environment = self.env() | self._mark | env
        self._daemons.spawn(name, argv, env=environment, cwd=self.folder / cwd, user=user)

    def _spawn_slurmd(self, name: str) -> None:
        # Its step daemons inherit both: so they are found when the node is lost.
        marks = {"cwd": f"spool/{name}", "SLURMD_NODENAME": name}
        self._spawn(f"slurmd.{name}", ["slurmd", "-D", "-N", name], **marks)

    def _answers(self) -> bool:
        return "is UP" in self.run("root", ["scontrol", "ping"], check=False).stdout

    def _all_up(self) -> bool:
        asked = self.run("root", ["sinfo", "-h", "-N", "-p", "cpu", "-o", "%T"], check=False)
        words = asked.stdout.split()
        return len(words) == len(self.nodes) and RESPONDS.issuperset(words)

    # ---- making it --------------------------------------------------------------------------

    def _make_folders(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        owners = dict.fromkeys(("etc", "spool", "nvme", "munge", "mysql", "home"), ("root", 0o755))
        owners |= dict.fromkeys(("log", "run", "state"), ("slurm", 0o755))
        owners |= {f"home/{user}": (user, 0o755) for user in ("root", *services.USERS)}
        services.own(self.folder, owners)
        for name in self.nodes:
            self._make_local_folders(name)
        configuration.make_devices(self.shape, self.folder / "gpu")

    def _make_local_folders(self, name: str) -> None:
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        for top in (self.host_dir, self.nvme_dir):
            for path in (top, top / name):
                path.mkdir(exist_ok=True)
                path.chmod(0o1777)

    def _write_conf(self) -> None:
        count = len(self.nodes) + 2
        base = self.settings["port_base"] or configuration.free_ports(count)
        self.settings["port_base"] = base
        ports = range(base, base + count)
        host = socket.gethostname().partition(".")[0]
        values: dict[str, object] = {
            "name": self.name,
            "host": host,
            "folder": self.folder,
            "munge_socket": self.munge_socket,
            "controller_port": ports[0],
            "database_port": ports[1],
            "credential_seconds": self.settings["credential_seconds"],
            "memory_per_cpu": max(1, self.shape.memory_mb // self.shape.cpus // 2),
            "gpu_nodes": ",".join(n for n in self.nodes if n not in self.shape.gpuless),
            "node_lines": configuration.node_lines(self.shape, host, ports[2:]),
            "gres_lines": configuration.gres_lines(self.shape, self.folder / "gpu"),
            "cgroup": configuration.cgroup_line(),
        }
        prolog = self.settings["task_prolog"]
        extra = [*self.settings["extra"], *([f"TaskProlog={prolog}"] if prolog else ())]
        values["extra"] = "\n".join(extra)
        values["accounting"] = ""
        if self.database:
            values["accounting"] = configuration.render("accounting.conf", values)
            secret = self.folder / "etc" / "slurmdbd.conf"
            secret.touch(mode=0o600)
            secret.write_text(configuration.render("slurmdbd.conf", values), encoding="utf-8")
            shutil.chown(secret, "slurm")
        for file in ("slurm.conf", "gres.conf", "cgroup.conf"):
            text = configuration.render(file, values)
            (self.folder / "etc" / file).write_text(text, encoding="utf-8")
        (self.folder / "etc" / "plugstack.conf").touch()
        self.set_job_submit(self.settings["job_submit"])
        text = json.dumps(self.settings, indent=1)
        (self.folder / "cluster.json").write_text(text, encoding="utf-8")

    def _start_database(self) -> None:
        place = self.folder / "mysql"
        address = place / "s.sock"
        self._spawn("mariadbd", services.mariadb(place))
        self._daemons.wait(
            lambda: address.is_socket() and services.sql(address, services.GRANTS), "MariaDB"
        )
        self._daemons.wait(self.munge_socket.is_socket, "munged")
        self._spawn("slurmdbd", ["slurmdbd", "-D"], MYSQL_UNIX_PORT=str(address))
        file = self.folder / "etc" / "accounts.conf"
        if file.exists():
            ask = ["sacctmgr", "-n", "show", "cluster"]
        else:
            # Before slurmctld starts: what changes while it does so, it may miss.
            fresh = file.with_suffix(".new")
            fresh.write_text(services.ACCOUNTS_FILE.format(name=self.name), encoding="utf-8")
            ask = ["sacctmgr", "-i", "load", str(fresh)]
        self._daemons.wait(
            lambda: self.run("root", ask, check=False).returncode == 0, "the accounts"
        )
        if not file.exists():
            fresh.rename(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """A long-lived cluster from a shell."""
    parser = argparse.ArgumentParser(prog="python -m tests.slurm_live.cluster", description=__doc__)
    parser.add_argument("verb", choices=("start", "status", "stop"))
    parser.add_argument("folder", type=Path, help="must be one that every user may enter")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--gpus", type=int, default=4, help="of each node")
    parser.add_argument("--gpuless-nodes", type=int, default=0)
    parser.add_argument("--no-database", dest="database", action="store_false")
    parser.add_argument("--port-base", type=int)
    parser.add_argument("--job-submit", type=Path, help="a job_submit.lua")
    parser.add_argument("--task-prolog", type=Path)
    given = vars(parser.parse_args(arguments))
    verb, folder = given.pop("verb"), given.pop("folder")
    try:
        if verb == "start":
            Cluster(folder, **given).start()
        cluster = Cluster.load(folder)
        if verb == "stop":
            cluster.stop()
        else:
            print(cluster.run("root", ["sinfo", "-N", "-l"]).stdout, end="")
            print(f"export SLURM_CONF={cluster.slurm_conf}")
    except ClusterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Start and stop a partition's daemon as a detached process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from plexrl_slurm.cli.app import App
from plexrl_slurm.cli.client import Client
from plexrl_slurm.cli.site import places
from plexrl_slurm.core.errors import BadConfig, DaemonUnavailable, PlexError
from plexrl_slurm.settings import Site, read
from plexrl_slurm.whereabouts import refuse_foreign_state

#: Between two looks.
_STEP_S = 0.1
#: Lines of the log that a failed start shows.
_TAIL = 5
#: Before the one sentence that a daemon which cannot start writes last.
_SENTENCE = "plexrl-partitiond: error: "


class StartFailed(PlexError):
    """The daemon did not come up."""

    exit_code = 70

    def __init__(
        self, partition: str, what: str, log: str, tail: str, *, code: int = exit_code
    ) -> None:
        super().__init__(partition, what, log, tail)
        self.partition, self.what, self.log, self.tail = partition, what, log, tail
        self.__dict__["exit_code"] = code

    def explain(self) -> str:
        said = f" It says last: {self.tail}" if self.tail else ""
        return f"the daemon of partition {self.partition!r} {self.what} (see {self.log}).{said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A daemon that answers."""

    pid: int | None
    #: Base URL for controllers.
    address: str
    #: False if it ran before.
    started: bool


def log_file(site: Site) -> Path:
    """Where the daemon's standard error goes."""
    return site.state_dir / "partitiond.log"


def pid_file(site: Site) -> Path:
    """Written by the daemon."""
    return site.state_dir / "partitiond.pid"


def settings_file(app: App) -> Path:
    """The file that the commands about settings read; it need not be correct."""
    if app.config is not None and app.partition is None:
        return app.config
    if app.partition is None and (files := list(places())):
        return files[0]
    try:
        return app.site().path
    except BadConfig:
        if app.config is None:
            raise
        return app.config


def start(
    site: Site, *, timeout_s: float, wait_for_wpgs: bool, say: Callable[[str], None]
) -> Running:
    """Start the daemon unless it runs, and wait for it."""
    refuse_foreign_state(site.state_dir, site.partition)
    deadline = time.monotonic() + timeout_s
    process: subprocess.Popen[bytes] | None = None
    before = log_file(site).stat().st_size if log_file(site).exists() else 0
    health = _health(site)
    if health is None:
        process = _spawn(site)
    while health is None:
        _look(site, process, deadline, before)
        time.sleep(_STEP_S)
        health = _health(site)
    while wait_for_wpgs:
        with Client(site) as client:
            starting = _starting(client.nodes())
        if not starting:
            break
        say(f"starting WPG {', '.join(starting)} ...")
        _look(site, process, deadline, before)
        time.sleep(5 * _STEP_S)
    return Running(pid=_pid(site), address=_address(site), started=process is not None)


def stop(site: Site, *, release: bool, timeout_s: float) -> bool:
    """Stop the daemon; false if none ran."""
    refuse_foreign_state(site.state_dir, site.partition)
    deadline = time.monotonic() + timeout_s
    pid = _pid(site)
    if pid is None:
        if _health(site) is not None:
            raise StartFailed(
                site.partition,
                f"answers, but {pid_file(site)} does not name it",
                str(log_file(site)),
                "",
            )
        return False
    if release:  # which ends the daemon too
        with Client(site, timeout_s=timeout_s) as client:
            client.release()
    else:
        os.kill(pid, signal.SIGTERM)
    while _pid(site) == pid:
        if time.monotonic() > deadline:
            raise StartFailed(
                site.partition,
                f"(pid {pid}) did not stop within {timeout_s:g} s",
                str(log_file(site)),
                _tail(log_file(site)),
            )
        time.sleep(_STEP_S)
    return True


def _spawn(site: Site) -> "subprocess.Popen[bytes]":
    site.state_dir.mkdir(parents=True, exist_ok=True)
    with log_file(site).open("ab") as log:
        return _popen(
            [sys.executable, "-m", "plexrl_slurm.daemons.partitiond", str(site.path)], log
        )


def _popen(argv: list[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )


def _look(
    site: Site, process: "subprocess.Popen[bytes] | None", deadline: float, before: int
) -> None:
    """Raise if the daemon has ended, or took too long; the log had ``before`` bytes at first."""
    log = log_file(site)
    if process is not None and process.poll() is not None:
        tail = _tail(log, before)
        if _SENTENCE in tail:
            what = f"did not start: {tail.rpartition(_SENTENCE)[2].rstrip('.')}"
            raise StartFailed(site.partition, what, str(log), "", code=process.returncode)
        what = f"ended with code {process.returncode} instead of starting"
        raise StartFailed(site.partition, what, str(log), tail)
    if time.monotonic() > deadline:
        raise StartFailed(site.partition, "is still starting", str(log), _tail(log, before))


def _health(site: Site) -> dict[str, Any] | None:
    try:
        with Client(site, timeout_s=5.0) as client:
            return client.health()
    except DaemonUnavailable:
        return None


def _starting(nodes: dict[str, Any]) -> list[str]:
    """What is not up yet: holds that wait for their nodes, WPGs whose ranks start."""
    waiting = [f"of hold {hold['id']}" for hold in nodes["holds"] if hold["state"] == "pending"]
    return waiting + [
        str(wpg["id"]) for wpg in nodes["wpgs"] if wpg["state"] in ("down", "starting")
    ]


def _address(site: Site) -> str:
    """The daemon notes the port it got; with port 0 nobody else knows it."""
    settings = read(site.path)
    try:
        port = int((site.state_dir / "api.port").read_text())
    except (OSError, ValueError):
        port = settings.listen_port
    host = settings.listen_host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _pid(site: Site) -> int | None:
    """The living daemon's pid; a number that now belongs to another program is not it."""
    try:
        pid = int(pid_file(site).read_text().split()[0])
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, ValueError, IndexError):
        return None
    return pid if b"partitiond" in command and state != "Z" else None


def _tail(log: Path, before: int = 0) -> str:
    try:
        lines = log.read_bytes()[before:].decode(errors="replace").splitlines()
    except OSError:
        return ""
    return " | ".join(line.strip() for line in lines[-_TAIL:] if line.strip())

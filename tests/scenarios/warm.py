"""Daemons that begin with everything imported, which takes longer than most tests of them.

    python -m tests.scenarios.warm MODULE SOCKET

imports MODULE and does nothing else, but for each request forks a process that goes on with the
module's ``main()``, as ``python -m MODULE`` would.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import BinaryIO

from tests import leavings

_LARGEST = 1 << 20


class Daemon:
    """What tests need of ``subprocess.Popen``."""

    def __init__(self, pid: int, status: int) -> None:
        """``status``: a pipe that its exit status comes from."""
        self.pid, self._status = pid, status
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the daemon", timeout or 0)
            told = os.read(self._status, 16)
            os.close(self._status)
            assert told, "the process that it was forked off has ended"
            self.returncode = int(told)
        return self.returncode

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Warm:
    """A process that has imported a module."""

    def __init__(self, module: str) -> None:
        self._lock = threading.Lock()
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, module, str(other.fileno())],
                pass_fds=[other.fileno()],
                cwd=Path(__file__).parents[2],
            )

    def start(self, *arguments: str, log: BinaryIO) -> Daemon:
        """One that says everything to ``log``, in this process's environment and folder."""
        request = json.dumps([list(arguments), dict(os.environ), str(Path.cwd())]).encode()
        status, told = os.pipe()
        with self._lock:
            socket.send_fds(self._socket, [request], [log.fileno(), told])
            os.close(told)
            return Daemon(int(self._socket.recv(16)), status)

    def close(self) -> None:
        """Daemons go on."""
        self._socket.close()
        self._process.wait()


@cache
def warm(module: str) -> Warm:
    """The one of this process."""
    made = Warm(module)
    leavings.AT_END.append(made.close)
    return made


def serve(requests: socket.socket) -> list[str] | None:
    """In a fork: its arguments. Else ``None``, when nobody can ask any more."""
    running: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            with contextlib.suppress(ChildProcessError):
                while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                    told = running.pop(ended[0])
                    with contextlib.suppress(BrokenPipeError):
                        os.write(told, str(os.waitstatus_to_exitcode(ended[1])).encode())
                    os.close(told)
        if requests.fileno() in ready:
            request, passed, _, _ = socket.recv_fds(requests, _LARGEST, 2)
            if not request:
                return None
            log, told = passed
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (woken, wake, told, *running.values()):
                    os.close(each)
                requests.close()
                return become(request, log)
            running[pid] = told
            os.close(log)
            requests.send(str(pid).encode())


def become(request: bytes, log: int) -> list[str]:
    """Take the environment, the folder and the log that were asked for."""
    arguments, environment, folder = json.loads(request)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    return list(arguments)


def main() -> None:
    """Entry of the process."""
    name, descriptor = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent says when it ends
    module = importlib.import_module(name)
    arguments = serve(socket.socket(fileno=int(descriptor)))
    if arguments is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.argv = [str(module.__file__), *arguments]
        module.main()


if __name__ == "__main__":
    main()

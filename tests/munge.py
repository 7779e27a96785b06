"""A munged of a test's own: key, socket, log and pid file in one folder, as the current user."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self


class PrivateMunge:
    """One munged; it can be stopped, frozen and started again."""

    def __init__(self, folder: Path, *, key: bytes | None = None) -> None:
        self.folder = folder
        self.socket = folder / "munge.sock"
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._key = folder / "munge.key"
        self._key.write_bytes(os.urandom(128) if key is None else key)
        self._key.chmod(0o600)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def key(self) -> bytes:
        return self._key.read_bytes()

    def start(self) -> Self:
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [
                    "munged",
                    "--foreground",
                    "--force",
                    "--num-threads=2",
                    f"--key-file={self._key}",
                    f"--socket={self.socket}",
                    f"--log-file={self.folder / 'log'}",
                    f"--pid-file={self.folder / 'pid'}",
                    f"--seed-file={self.folder / 'seed'}",
                ],
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        deadline = time.monotonic() + 10
        while self._munge("-n").returncode != 0:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "output").read_text())
            time.sleep(0.005)
        return self

    def stop(self) -> None:
        if self._process is None:
            return
        self.thaw()
        self._process.terminate()
        self._process.wait(10)
        self._process = None

    def freeze(self) -> None:
        """It keeps its socket and answers nobody."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def credential(self, payload: str, *options: str) -> str:
        """Made by the current user; ``options`` are those of the program munge."""
        made = self._munge(f"--string={payload}", *options)
        assert made.returncode == 0, made.stderr
        return made.stdout.strip()

    def _munge(self, *options: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["munge", f"--socket={self.socket}", *options],
            capture_output=True,
            text=True,
            check=False,
            timeout=15,
        )


@contextmanager
def private_munge(folder: Path, *, key: bytes | None = None) -> Iterator[PrivateMunge]:
    """A running munged; the same ``key`` for two makes them trust each other."""
    munge = PrivateMunge(folder, key=key)
    try:
        yield munge.start()
    finally:
        munge.stop()

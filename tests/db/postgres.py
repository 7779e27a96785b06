"""A PostgreSQL server of our own: temporary folder, random loopback port, ended by its pid."""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

USER = "postgres"
Command = list[str | Path]


def find_programs() -> Path | None:
    """The newest folder with the server programs: Debian keeps them off PATH."""
    homes = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])
    )
    if homes:
        return homes[-1].parent
    found = shutil.which("initdb")
    return Path(found).resolve().parent if found else None


@contextmanager
def running_server(programs: Path, *, durable: bool = False) -> Iterator[str]:
    """URL prefix of a fresh server, for example ``postgresql://postgres@127.0.0.1:40000``.

    ``durable`` keeps fsync on, for measurements. The server refuses to run as root, so root
    runs it as Debian's ``postgres``.
    """
    folder = Path(tempfile.mkdtemp(prefix="plexrl-pg-"))
    user = None
    if os.geteuid() == 0:
        account = pwd.getpwnam(USER)
        user = account.pw_uid
        os.chown(folder, account.pw_uid, account.pw_gid)
    data, log = folder / "data", folder / "log"
    try:
        create: Command = [programs / "initdb", "--pgdata", data, "--username", USER]
        create += ["--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"]
        subprocess.run(create, check=True, capture_output=True, cwd="/", user=user)
        port = _free_port()
        server: Command = [programs / "postgres", "-D", data, "-p", str(port), "-k", folder]
        server += ["-c", "listen_addresses=127.0.0.1", "-c", "max_connections=60"]
        if not durable:
            server += ["-c", "fsync=off", "-c", "synchronous_commit=off"]
        with log.open("wb") as output:
            process = subprocess.Popen(server, stdout=output, stderr=output, cwd="/", user=user)
        try:
            _wait_until_ready(process, programs, port, log)
            yield f"postgresql://{USER}@127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)  # "fast": does not wait for clients
            process.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_until_ready(
    process: subprocess.Popen[bytes], programs: Path, port: int, log: Path
) -> None:
    ask: Command = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    for _ in range(300):
        if process.poll() is not None:
            break
        if subprocess.run(ask, check=False).returncode == 0:
            return
        time.sleep(0.1)
    raise RuntimeError(f"postgres did not start:\n{log.read_text(errors='replace')}")

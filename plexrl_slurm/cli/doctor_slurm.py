"""Checks of ``plexrl doctor`` that ask Slurm; a partition on one machine without it has none."""

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from plexrl_slurm.cli.doctor import FAIL, OK, WARN, Check, Said, shown_path
from plexrl_slurm.cli.doctor_facts import Facts
from plexrl_slurm.cli.doctor_host import clock
from plexrl_slurm.slurm.feasible import duration_us, examine

#: An answer of slurmctld that takes longer is worth a word.
SLOW_S = 2.0
_LEVELS = ("Operator", "Administrator", "Admin")


def slurmctld(facts: Facts) -> Iterator[Said]:
    """Found, answering, of which version, with the same clock."""
    if facts.slurm is None:
        yield OK, 'there is none ([hold] backend = "local")'
        return
    begun = time.monotonic()
    found = facts.configuration
    took = time.monotonic() - begun
    answer = facts.ask("scontrol", "show", "config")
    version = found.get("SLURM_VERSION", "?")
    conf = found.get("SLURM_CONF", facts.slurm.conf or "its default place")
    yield OK, f"slurmctld {version} of cluster {found.get('ClusterName', '?')} answers ({conf})"
    if took > SLOW_S:
        yield (
            WARN,
            f"slurmctld took {took:.1f} s to answer: see sdiag, and SchedulerParameters",
        )
    programs = facts.ask("sinfo", "--version").split()[-1:]
    if programs and _release(programs[0]) != _release(version):
        yield (
            WARN,
            f"Slurm's programs here are {programs[0]} and slurmctld is {version}: install the same "
            f"on this host",
        )
    if stamp := re.search(r"data as of (\d{9,})", answer):
        # Whole seconds, cut off.
        yield from clock(int(stamp[1]) + 0.5 + (time.monotonic() - begun), "slurmctld's host")


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def admin_level(facts: Facts) -> Iterator[Said]:
    """The service user may hold and release others' jobs, and has an account for its holds."""
    if facts.slurm is None:
        return
    user = facts.service_user
    ruler = facts.configuration.get("SlurmUser", "").partition("(")[0]
    if user in ("root", ruler):
        yield OK, f"{user} is Slurm's own administrator"
    elif not facts.has_accounts:
        yield (
            FAIL,
            f"Slurm keeps no accounts here, so that only root and {ruler} may release users' jobs: "
            f"set AccountingStorageType=accounting_storage/slurmdbd, or run the service as {ruler}",
        )
        return
    if not facts.has_accounts:
        yield (
            WARN,
            "Slurm keeps no accounts (no slurmdbd): sacct cannot be compared with the ledger",
        )
        return
    rows = facts.sacctmgr("user", f"user={user}", fields="user,adminlevel,defaultaccount")
    account = facts.sure.hold.account or "plexrl"
    if not rows:
        yield (
            FAIL,
            f"Slurm's accounts do not know {user}: sacctmgr -i add account {account}; sacctmgr -i "
            f"add user {user} Account={account} AdminLevel=Operator",
        )
        return
    level = rows[0][1]
    if user not in ("root", ruler):
        if level in _LEVELS:
            yield OK, f"{user} has AdminLevel {level}"
        else:
            yield (
                FAIL,
                f"{user} has AdminLevel {level}, and may not hold or release users' jobs: sacctmgr "
                f"-i modify user {user} set AdminLevel=Operator",
            )
    yield from _association(facts, default=rows[0][2])


def _association(facts: Facts, *, default: str) -> Iterator[Said]:
    hold, user = facts.sure.hold, facts.service_user
    account = hold.account or default
    where = (f"user={user}", f"account={account}")
    rows = facts.sacctmgr("assoc", *where, fields="account,qos,maxwall")
    if not rows:
        yield (
            FAIL,
            f"{user} may not submit on account {account!r} ([hold] account): sacctmgr -i add "
            f"account {account}; sacctmgr -i add user {user} Account={account}",
        )
        return
    yield OK, f"holds run on account {account}"
    if hold.qos:
        allowed = {name for row in rows for name in row[1].split(",")}
        if not facts.sacctmgr("qos", f"name={hold.qos}", fields="name"):
            yield (
                FAIL,
                f"Slurm has no QOS {hold.qos!r} ([hold] qos): sacctmgr -i add qos {hold.qos}",
            )
            return
        if hold.qos not in allowed:
            yield (
                FAIL,
                f"{user} may not use QOS {hold.qos} ([hold] qos): sacctmgr -i modify user {user} "
                f"where account={account} set qos+={hold.qos}",
            )
            return
        yield OK, f"holds run with QOS {hold.qos}"
    limits = [(f"the association of {user}", row[2]) for row in rows]
    if hold.qos:
        limits += [
            (f"QOS {hold.qos}", row[1])
            for row in facts.sacctmgr("qos", f"name={hold.qos}", fields="name,maxwall")
        ]
    for whose, text in limits:
        limit_us = duration_us(text)
        if limit_us is not None and hold.time_limit_us > limit_us:
            yield (
                FAIL,
                f"hold.time_limit is longer than MaxWall of {whose} ({text}): lower time_limit, or "
                f"raise MaxWall with sacctmgr",
            )


def holds(facts: Facts) -> Iterator[Said]:
    """Partitions, nodes and GPUs of every component."""
    if facts.slurm is None:
        return
    found = examine(facts.sure.hold, facts.partitions, facts.nodes, facts.asker)
    for sentence in found.never:
        yield FAIL, sentence
    for sentence in found.not_now:
        yield WARN, sentence
    if not found.never and not found.not_now:
        gpus = sum(component.gpus for component in facts.sure.hold.components)
        yield OK, f"Slurm has nodes for every component of a hold ({gpus} GPUs)"


def controllers(facts: Facts) -> Iterator[Said]:
    """Where users' scripts run."""
    if facts.slurm is None:
        return
    name = facts.slurm.controller_partition
    if not name:
        yield (
            WARN,
            "[slurm] controller_partition is not set, so that users' scripts run in the partition "
            "that they name: set it to a partition without GPUs",
        )
        return
    found = facts.partitions.get(name)
    if found is None:
        known = ", ".join(sorted(facts.partitions))
        yield (
            FAIL,
            f"Slurm has no partition {name!r} ([slurm] controller_partition): correct it; Slurm "
            f"has {known}",
        )
    elif found.state != "UP":
        yield (
            WARN,
            f"partition {name}, where users' scripts run, is {found.state}: scontrol update "
            f"PartitionName={name} State=UP",
        )
    else:
        yield OK, f"users' scripts run in partition {name}"


def configuration(facts: Facts) -> Iterator[Said]:
    """Lines of slurm.conf, as slurmctld has them."""
    if facts.slurm is None:
        return
    found = facts.configuration
    conf = Path(found.get("SLURM_CONF", "slurm.conf"))
    if facts.has_accounts:
        if "gres/gpu" not in found.get("AccountingStorageTRES", "").split(","):
            yield (
                FAIL,
                "AccountingStorageTRES has no gres/gpu, so that sacct counts no GPUs: add it to "
                "slurm.conf and restart slurmctld",
            )
        flags = found.get("AccountingStoreFlags", "").lower().split(",")
        if "job_env" in flags:
            yield (
                WARN,
                "AccountingStoreFlags has job_env: slurmdbd stores the environment of users' jobs, "
                "and with it their tokens; take it out",
            )
        if "job_comment" not in flags:
            yield (
                WARN,
                "AccountingStoreFlags has no job_comment, so that sacct does not show by its "
                "comment what a hold is: add it",
            )
    if found.get("JobRequeue", "1") == "0":
        yield (
            WARN,
            "JobRequeue=0: a controller whose node fails is not run again; set JobRequeue=1, or "
            "let users write --requeue",
        )
    if "lua" not in re.split(r"[,/]", found.get("JobSubmitPlugins", "")):
        yield (
            WARN,
            "JobSubmitPlugins has no lua, so that plain sbatch does not work (plexrl sbatch does): "
            "add JobSubmitPlugins=lua to slurm.conf and restart slurmctld",
        )
    prolog = found.get("TaskProlog", "")
    if prolog in ("", "(null)"):
        yield (
            WARN,
            f"TaskProlog is not set, so that plain sbatch jobs and arrays find no credentials: add "
            f"TaskProlog={conf.with_name('plexrl_task_prolog.sh')} to slurm.conf, then scontrol "
            f"reconfigure",
        )
    elif not Path(prolog).exists():
        yield WARN, f"TaskProlog {prolog} does not exist on this host; it must, on every node"
    yield OK, f"{conf} was looked at, as slurmctld has it"


def installed(facts: Facts) -> Iterator[Said]:
    """What ``plexrl admin install`` writes is there, and of this version and catalogue."""
    if facts.slurm is None:
        return
    import sys

    from plexrl_slurm.cli import admin
    from plexrl_slurm.slurm.site_files import site_files

    partitions = admin.partitions_beside(facts.path)
    notes: list[str] = []
    conf = admin.conf_of(partitions[0])
    wanted = site_files(
        partitions,
        folder=facts.path.absolute().parent,
        conf=conf,
        programs=Path(sys.executable).parent,
        user=facts.service_user,
        trusted=admin.trusted_numbers(partitions, notes),
    )
    again = f"plexrl admin install --config {shown_path(facts.path)}"
    fine = 0
    for file in wanted:
        try:
            text = file.path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            yield WARN, f"{file.path} is missing ({file.purpose}): {again}"
        except PermissionError:
            yield WARN, f"{file.path} cannot be read by you: run this as root"
        else:
            merged = file.merge and all(line in text for line in file.merge.splitlines())
            if text == file.text or merged:
                fine += 1
            elif file.merge:
                yield (
                    WARN,
                    f"{file.path} is the site's own and does not load plexrl.lua: add the lines "
                    f"that `{again}` prints",
                )
            else:
                yield (
                    WARN,
                    f"{file.path} is not what this version and these settings want "
                    f"({file.purpose}): {again}",
                )
    if fine == len(wanted):
        yield OK, f"the {fine} files of `plexrl admin install` are in place"


def reachable(facts: Facts) -> Iterator[Said]:
    """Held nodes find the daemon."""
    if facts.slurm is None:
        return
    address = facts.sure.hold.agent_address
    if address.startswith("127."):
        yield (
            WARN,
            f"hold.agent_address is {address}, where only agents on this host find the daemon: "
            f"write an address of this host in the nodes' network, unless this is the only machine",
        )
    else:
        yield OK, f"agents call the daemon at {address}"


_SLURM = "see whether slurmctld and slurmdbd answer (scontrol ping, sacctmgr show cluster)"
CHECKS: Sequence[Check] = (
    Check(name="slurmctld", look=slurmctld, hangs=_SLURM, slurm=True, gate=True),
    Check(name="accounts", look=admin_level, hangs=_SLURM, slurm=True),
    Check(name="holds", look=holds, hangs=_SLURM, slurm=True),
    Check(name="controllers", look=controllers, hangs=_SLURM, slurm=True),
    Check(name="slurm.conf", look=configuration, hangs=_SLURM, slurm=True),
    Check(name="agents", look=reachable, hangs=_SLURM, slurm=True),
    Check(name="installed", look=installed, hangs="see whether slurm.conf's folder answers"),
)

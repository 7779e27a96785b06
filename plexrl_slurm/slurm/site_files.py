"""What ``plexrl admin install`` puts on a site: texts and places; nothing here writes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plexrl_slurm.settings import Settings
from plexrl_slurm.slurm.native import NativePartition, submit_module
from plexrl_slurm.slurm.templates import fill

#: Stands in the first lines of every file of ours.
OURS: Final = "`plexrl admin install`"
UNIT: Final = Path("/etc/systemd/system/plexrl-partitiond@.service")
DEFAULT_CONF: Final = Path("/etc/slurm/slurm.conf")
#: TaskProlog keeps a task waiting for its credentials for so long at most.
PROLOG_SECONDS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFile:
    """One file of a site."""

    path: Path
    text: str
    purpose: str
    mode: int = 0o644
    #: Lines to add where the site has a file of its own there; "": ours always replaces ours.
    merge: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A line of ``slurm.conf``, or a command to run once."""

    text: str
    purpose: str
    #: slurm.conf has it already; always false for a command.
    present: bool = False


def example_settings(path: Path, *, name: str, user: str = "plexrl") -> SiteFile:
    """Settings to start from."""
    values = {
        "path": path,
        "name": name,
        "user": user,
        "slurm_conf": DEFAULT_CONF,
        "controllers": "cpu",
        "gpus": "gpu",
        "model": "/shared/models/my-model",
    }
    text = fill("partition.toml.j2", values)
    return SiteFile(path=path, text=text, purpose="settings to start from: edit them")


def native_partition(settings: Settings) -> NativePartition:
    """What ``job_submit.lua`` must know of the partition."""
    assert settings.slurm is not None
    return NativePartition(
        name=settings.partition,
        slurm_partition=settings.slurm.partition,
        controller_partition=settings.slurm.controller_partition,
        models=tuple(settings.models),
    )


def site_files(
    partitions: Sequence[Settings],
    *,
    folder: Path,
    conf: Path,
    programs: Path,
    user: str,
    trusted: Sequence[int],
) -> tuple[SiteFile, ...]:
    """Everything but the settings, which are in ``folder``; ``programs`` has plexrl and python."""
    module, prolog = conf.with_name("plexrl.lua"), conf.with_name("plexrl_task_prolog.sh")
    unit = {"folder": str(folder), "user": user, "python": str(programs / "python")}
    native = [native_partition(settings) for settings in partitions]
    return (
        SiteFile(
            path=UNIT,
            text=fill("systemd/plexrl-partitiond@.service.j2", unit),
            purpose="one daemon for each partition",
        ),
        SiteFile(
            path=module,
            text=submit_module(native, trusted=trusted),
            purpose="checks, marks and holds plain sbatch jobs; slurmctld reads it",
        ),
        SiteFile(
            path=conf.with_name("job_submit.lua"),
            text=fill("job_submit.lua.j2", {"module": str(module)}),
            purpose="loads plexrl.lua behind the site's own rules",
            merge=merge_lines(module),
        ),
        SiteFile(
            path=prolog,
            text=task_prolog(
                {settings.partition: settings.path for settings in partitions},
                plexrl=programs / "plexrl",
            ),
            purpose="gives plain sbatch jobs and arrays their credentials; needed on every node",
            mode=0o755,
        ),
    )


def task_prolog(settings: Mapping[str, Path], *, plexrl: Path) -> str:
    """TaskProlog for the partitions by name, with the settings file of each, seen by all nodes."""
    files = [(name, str(path)) for name, path in settings.items()]
    values = {"settings": files, "plexrl": str(plexrl), "seconds": PROLOG_SECONDS}
    return fill("task_prolog.sh.j2", values)


def merge_lines(module: Path) -> str:
    """What a ``job_submit.lua`` of the site's own needs, above its last line."""
    text = fill("job_submit.lua.j2", {"module": str(module)})
    return "\n".join(line for line in text.splitlines() if "loaded" in line)


def conf_lines(text: str, prolog: Path) -> tuple[Line, ...]:
    """Lines for ``slurm.conf``, whose present ``text`` may say some of them already."""
    found = _parameters(text)
    plugins = found.get("jobsubmitplugins", "")
    has_lua = "lua" in plugins.replace("job_submit/", "").split(",")
    own_prolog = found.get("taskprolog", "")
    tres, flags = found.get("accountingstoragetres", ""), found.get("accountingstoreflags", "")
    lines = [
        Line(
            text=f"JobSubmitPlugins={plugins if has_lua else _joined(plugins, 'lua')}",
            purpose="plain sbatch -p PARTITION works: slurmctld runs job_submit.lua",
            present=has_lua,
        ),
        Line(
            text=f"TaskProlog={prolog}",
            purpose="plain sbatch jobs and arrays find their credentials in the environment"
            if own_prolog in ("", str(prolog))
            else f"or keep yours and call this one at its end: {prolog}",
            present=own_prolog == str(prolog),
        ),
        Line(
            text=f"AccountingStorageTRES={_joined(tres, 'gres/gpu')}",
            purpose="sacct shows the GPUs of the holds",
            present="gres/gpu" in tres.lower().split(","),
        ),
        Line(
            text=f"AccountingStoreFlags={_joined(flags, 'job_comment')}",
            purpose="sacct shows the comment by which a hold is known",
            present="job_comment" in flags.lower().split(","),
        ),
    ]
    return tuple(lines)


def account_commands(settings: Settings, user: str) -> tuple[Line, ...]:
    """``sacctmgr`` lines for the service user and its holds."""
    account, qos = settings.hold.account or "plexrl", settings.hold.qos
    commands = [
        Line(
            text=f'sacctmgr -i add account {account} Description="PlexRL holds"',
            purpose="what the held GPUs are charged to ([hold] account)",
        ),
        Line(
            text=f"sacctmgr -i add user {user} Account={account} AdminLevel=Operator",
            purpose="the service may hold, release and end users' jobs, and extend its holds",
        ),
    ]
    if qos:
        commands += [
            Line(
                text=f"sacctmgr -i add qos {qos} Priority=1000",
                purpose="limits and priority of the holds ([hold] qos); set what suits the site",
            ),
            Line(
                text=f"sacctmgr -i modify user {user} where account={account} set qos+={qos}",
                purpose="the service may use it",
            ),
        ]
    return tuple(commands)


def _joined(words: str, more: str) -> str:
    """``more`` added to a list, unless it is there."""
    have = [word for word in words.split(",") if word]
    return ",".join(have if more in words.lower().split(",") else (*have, more))


def _parameters(text: str) -> Mapping[str, str]:
    """Global parameters of ``slurm.conf``, lower case; included files are not looked at."""
    found = {}
    for line in text.splitlines():
        if match := re.match(r"\s*([A-Za-z]+)\s*=\s*([^\s#]+)", line):
            found[match[1].lower()] = match[2]
    return found

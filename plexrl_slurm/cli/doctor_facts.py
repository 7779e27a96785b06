"""What ``plexrl doctor`` looks at: each thing read once, and only if somebody asks for it."""

import contextlib
import grp
import os
import pwd
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.core.errors import PlexError, SlurmUnavailable
from plexrl_slurm.settings import Settings, SlurmSettings, check
from plexrl_slurm.slurm import invoke, parse
from plexrl_slurm.slurm.feasible import Asker, PartitionStatus, read_partitions
from plexrl_slurm.slurm.port import NodeStatus

#: What one of Slurm's programs prints; raises ``SlurmUnavailable`` or ``SlurmRejected``.
Ask = Callable[..., str]
#: Of one program.
SLURM_S: Final = 10.0


class Facts:
    """Of one partition and this host. Not for use by several threads at once."""

    def __init__(self, path: Path, *, ask: Ask | None = None, mounts: str | None = None) -> None:
        self.path = path
        self.findings = check(path)
        self.settings: Settings | None = self.findings.settings
        #: Set by a check that got no answer: the others do not wait for one too.
        self.slurm_is_silent = False
        self._ask = ask
        self._answers: dict[tuple[str, ...], str] = {}
        self._mounts = mounts

    # -- the partition -----------------------------------------------------------------------
    @property
    def sure(self) -> Settings:
        """The settings, which are right."""
        assert self.settings is not None
        return self.settings

    @property
    def slurm(self) -> SlurmSettings | None:
        return self.sure.slurm

    @cached_property
    def service_user(self) -> str:
        """As the settings say; else who has made ``state_dir``; else who runs this."""
        if self.slurm is not None and self.slurm.service_user:
            return self.slurm.service_user
        folder = self.sure.state_dir
        return pwd.getpwuid(folder.stat().st_uid if folder.exists() else os.geteuid()).pw_name

    @cached_property
    def service(self) -> pwd.struct_passwd | None:
        """``None``: there is no such user."""
        try:
            return pwd.getpwnam(self.service_user)
        except KeyError:
            return None

    @cached_property
    def groups(self) -> frozenset[str]:
        """The service user's, by name."""
        if self.service is None:
            return frozenset()
        found = set()
        for number in os.getgrouplist(self.service_user, self.service.pw_gid):
            try:
                found.add(grp.getgrgid(number).gr_name)
            except KeyError:
                found.add(str(number))
        return frozenset(found)

    @cached_property
    def daemon(self) -> dict[str, Any] | PlexError:
        """What it says of itself, or why it does not."""
        from plexrl_slurm.cli.client import Client
        from plexrl_slurm.whereabouts import read_site

        try:
            with Client(read_site(self.path), timeout_s=10) as client:
                return client.nodes()
        except PlexError as error:
            return error

    # -- Slurm -------------------------------------------------------------------------------
    def ask(self, *argv: str) -> str:
        """One of Slurm's programs; the same question is put once."""
        if argv not in self._answers:
            self._answers[argv] = (self._ask or self._run)(*argv)
        return self._answers[argv]

    def _run(self, *argv: str) -> str:
        slurm = self.slurm
        conf = slurm.conf if slurm is not None else None
        env = invoke.environment(conf)
        answer = invoke.checked(invoke.run(argv, env=env, timeout_s=SLURM_S))
        if answer.code == 0 and not answer.out and (cause := invoke.cause_of(answer.err)):
            raise SlurmUnavailable(f"{argv[0]} got no answer: {cause}")
        return answer.out.decode(errors="replace")

    @cached_property
    def configuration(self) -> Mapping[str, str]:
        """``scontrol show config``."""
        return parse.configuration(self.ask("scontrol", "show", "config").encode())

    @cached_property
    def partitions(self) -> Mapping[str, PartitionStatus]:
        return read_partitions(self.ask("scontrol", "show", "partition", "--oneliner", "--all"))

    @cached_property
    def nodes(self) -> Mapping[str, NodeStatus]:
        found = parse.nodes(self.ask("sinfo", "--json", "--all").encode())
        if found is None:
            answer = self.ask("scontrol", "show", "nodes", "--json")
            found = parse.nodes(answer.encode(), "scontrol")
        return found or {}

    @cached_property
    def has_accounts(self) -> bool:
        """Whether Slurm keeps accounts (slurmdbd)."""
        kind = self.configuration.get("AccountingStorageType", "")
        return kind.endswith("/slurmdbd")

    def sacctmgr(self, what: str, *where: str, fields: str) -> list[list[str]]:
        """Rows of ``sacctmgr show``."""
        answer = self.ask("sacctmgr", "-nP", "show", what, *where, f"format={fields}")
        return [line.split("|") for line in answer.splitlines() if line.strip()]

    @cached_property
    def asker(self) -> Asker:
        """As whom, and on whose account, the holds are submitted."""
        hold = self.sure.hold
        account = hold.account
        if not account and self.has_accounts:
            user = f"user={self.service_user}"
            with contextlib.suppress(PlexError):  # which another check reports
                rows = self.sacctmgr("user", user, fields="user,adminlevel,defaultaccount")
                account = rows[0][2] if rows else ""
        return Asker(user=self.service_user, groups=self.groups, account=account, qos=hold.qos)

    # -- this host ---------------------------------------------------------------------------
    def mounted(self, path: Path) -> str:
        """Type of the file system that ``path`` is or would be on."""
        text = self._mounts
        if text is None:
            text = Path("/proc/mounts").read_text(encoding="utf-8")
        best, kind = "", ""
        for line in text.splitlines():
            _, mount, what, *_ = line.split()
            place = Path(mount.replace("\\040", " "))
            inside = path == place or place in path.parents
            if inside and len(mount) >= len(best):
                best, kind = mount, what
        return kind

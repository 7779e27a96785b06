"""Where a partition is: the little that every command needs to know, read in no time.

Importing and reading the rest of the settings takes longer than everything else that a command
does; see :mod:`plexrl_slurm.settings`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.addresses import (
    check_tls,
    database_url,
    listen_address,
    public_url,
    url_of,
)
from plexrl_slurm.core.errors import BadConfig, Denied
from plexrl_slurm.tomlcheck import (
    Report,
    Table,
    as_bytes,
    as_count,
    as_name,
    as_seconds,
    load,
    mapping,
    one_of,
    path_in,
    positive_seconds,
)

POLICIES: Final = ("atc_h", "hrrs", "fifo", "drain_first", "least_attained", "round_robin")
ADAPTERS: Final = ("auto", "commands", "pyslurm")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmSettings:
    """``[slurm]``: how to talk to Slurm, and what users find there."""

    adapter: str = "auto"
    #: ``SLURM_CONF`` of every command; ``None``: Slurm's own default.
    conf: Path | None = None
    #: Slurm partition in which controllers run; "": the one that the user names.
    controller_partition: str = ""
    #: Slurm partition that a plain ``sbatch -p`` names.
    partition: str = ""
    timeout_us: int = 20_000_000
    poll_us: int = 2_000_000
    #: ``None``: munge's own default.
    munge_socket: Path | None = None
    #: "": the user that the daemon runs as.
    service_user: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The little that the CLI needs to find a partition: read without looking at any model."""

    partition: str
    state_dir: Path
    database_url: str
    backend: str
    path: Path
    #: Where the API listens; "": only the daemon knows (a port that it chose).
    url: str = ""
    tls_ca: Path | None = None
    #: ``None`` with the local backend.
    slurm: SlurmSettings | None = None

    @property
    def socket(self) -> Path:
        """The unix socket that the daemon listens on."""
        return self.state_dir / "api.sock"

    @property
    def jobs_dir(self) -> Path:
        """Where the local Slurm adapter keeps its jobs."""
        return self.state_dir / "local"


def owner_marker(state_dir: Path) -> Path:
    """The file in which the partition that uses a ``state_dir`` has its name."""
    return state_dir / "partition"


def refuse_foreign_state(state_dir: Path, partition: str) -> None:
    """Raises ``Denied`` for another partition's folder, which has its daemon, keys and jobs."""
    marker = owner_marker(state_dir)
    owner = marker.read_text().strip() if marker.exists() else ""
    if owner not in ("", partition):
        raise Denied(
            f"{state_dir} is the state_dir of partition {owner!r}: give {partition!r} one of its "
            f"own, or remove {marker} if you renamed the partition after `plexrl partition down`"
        )


def read_site(path: Path) -> Site:
    """Only where the partition's daemon and database are."""
    data, content = load(path)
    report = Report(content)
    values = read_partition(report, data, path.absolute().parent)
    hold = mapping(report, data, "hold")
    backend = str(hold.get("backend", "local"))
    slurm = None
    if backend == "slurm":
        slurm = read_slurm(
            report,
            mapping(report, data, "slurm"),
            path.absolute().parent,
            values.get("partition", ""),
        )
    if not values.keys() >= {"partition", "state_dir"}:
        raise BadConfig(str(path), report.sentences())
    return Site(
        partition=values["partition"],
        state_dir=values["state_dir"],
        database_url=values.get("database_url", ""),
        backend=backend,
        path=path.absolute(),
        url=values.get("url") or url_of(values),
        tls_ca=values.get("tls_ca"),
        slurm=slurm,
    )


def read_slurm(report: Report, data: Mapping[str, Any], folder: Path, name: str) -> SlurmSettings:
    """``[slurm]``; ``name`` is the partition's."""

    path = path_in(folder)
    table = Table(report, "slurm", data)
    table.take("adapter", one_of("adapter", ADAPTERS), required=False)
    table.take("conf", path, required=False)
    table.take("controller_partition", as_name, required=False)
    table.take("partition", as_name, required=False)
    table.take("timeout_seconds", positive_seconds, to="timeout_us", required=False)
    table.take("poll_seconds", positive_seconds, to="poll_us", required=False)
    table.take("munge_socket", path, required=False)
    table.take("service_user", as_name, required=False)
    table.finish()
    return SlurmSettings(**{"partition": name, **table.values})


_MOST_DAYS: Final = 365


def as_days(value: object) -> int:
    """A number of whole days; 0 means never."""
    if type(value) is int and 0 <= value <= _MOST_DAYS:
        return value
    raise ValueError(f"{value!r} is not a whole number of days from 0 (never) to {_MOST_DAYS}")


def read_partition(report: Report, data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``[partition]``, by the names of :class:`~plexrl_slurm.settings.Settings`."""

    path = path_in(folder)
    table = Table(report, "partition", mapping(report, data, "partition"))
    table.take("name", as_name, to="partition")
    table.take("state_dir", path)
    table.take("host_dir", path)
    table.take("host_bytes", as_bytes)
    table.take("nvme_dir", path, required=False)
    table.take("nvme_bytes", as_bytes, required=False)
    table.take("scrub_days", as_days, required=False)
    table.take("database_url", lambda value: database_url(value, folder), required=False)
    table.take("policy", one_of("policy", POLICIES), required=False)
    table.take("hold_seconds", as_seconds, to="hold_us", required=False)
    table.take("image_every", as_count, required=False)
    table.take("max_part_tokens", as_count, required=False)
    table.take("session_timeout_seconds", positive_seconds, to="session_timeout_us", required=False)
    table.take("listen", listen_address, required=False)
    table.take("url", public_url, required=False)
    for name in ("tls_cert", "tls_key", "tls_ca"):
        table.take(name, path, required=False)
    table.finish()
    values = table.values
    check_tls(report, values)
    if "listen" in values:
        values["listen_host"], values["listen_port"] = values.pop("listen")
    if "state_dir" in values:
        values.setdefault("database_url", f"sqlite:///{values['state_dir']}/plexrl.sqlite")
    return values

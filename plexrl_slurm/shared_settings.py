"""WPGs that take turns on the same GPUs: ``shared``, ``residual_bytes``, ``gpu_bytes``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from plexrl_slurm.tomlcheck import Report, Table, as_bytes, as_count_or_none, as_name

#: Pool of the components whose nodes such WPGs lie on.
POOL: Final = "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """What one ``[[wpg]]`` table says that matters to those which it shares with."""

    #: Of the table, for the report.
    key: str
    #: The group; "": none.
    shared: str
    pool: str
    gpus: int
    nodes: int
    count: int
    #: What it may take awake (``options.device_bytes``; ``None``: unknown) and asleep.
    device_bytes: int | None
    residual_bytes: int
    #: Memory of one GPU; 0: unknown.
    gpu_bytes: int


def take(table: Table) -> None:
    """The keys of one ``[[wpg]]`` table."""
    table.take("shared", as_name, required=False)
    table.take("residual_bytes", _bytes_or_none, required=False)
    table.take("gpu_bytes", as_bytes, required=False)
    table.take("second_slot_bytes", as_bytes, required=False)


def _sharing(key: str, wpg: Any) -> Sharing:
    """Of a ``WpgSettings``."""
    return Sharing(
        key=key,
        shared=wpg.shared,
        pool=wpg.pool,
        gpus=wpg.gpus,
        nodes=wpg.nodes,
        count=wpg.count,
        device_bytes=wpg.options.get("device_bytes"),
        residual_bytes=wpg.residual_bytes,
        gpu_bytes=wpg.gpu_bytes,
    )


def check_shared(report: Report, tables: Mapping[str, Any], *, slurm: bool) -> None:
    """Whether those that share fit each other, and together their GPUs; by key of the table."""
    groups: dict[str, list[Sharing]] = {}
    for key, table in tables.items():
        each = _sharing(key, table)
        if each.shared:
            groups.setdefault(each.shared, []).append(each)
        elif not table.second_slot_bytes:
            _alone(report, each)
    for name, group in groups.items():
        _group(report, name, group, slurm=slurm)


def places(wpgs: Sequence[Any]) -> list[Any]:
    """The tables whose WPGs take GPUs: those that share count once, as their training WPG."""
    return [wpg for wpg in wpgs if not (wpg.shared and wpg.pool == "rollout")]


def _alone(report: Report, each: Sharing) -> None:
    for name in ("residual_bytes", "gpu_bytes"):
        if getattr(each, name):
            report.bad(
                f"{each.key}.{name}",
                f"{name} is for WPGs that share their GPUs or have a second engine: add shared "
                f"or second_slot_bytes, or leave it out",
            )


def _group(report: Report, name: str, group: Sequence[Sharing], *, slurm: bool) -> None:
    first = group[0]
    pools = sorted(each.pool for each in group)
    if pools != ["rollout", "train"]:
        report.bad(
            f"{group[-1].key}.shared",
            f"{name} is shared by {_counted(pools)}, and a group is one table in pool train and "
            f"one in pool rollout: add the other one, or give each pair a name of its own",
        )
        return
    for what in ("gpus", "nodes", "count"):
        if len({getattr(each, what) for each in group}) > 1:
            numbers = " and ".join(f"{getattr(each, what)} ({each.pool})" for each in group)
            report.bad(
                f"{group[-1].key}.{what}",
                f"WPGs that share {name} lie on the same GPUs, so that {what} must be equal, and "
                f"it is {numbers}: correct one of them",
            )
            return
    sizes = {each.gpu_bytes for each in group} - {0}
    if len(sizes) > 1:
        report.bad(
            f"{group[-1].key}.gpu_bytes",
            f"the GPUs of {name} have one size, and gpu_bytes is {' and '.join(map(str, sizes))}: "
            f"correct one of them",
        )
    elif sizes:
        _fit(report, name, group, sizes.pop() * first.gpus)
    elif slurm:
        report.warnings.append(
            f"{first.key}.gpu_bytes: without it nobody knows before the first turn whether the "
            f"WPGs that share {name} fit its GPUs: write the memory of one GPU"
        )


def _fit(report: Report, name: str, group: Sequence[Sharing], total: int) -> None:
    """Each awake, beside what is left of the other."""
    for each, other in zip(group, reversed(group), strict=True):
        key = f"{each.key}.options.device_bytes"
        if report.told(key):
            continue
        if each.device_bytes is None:
            report.bad(
                key,
                f"it is missing: with gpu_bytes, say what the {each.pool} WPG of {name} may take "
                f"on all its GPUs while it is awake",
            )
            continue
        needed = each.device_bytes + each.residual_bytes + other.residual_bytes
        if needed > total:
            report.bad(
                key,
                f"awake the {each.pool} WPG of {name} takes {_gib(each.device_bytes)}, beside "
                f"{_gib(each.residual_bytes + other.residual_bytes)} that neither gives back "
                f"(residual_bytes of both), and its GPUs have {_gib(total)}: lower one of them",
            )


def _counted(pools: Sequence[str]) -> str:
    return " and ".join(f"{list(pools).count(pool)} in pool {pool}" for pool in sorted({*pools}))


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _bytes_or_none(value: object) -> int:
    return as_count_or_none(value) if value == 0 else as_bytes(value)

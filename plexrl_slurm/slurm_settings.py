"""The parts of a partition's settings that are about Slurm: ``[slurm]``, ``[hold]``, components."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from plexrl_slurm.tomlcheck import (
    Report,
    Table,
    array,
    as_count,
    as_name,
    as_seconds,
    as_text,
    one_of,
    positive_seconds,
)
from plexrl_slurm.whereabouts import SlurmSettings as SlurmSettings

RENEWALS: Final = ("auto", "extend", "replace")
BACKENDS: Final = ("local", "slurm")
#: sbatch options of a component that have a key of their own, or would break the hold.
_OWN: Final = re.compile(
    r"--(partition|nodes|gres|gpus(-.*)?|constraint|time|account|qos|comment|job-name|output|"
    r"error|array|requeue|no-requeue|no-kill|hold|parsable|wait|wrap|test-only|dependency)(=|$)"
)
_MINUTE_US: Final = 60_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentSettings:
    """One ``[[hold.component]]``: nodes of one kind in every hold."""

    #: ``train``, ``rollout``, or ``shared`` for WPGs that take turns on the same GPUs.
    pool: str
    #: Slurm's partition.
    partition: str
    nodes: int = 1
    gpus_per_node: int = 1
    #: "" for any.
    gpu_type: str = ""
    constraint: str = ""
    #: Any other option of sbatch.
    options: tuple[str, ...] = ()

    @property
    def gpus(self) -> int:
        """On all its nodes."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldSettings:
    """``[hold]``: how many holds there are, and how long each lives."""

    #: ``local`` or ``slurm``.
    backend: str = "local"
    min: int = 1
    max: int = 1
    time_limit_us: int = 86_400_000_000
    renew_before_us: int = 900_000_000
    #: ``auto``: extend until Slurm refuses, then replace.
    renewal: str = "auto"
    scale_up_after_us: int = 60_000_000
    #: 0: never.
    idle_release_us: int = 0
    exclude_us: int = 3_600_000_000
    exclude_after: int = 3
    #: Where held nodes reach the daemon.
    agent_address: str = "127.0.0.1"
    account: str = ""
    qos: str = ""
    comment: str = ""
    #: An agent that is silent for ten times as long is lost, whatever Slurm thinks of its node.
    agent_timeout_us: int = 15_000_000
    #: Optimizer steps between two durable images, where nodes can be lost.
    durable_every: int = 5
    #: ``durable_every`` is written in the file: there are durable images, also without Slurm.
    durable: bool = False
    components: tuple[ComponentSettings, ...] = ()


def read_hold(report: Report, data: Mapping[str, Any]) -> HoldSettings:
    """``[hold]`` with its components."""
    table = Table(report, "hold", data)
    table.take("backend", one_of("backend", BACKENDS), required=False)
    table.take("min", _whole, required=False)
    table.take("max", as_count, required=False)
    table.take("time_limit", _limit, to="time_limit_us", required=False)
    table.take("renew_before_seconds", as_seconds, to="renew_before_us", required=False)
    table.take("renewal", one_of("renewal", RENEWALS), required=False)
    table.take("scale_up_after_seconds", as_seconds, to="scale_up_after_us", required=False)
    table.take("idle_release_seconds", as_seconds, to="idle_release_us", required=False)
    table.take("exclude_seconds", as_seconds, to="exclude_us", required=False)
    table.take("exclude_after", as_count, required=False)
    table.take("agent_address", as_text, required=False)
    table.take("agent_timeout_seconds", positive_seconds, to="agent_timeout_us", required=False)
    table.take("durable_every", as_count, required=False)
    table.take("account", as_name, required=False)
    table.take("qos", as_name, required=False)
    table.take("comment", _comment, required=False)
    table.known.append("component")
    table.finish()
    components = tuple(
        component
        for index, each in enumerate(array(report, data, "component"))
        if (component := _component(report, f"hold.component[{index}]", each)) is not None
    )
    durable = "durable_every" in table.values
    hold = HoldSettings(**table.values, components=components, durable=durable)
    _check_hold(report, hold)
    return hold


def _check_hold(report: Report, hold: HoldSettings) -> None:
    if hold.min > hold.max:
        report.bad("hold.min", f"{hold.min} is more than hold.max, {hold.max}: lower one of them")
    if hold.backend == "local":
        for key in ("component", "max"):
            if (hold.components if key == "component" else hold.max > 1) or hold.min != 1:
                report.bad(
                    f"hold.{key}",
                    'backend "local" has one hold on this machine: leave it out, or write '
                    'backend = "slurm"',
                )
                break
    elif not hold.components:
        report.bad(
            "hold.component",
            'backend "slurm" needs to know what to hold: add a [[hold.component]] table for '
            "each pool, with pool, partition, nodes and gpus_per_node",
        )
    if 2 * hold.renew_before_us > hold.time_limit_us:
        report.bad(
            "hold.renew_before_seconds",
            f"{hold.renew_before_us // 1_000_000} s are more than half of time_limit "
            f"({hold.time_limit_us // 1_000_000} s): lower it",
        )


def _component(report: Report, key: str, data: Mapping[str, Any]) -> ComponentSettings | None:
    table = Table(report, key, data)
    table.take("pool", one_of("pool", ("train", "rollout", "shared")))
    table.take("partition", as_name)
    table.take("nodes", as_count, required=False)
    table.take("gpus_per_node", as_count, required=False)
    table.take("gpu_type", as_name, required=False)
    table.take("constraint", as_text, required=False)
    table.take("options", _options, required=False)
    table.finish()
    if not {"pool", "partition"} <= table.values.keys():
        return None
    return ComponentSettings(**table.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What one WPG needs: GPUs on each of so many nodes."""

    pool: str
    gpus: int
    nodes: int = 1


def check_shapes(report: Report, hold: HoldSettings, wpgs: Sequence[Shape]) -> None:
    """Whether the WPGs fit into the nodes of one hold."""
    if hold.backend != "slurm" or not hold.components:
        return
    for pool in ("train", "rollout", "shared"):
        nodes = [
            (index, component.gpus_per_node)
            for index, component in enumerate(hold.components)
            if component.pool == pool
            for _ in range(component.nodes)
        ]
        wanted = [shape for shape in wpgs if shape.pool == pool]
        if wanted and not nodes:
            report.bad(
                "hold.component",
                f"there are WPGs in pool {pool} and no component has it: add a "
                f'[[hold.component]] with pool = "{pool}"',
            )
        elif (left := _left_over(wanted, nodes)) is not None:
            lies = (
                f"a WPG lies on one node and one of {left.gpus} GPU(s) is left over"
                if left.nodes == 1
                else f"one of {left.gpus} GPU(s) on each of {left.nodes} nodes of one component is "
                f"left over"
            )
            report.bad(
                "hold.component",
                f"the {pool} WPGs ({_counted([shape.gpus * shape.nodes for shape in wanted])}) do "
                f"not fit into {len(nodes)} node(s) of {_counted([gpus for _, gpus in nodes])}, "
                f"{lies}: give the component more nodes or gpus_per_node, or lower wpg.count",
            )


def spread(wanted: Sequence[Shape], nodes: Sequence[tuple[int, int]]) -> list[range] | None:
    """Nodes, ``(component, GPUs)`` each, of each WPG; ``None``: they do not fit."""
    free = [gpus for _, gpus in nodes]
    homes = [range(0)] * len(wanted)
    for index in in_turn(wanted):
        shape = wanted[index]
        home = window([component for component, _ in nodes], free, shape.nodes, shape.gpus)
        if home is None:
            return None
        for at in home:
            free[at] -= shape.gpus
        homes[index] = home
    return homes


def in_turn(wanted: Sequence[Shape]) -> list[int]:
    """Who finds its nodes first: those on most nodes, then those with most GPUs."""
    return sorted(range(len(wanted)), key=lambda at: (-wanted[at].nodes, -wanted[at].gpus, at))


def window(components: Sequence[int], free: Sequence[int], nodes: int, gpus: int) -> range | None:
    """The first nodes in a row, all of one component, with so many GPUs free on each."""
    for start in range(len(free) - nodes + 1):
        home = range(start, start + nodes)
        if len({components[at] for at in home}) == 1 and all(free[at] >= gpus for at in home):
            return home
    return None


def _left_over(wanted: Sequence[Shape], nodes: Sequence[tuple[int, int]]) -> Shape | None:
    sorted_ = [wanted[at] for at in in_turn(wanted)]
    for count in range(1, len(wanted) + 1):
        if spread(sorted_[:count], nodes) is None:
            return sorted_[count - 1]
    return None


def _counted(gpus: Sequence[int]) -> str:
    kinds = sorted(set(gpus), reverse=True)
    return ", ".join(f"{list(gpus).count(kind)} of {kind} GPU(s)" for kind in kinds)


# ---- converters ---------------------------------------------------------------------------


def _whole(value: object) -> int:
    if type(value) is int and value >= 0:
        return value
    raise ValueError(f"{value!r} is not a whole number, 0 or more")


def _limit(value: object) -> int:
    """Slurm's time forms, at least two minutes."""
    given = as_text(value)
    days, dash, rest = given.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(re.fullmatch("[0-9]+", n) for n in [days or "0", *parts]):
        raise ValueError(f'{given!r} is not a time limit: write "1-12:00:00" or minutes')
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        total = ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    elif len(numbers) == 3:
        total = (numbers[0] * 60 + numbers[1]) * 60 + numbers[2]
    else:
        total = numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0)
    if total < 120:
        raise ValueError(f"{given!r} is shorter than two minutes: Slurm counts whole ones")
    return -(-total // 60) * _MINUTE_US


def _comment(value: object) -> str:
    given = as_text(value)
    if len(given) > 500 or not given.isprintable() or set("'\"\\") & set(given):
        raise ValueError(
            "a comment is one line of at most 500 printable characters, without quotes"
        )
    return given


def _options(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError('it must be a list of sbatch options, such as ["--exclusive"]')
    for option in value:
        if not re.fullmatch(r"--[a-z][a-z0-9-]*(=\S.*)?", option) or not option.isprintable():
            raise ValueError(f"{option!r} is not an option: write --name or --name=value")
        if _OWN.match(option):
            raise ValueError(f"{option!r} is set by the hold itself or has a key of its own")
    return tuple(value)

"""Whether Slurm could ever start a hold, from what it says of its partitions and nodes. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from plexrl_slurm.slurm.port import NodeStatus
from plexrl_slurm.slurm_settings import ComponentSettings, HoldSettings

_FEATURE = re.compile(r"[A-Za-z0-9_.-]+")
_EVERYBODY = ("", "ALL", "(null)")
_FORM = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    """A partition as ``scontrol show partition`` has it."""

    name: str
    #: ``UP``, ``DOWN``, ``DRAIN`` or ``INACTIVE``.
    state: str = "UP"
    #: Longest job; ``None``: no limit.
    max_time_us: int | None = None
    #: Most nodes of one job; ``None``: no limit.
    max_nodes: int | None = None
    #: Empty: all are allowed.
    allow_accounts: frozenset[str] = frozenset()
    deny_accounts: frozenset[str] = frozenset()
    allow_groups: frozenset[str] = frozenset()
    allow_qos: frozenset[str] = frozenset()
    root_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Asker:
    """Who submits the holds, and as what."""

    user: str
    groups: frozenset[str] = frozenset()
    account: str = ""
    qos: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """What stands in a hold's way."""

    #: It can never start; whole sentences with the remedy.
    never: tuple[str, ...] = field(default=())
    #: It cannot start as things are now.
    not_now: tuple[str, ...] = field(default=())


def read_partitions(text: str) -> dict[str, PartitionStatus]:
    """``scontrol show partition --oneliner``."""
    found = {}
    for line in text.splitlines():
        words = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
        if name := words.get("PartitionName"):
            limit = words.get("MaxNodes", "")
            found[name] = PartitionStatus(
                name=name,
                state=words.get("State", "UP"),
                max_time_us=duration_us(words.get("MaxTime", "")),
                max_nodes=int(limit) if limit.isdecimal() else None,
                allow_accounts=_names(words.get("AllowAccounts", "")),
                deny_accounts=_names(words.get("DenyAccounts", "")),
                allow_groups=_names(words.get("AllowGroups", "")),
                allow_qos=_names(words.get("AllowQos", "")),
                root_only=words.get("RootOnly") == "YES",
            )
    return found


def duration_us(text: str) -> int | None:
    """``1-02:00:00``, ``02:00:00``, ``30:00`` or ``30``; ``None``: no limit."""
    match = _FORM.fullmatch(text)
    if match is None:
        return None
    days, *rest = match.groups()
    numbers = [int(each) for each in rest if each is not None]
    if days is not None or len(numbers) == 3:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) * 1_000_000


def _names(value: str) -> frozenset[str]:
    return frozenset() if value in _EVERYBODY else frozenset(value.split(","))


def examine(
    hold: HoldSettings,
    partitions: Mapping[str, PartitionStatus],
    nodes: Mapping[str, NodeStatus],
    asker: Asker | None = None,
) -> Feasibility:
    """Everything that keeps a hold from starting, now or ever."""
    never: list[str] = []
    not_now: list[str] = []
    fits: list[Sequence[str]] = []
    for index, component in enumerate(hold.components):
        where = f"hold.component[{index}] ({component.pool})"
        partition = partitions.get(component.partition)
        if partition is None:
            known = ", ".join(sorted(partitions)) or "none"
            never.append(
                f"{where}: Slurm has no partition {component.partition!r}: correct `partition`; "
                f"Slurm has {known}"
            )
            continue
        refused = list(refusals(partition, component, hold, asker))
        never += [f"{where}: {sentence}" for sentence in refused]
        if partition.state != "UP":
            not_now.append(
                f"{where}: partition {partition.name} is {partition.state}, so that nothing "
                f"starts there: scontrol update PartitionName={partition.name} State=UP"
            )
        fitting, why = _fitting(component, nodes)
        if len(fitting) < component.nodes:
            never.append(f"{where}: {why}")
            continue
        usable = [name for name in fitting if nodes[name].usable]
        if len(usable) < component.nodes:
            out = [name for name in fitting if name not in usable]
            not_now.append(
                f"{where}: {component.nodes} node(s) are wanted and only {len(usable)} of "
                f"{len(fitting)} that fit can be used now ({_listed(out, nodes)} cannot): bring "
                f"them back with scontrol update NodeName=NAME State=RESUME"
            )
        fits.append(fitting)
    if len(fits) == len(hold.components) and not _together(hold.components, fits, nodes):
        total = sum(component.gpus for component in hold.components)
        there = sum(nodes[name].gpus for name in {name for some in fits for name in some})
        sentence = (
            f"hold.component: the components fit one by one, but hardly together ({total} GPUs of "
            f"{there}): lower nodes or gpus_per_node, or take another partition for one of them"
        )
        # Which nodes to give to whom is a puzzle of its own; only the sum is certain.
        (never if total > there else not_now).append(sentence)
    return Feasibility(never=tuple(never), not_now=tuple(not_now))


def refusals(
    partition: PartitionStatus,
    component: ComponentSettings,
    hold: HoldSettings,
    asker: Asker | None,
) -> Iterable[str]:
    """Why this partition would not take the job."""
    name = partition.name
    if partition.max_time_us is not None and hold.time_limit_us > partition.max_time_us:
        yield (
            f"hold.time_limit is longer than the MaxTime of partition {name} "
            f"({_clock(partition.max_time_us)}): lower time_limit, or raise MaxTime"
        )
    if partition.max_nodes is not None and component.nodes > partition.max_nodes:
        yield (
            f"{component.nodes} nodes are more than the MaxNodes of partition {name} "
            f"({partition.max_nodes}): lower `nodes`, or raise MaxNodes"
        )
    if asker is None or asker.user == "root":
        return
    if partition.root_only:
        yield f"partition {name} is for root only (RootOnly=YES): choose another one"
    if partition.allow_groups and not partition.allow_groups & asker.groups:
        yield (
            f"user {asker.user} is in none of the groups that may use partition {name} "
            f"(AllowGroups={','.join(sorted(partition.allow_groups))}): add it to one of them"
        )
    account = asker.account
    allowed = partition.allow_accounts
    if account and ((allowed and account not in allowed) or account in partition.deny_accounts):
        yield (
            f"account {account} may not use partition {name} (AllowAccounts, DenyAccounts): "
            f"choose another hold.account, or allow it in slurm.conf"
        )
    if asker.qos and partition.allow_qos and asker.qos not in partition.allow_qos:
        yield (
            f"QOS {asker.qos} may not be used in partition {name} "
            f"(AllowQos={','.join(sorted(partition.allow_qos))}): choose another hold.qos"
        )


def _fitting(
    component: ComponentSettings, nodes: Mapping[str, NodeStatus]
) -> tuple[list[str], str]:
    """Nodes that could serve it some day; and if they are too few, why."""
    wanted = component.gpus_per_node
    kind = f"{component.gpu_type} " if component.gpu_type else ""
    inside = [name for name, node in nodes.items() if component.partition in node.partitions]
    typed = [n for n in inside if component.gpu_type in ("", nodes[n].gpu_type)]
    large = [n for n in typed if nodes[n].gpus >= wanted]
    found = [n for n in large if has_features(component.constraint, nodes[n].features)]
    if len(inside) < component.nodes:
        why = f"partition {component.partition} has {len(inside)} node(s): lower `nodes`"
    elif len(typed) < component.nodes:
        kinds = sorted({nodes[n].gpu_type for n in inside if nodes[n].gpus})
        why = (
            f"only {len(typed)} node(s) of partition {component.partition} have GPUs of type "
            f"{component.gpu_type!r}: correct gpu_type (Slurm has {', '.join(kinds) or 'no type'}),"
            f" or Gres= in slurm.conf"
        )
    elif len(large) < component.nodes:
        most = max((nodes[n].gpus for n in typed), default=0)
        why = (
            f"{component.nodes} node(s) with {wanted} {kind}GPUs are wanted and {len(large)} of "
            f"partition {component.partition} have so many (at most {most}): lower gpus_per_node, "
            f"or correct Gres= in slurm.conf and gres.conf"
        )
    else:
        features = sorted({feature for n in large for feature in nodes[n].features})
        offered = ", ".join(features) or "no features"
        why = (
            f"only {len(found)} node(s) of partition {component.partition} satisfy constraint "
            f"{component.constraint!r}: correct it (there are {offered})"
        )
    return found, f"{why}; no hold could ever start"


def has_features(constraint: str, features: Collection[str]) -> bool:
    """Whether a node with ``features`` may serve; what only Slurm understands is taken to be so.

    Slurm also knows counts and brackets; of those, one of the named features has to be there.
    """
    wanted = _FEATURE.findall(re.sub(r"\*\d+", "", constraint))
    if not wanted:
        return True
    present = [word in features for word in wanted]
    if re.search(r"[][()*|]", constraint):
        return any(present)
    return all(present)


def _together(
    components: Sequence[ComponentSettings],
    fits: Sequence[Sequence[str]],
    nodes: Mapping[str, NodeStatus],
) -> bool:
    """Whether there are GPUs for all components at once; the choosiest takes first."""
    free = {name: node.gpus for name, node in nodes.items()}
    order = sorted(
        range(len(components)), key=lambda at: (len(fits[at]), -components[at].gpus_per_node)
    )
    for at in order:
        component = components[at]
        room = [name for name in fits[at] if free[name] >= component.gpus_per_node]
        room.sort(key=lambda name: (free[name], name))
        if len(room) < component.nodes:
            return False
        alone = any(option.startswith("--exclusive") for option in component.options)
        for name in room[: component.nodes]:
            free[name] = 0 if alone else free[name] - component.gpus_per_node
    return True


def _listed(names: Sequence[str], nodes: Mapping[str, NodeStatus]) -> str:
    shown = [
        f"{name}: {nodes[name].state}{f', {nodes[name].reason}' if nodes[name].reason else ''}"
        for name in names[:4]
    ]
    return "; ".join([*shown, *(["..."] if len(names) > 4 else [])])


def _clock(limit_us: int) -> str:
    minutes = limit_us // 60_000_000
    days, rest = divmod(minutes, 24 * 60)
    return f"{days}-{rest // 60:02}:{rest % 60:02}:00"

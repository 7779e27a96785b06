"""The partition's configuration: one frozen value, read once at the edge, unknown keys refused.

Precedence: command-line flag, then ``PLEXRL_*`` environment, then the TOML file, then the
default. ``read`` (this module's only I/O) also looks at the model folders, so that the
catalogue it returns carries real sizes.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from plexrl_slurm import shared_settings
from plexrl_slurm.budgets import (
    check_budgets,
    check_host,
    check_nvme,
    check_swap,
    not_writable,
    on_gangs,
)
from plexrl_slurm.core import zero
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadConfig, BadInput
from plexrl_slurm.core.sizes import in_words
from plexrl_slurm.core.tails import TailRules
from plexrl_slurm.model_folder import as_dtype, read_model_folder, tensor_parallel_problem
from plexrl_slurm.queue_settings import TABLES, QueueSettings, check_reservation, read_queue
from plexrl_slurm.sharing_settings import SharingSettings, read_sharing
from plexrl_slurm.slurm_settings import HoldSettings, Shape, check_shapes, read_hold
from plexrl_slurm.tail_settings import read_tails
from plexrl_slurm.tomlcheck import (
    Report,
    Table,
    array,
    as_bytes,
    as_count,
    as_count_or_none,
    as_name,
    as_switch,
    as_text,
    load,
    mapping,
    one_of,
    path_in,
)
from plexrl_slurm.whereabouts import Site as Site
from plexrl_slurm.whereabouts import SlurmSettings as SlurmSettings
from plexrl_slurm.whereabouts import read_partition, read_slurm
from plexrl_slurm.whereabouts import read_site as read_site

#: Pool in which each engine works.
ENGINE_POOLS: Final[Mapping[str, str]] = {
    "deepspeed": "train",
    "fake_train": "train",
    "vllm": "rollout",
    "fake_sample": "rollout",
}
#: Options of the real engines and how each is read; a fake takes any.
ENGINE_OPTIONS: Final[Mapping[str, Mapping[str, Callable[[object], object]]]] = {
    "deepspeed": {
        "device_bytes": as_bytes,
        "zero_stage": as_count,
        "offload_optimizer": as_text,
        "offload_param": as_text,
        "decay_vectors": as_switch,
        "max_tokens_per_microbatch": as_count,
        "prefix_sharing": as_switch,
        "model": as_name,
        "start_timeout_s": as_count,
        "answer_timeout_s": as_count,
    },
    "vllm": {
        "device_bytes": as_bytes,
        "kv_cache_bytes": as_bytes,
        "max_num_seqs": as_count,
        "prefix_caching": as_switch,
        "block_size": as_count,
        "max_slots": as_count,
        "max_asleep": as_count_or_none,
        "model": as_name,
        "start_timeout_s": as_count,
        "answer_timeout_s": as_count,
    },
}
#: They are counted one by one.
_MOST_WPGS: Final = 10_000
#: A unix socket's path may not be longer.
_LONGEST_SOCKET: Final = 107


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgSettings:
    """One ``[[wpg]]`` table: ``count`` equal WPGs named ``<pool>-0``, ``<pool>-1``, …"""

    #: ``train`` or ``rollout``.
    pool: str
    #: ``deepspeed``, ``vllm``, ``fake_train`` or ``fake_sample``.
    engine: str
    #: GPUs of each, on all its nodes; on a CPU-only machine, what counts as so many.
    gpus: int = 1
    #: Nodes of one component that each lies on, with an equal share of its GPUs on each.
    nodes: int = 1
    count: int = 1
    #: CPU cores (of each of its nodes) for each WPG in turn: ``[[0], [1]]``; empty: anywhere.
    cores: tuple[tuple[int, ...], ...] = ()
    #: Engine options: deepspeed ``zero_stage`` (1, 2 or 3), ``offload_optimizer`` and
    #: ``offload_param`` (``none``, ``cpu``; the first also ``nvme``),
    #: ``decay_vectors``, ``max_tokens_per_microbatch``; vllm ``kv_cache_bytes``, ``max_num_seqs``,
    #: ``prefix_caching``, ``block_size``, ``max_slots`` and ``max_asleep`` (engines awake and
    #: asleep, one per architecture); every engine
    #: ``device_bytes``: what residents may take on all GPUs of a WPG together.
    options: Mapping[str, Any] = field(default_factory=dict)
    #: It takes turns with the table of the other pool that says the same name; see
    #: ``shared_settings``.
    shared: str = ""
    residual_bytes: int = 0
    gpu_bytes: int = 0

    @property
    def place(self) -> str:
        """Pool of the components that it lies on."""
        return shared_settings.POOL if self.shared else self.pool

    @property
    def gpus_per_node(self) -> int:
        """On each of its nodes."""
        return self.gpus // self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one partition."""

    #: ``[partition]``: what users write after ``-p``.
    partition: str
    #: Spool, sockets, logs, checkpoints; absolute.
    state_dir: Path
    #: SQLAlchemy URL.
    database_url: str
    #: Host-memory tier: a folder on a tmpfs; absolute.
    host_dir: Path
    #: Bytes that images and snapshots may take there.
    host_bytes: int
    #: Below it: a folder on a disk of each node, absolute; ``None``: images are in memory only.
    nvme_dir: Path | None = None
    #: Bytes that images may take there.
    nvme_bytes: int = 0
    #: A copy there, and a durable image, is read again, to see whether it is whole, after so many
    #: days; 0: never.
    scrub_days: int = 7
    #: TCP address of the API, for controllers.
    listen_host: str = "127.0.0.1"
    listen_port: int = 8421
    #: A name of ``core.policy.POLICIES``.
    policy: str = "atc_h"
    #: Longest anticipatory hold.
    hold_us: int = 2_000_000
    #: Optimizer steps between two host images of a deployment that is never switched out.
    image_every: int = 10
    #: A training call of more tokens than this is run in parts.
    max_part_tokens: int = 16_384
    #: A session without a heartbeat for so long is over.
    session_timeout_us: int = 120_000_000
    #: What clients and controllers are told; "": derived from where it listens.
    url: str = ""
    #: Certificate and key of the API (PEM), and the authority that clients check it with.
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    hold: HoldSettings = field(default_factory=HoldSettings)
    sharing: SharingSettings = field(default_factory=SharingSettings)
    #: ``None`` with the local backend.
    slurm: SlurmSettings | None = None
    #: Last samples of rollouts that may be paused.
    tails: TailRules = field(default_factory=TailRules)
    wpgs: tuple[WpgSettings, ...] = ()
    #: By name.
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    queue: QueueSettings = field(default_factory=QueueSettings)
    #: Where it was read from.
    path: Path = Path()

    @property
    def backend(self) -> str:
        """``local`` or ``slurm``."""
        return self.hold.backend

    @property
    def socket(self) -> Path:
        """The unix socket that the CLI talks to."""
        return self.state_dir / "api.sock"

    @property
    def jobs_dir(self) -> Path:
        """Where the local Slurm adapter keeps its jobs."""
        return self.state_dir / "local"

    @property
    def durable(self) -> bool:
        """Whether images of training deployments are copied to the durable tier."""
        return self.backend == "slurm" or self.hold.durable

    @property
    def durable_dir(self) -> Path:
        """Where images lie that outlive the nodes; seen by all of them."""
        return self.state_dir / "durable"

    @property
    def snapshots_dir(self) -> Path:
        """Where copies of sampling weights lie that outlive the node that published them."""
        return self.state_dir / "snapshots"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What :func:`check` found in a file."""

    #: ``None`` if there is a problem.
    settings: Settings | None
    #: What must be corrected; whole sentences.
    problems: tuple[str, ...]
    #: What will work, but perhaps not as meant.
    warnings: tuple[str, ...]


def read(path: Path) -> Settings:
    """The settings in ``path``; raises ``BadConfig`` with everything that is wrong."""
    findings = check(path)
    if findings.settings is None:
        raise BadConfig(str(path), findings.problems)
    return findings.settings


def check(path: Path) -> Findings:
    """Find every mistake in ``path``, in the machine's state too, and all at once."""
    try:
        data, content = load(path)
    except BadConfig as error:
        return Findings(settings=None, problems=error.problems, warnings=())
    report = Report(content)
    known = ("partition", "hold", "sharing", "slurm", "wpg", "model", "tails", *TABLES)
    report.unknown("", data, known)
    folder = path.absolute().parent
    values = read_partition(report, data, folder)
    hold = read_hold(report, mapping(report, data, "hold"))
    sharing = read_sharing(report, data)
    slurm = None
    if hold.backend == "slurm":
        table = mapping(report, data, "slurm")
        slurm = read_slurm(report, table, folder, values.get("partition", ""))
    elif "slurm" in data:
        report.bad("slurm", 'it has no effect with backend "local": leave it out')
    tails = read_tails(report, mapping(report, data, "tails"))
    wpg_tables = array(report, data, "wpg")
    named = {
        key: wpg
        for index, table in enumerate(wpg_tables)
        if (wpg := _wpg(report, key := f"wpg[{index}]", table)) is not None
    }
    wpgs = tuple(named.values())
    gangs = [(wpg.gpus, wpg.options) for wpg in wpgs if wpg.pool == "train"]
    models = [
        (model[0], on_gangs(model[1], gangs))
        for index, table in enumerate(array(report, data, "model"))
        if (model := _model(report, f"model[{index}]", table, folder)) is not None
    ]
    _check_pools(report, wpgs, complete=len(wpgs) == len(wpg_tables))
    shared_settings.check_shared(report, named, slurm=hold.backend == "slurm")
    placed = [w for w in shared_settings.places(wpgs) for _ in range(w.count)]
    shapes = [Shape(pool=w.place, gpus=w.gpus_per_node, nodes=w.nodes) for w in placed]
    check_shapes(report, hold, shapes)
    queue = read_queue(report, data, backfill=sharing.backfill)
    counts = [(wpg.pool, wpg.count) for wpg in wpgs]
    check_reservation(report, queue, wpgs=counts, host_bytes=values.get("host_bytes"))
    _check_models(report, models, wpgs)
    _check_tensor_parallel(report, [model for _, model in models], wpgs)
    local = hold.backend == "local"
    spread = [((w.gpus, w.options), w.nodes) for w in wpgs if w.pool == "train"]
    check_budgets(report, values, models, gangs=spread)
    check_nvme(report, values, here=local, durable=not local or hold.durable)
    check_swap(report, values, [model for _, model in models], wpgs)
    _check_places(report, values)
    check_host(report, values, here=local)
    problems = report.sentences()
    settings = None
    if not problems:
        catalogue = {model.name: model for _, model in models}
        settings = Settings(
            **values,
            hold=hold,
            sharing=sharing,
            slurm=slurm,
            tails=tails,
            wpgs=wpgs,
            models=catalogue,
            queue=queue,
            path=path.absolute(),
        )
    return Findings(settings=settings, problems=problems, warnings=tuple(report.warnings))


# ---- the tables ---------------------------------------------------------------------------


def _wpg(report: Report, key: str, data: Mapping[str, Any]) -> WpgSettings | None:
    table = Table(report, key, data)
    table.take("pool", one_of("pool", ("train", "rollout")))
    table.take("engine", one_of("engine", tuple(ENGINE_POOLS)))
    for name in ("gpus", "nodes", "count"):
        table.take(name, _some, required=False)
    table.take("cores", _cores, required=False)
    shared_settings.take(table)
    options = Table(report, f"{key}.options", mapping(report, data, "options", at=key))
    table.known.append("options")
    table.finish()
    pool, engine = table.values.get("pool"), table.values.get("engine")
    if pool and engine and ENGINE_POOLS[engine] != pool:
        fitting = [name for name, where in ENGINE_POOLS.items() if where == pool]
        report.bad(
            f"{key}.engine",
            f"engine {engine} works in pool {ENGINE_POOLS[engine]}, and this WPG is in pool "
            f"{pool}: choose {' or '.join(fitting)}, or the other pool",
        )
    if engine is not None and engine in ENGINE_OPTIONS:
        for name, convert in ENGINE_OPTIONS[engine].items():
            options.take(name, convert, required=False)
        options.finish()
    else:
        options.take("device_bytes", as_bytes, required=False)
        others = {key: options.data[key] for key in options.data if key != "device_bytes"}
        options.values = {**others, **options.values}
    if engine == "deepspeed" and (impossible := zero.problem(options.values)) is not None:
        report.bad(f"{key}.options.{impossible[0]}", impossible[1])
    cores, count = table.values.get("cores", ()), table.values.get("count", 1)
    if cores and len(cores) != count:
        report.bad(
            f"{key}.cores",
            f"it lists cores for {len(cores)} WPGs and count is {count}: "
            f"give one inner list for each WPG, or leave cores out",
        )
    gpus, nodes = table.values.get("gpus", 1), table.values.get("nodes", 1)
    if gpus % nodes:
        report.bad(
            f"{key}.nodes",
            f"{gpus} GPU(s) cannot be shared out over {nodes} nodes, and each node of a WPG has as "
            f"many ranks as the others: make gpus a multiple of nodes",
        )
    if pool == "rollout" and nodes > 1:
        report.bad(
            f"{key}.nodes",
            "a rollout WPG lies on one node, because its engine is one process with workers of its "
            "own there: leave nodes out, and raise count for more of them",
        )
    if not {"pool", "engine"} <= table.values.keys():
        return None
    return WpgSettings(**table.values, options=options.values)


def _model(
    report: Report, key: str, data: Mapping[str, Any], folder: Path
) -> tuple[str, ModelSpec] | None:
    table = Table(report, key, data)
    table.take("name", as_name)
    table.take("path", path_in(folder))
    table.take("dtype", as_dtype, required=False)
    table.take("max_context_length", as_count, required=False)
    table.finish()
    values = table.values
    if "path" not in values:
        return None
    try:
        found = read_model_folder(values["path"], dtype=values.get("dtype"))
    except BadInput as error:
        report.bad(f"{key}.path", error.sentence)
        return None
    longest = values.get("max_context_length", found.max_position_embeddings)
    if longest > found.max_position_embeddings:
        report.bad(
            f"{key}.max_context_length",
            f"{longest} is more than the model's own {found.max_position_embeddings} "
            f"(max_position_embeddings): write {found.max_position_embeddings} or less",
        )
    if "name" not in values:
        return None
    return key, ModelSpec(
        name=values["name"],
        path=str(values["path"]),
        dtype=found.dtype,
        max_context_length=longest,
        vocab_size=found.vocab_size,
        parameters=found.parameters,
        architecture=found.architecture,
    )


# ---- checks across tables -----------------------------------------------------------------


def _check_pools(report: Report, wpgs: Sequence[WpgSettings], *, complete: bool) -> None:
    if not complete:  # a table that could not be read may be the missing one
        return
    for pool in ("train", "rollout"):
        if not any(wpg.pool == pool for wpg in wpgs):
            engine = "deepspeed" if pool == "train" else "vllm"
            report.bad(
                "wpg",
                f"no WPG in pool {pool}: add a [[wpg]] table with "
                f'pool = "{pool}" and engine = "{engine}"',
            )


def _check_models(
    report: Report,
    models: Sequence[tuple[str, ModelSpec]],
    wpgs: Sequence[WpgSettings],
) -> None:
    for name, times in Counter(model.name for _, model in models).items():
        if times > 1:
            last = [key for key, model in models if model.name == name][-1]
            report.bad(f"{last}.name", f"{times} models are named {name!r}: rename all but one")
    for key, model in models:
        for pool, size in (("train", model.train_bytes), ("rollout", model.weights_bytes)):
            limits = [wpg.options.get("device_bytes") for wpg in wpgs if wpg.pool == pool]
            known = [limit for limit in limits if isinstance(limit, int)]
            if known and len(known) == len(limits) and size > max(known):
                report.bad(
                    key,
                    f"model {model.name} needs {in_words(size)} on a {pool} WPG and the "
                    f"largest has device_bytes of {in_words(max(known))}: raise device_bytes "
                    f"or take the model out",
                )
    if not models and not report.has("model"):
        report.bad("model", "the catalogue is empty: add a [[model]] table with name and path")


def _check_tensor_parallel(
    report: Report, models: Sequence[ModelSpec], wpgs: Sequence[WpgSettings]
) -> None:
    """Any job may come to any WPG, so each of vLLM's must be able to hold every model."""
    for index, wpg in enumerate(wpgs):
        if wpg.engine != "vllm":
            continue
        for model in models:
            reason = tensor_parallel_problem(Path(model.path), wpg.gpus)
            if reason is not None:
                report.bad(
                    f"wpg[{index}].gpus",
                    f"vLLM cannot divide model {model.name} among {wpg.gpus} GPUs: {reason}; "
                    f"choose another number, or take the model out",
                )


def _check_places(report: Report, values: Mapping[str, Any]) -> None:
    if state := values.get("state_dir"):
        if len(str(state / "api.sock")) > _LONGEST_SOCKET:
            report.bad(
                "partition.state_dir",
                f"{state} is too long for a unix socket in it: choose a path of at most "
                f"{_LONGEST_SOCKET - len('/api.sock')} characters",
            )
        _check_writable(report, "partition.state_dir", state)
    if host := values.get("host_dir"):
        _check_writable(report, "partition.host_dir", host)


def _check_writable(report: Report, key: str, folder: Path) -> None:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        report.bad(key, f"{existing} is not a folder: choose another path")
    elif wrong := not_writable(existing):
        report.bad(key, wrong)


# ---- converters of this file only -----------------------------------------------------------


def _some(value: object) -> int:
    """So many GPUs, nodes or WPGs."""
    if as_count(value) > _MOST_WPGS:
        raise ValueError(f"{value!r} is too large: write {_MOST_WPGS:,} or less")
    return as_count(value)


def _cores(value: object) -> tuple[tuple[int, ...], ...]:
    """``[[0, 1], [2, 3]]``: the cores of each WPG in turn."""
    shape = "a list of lists of core numbers, one list for each WPG, such as [[0], [1]]"
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        raise ValueError(f"it must be {shape}")
    present = os.cpu_count() or 1
    for core in (core for each in value for core in each):
        if type(core) is not int or core < 0:
            raise ValueError(f"{core!r} is not a core number: it must be {shape}")
        if core >= present:
            raise ValueError(f"core {core} does not exist: this machine has 0 to {present - 1}")
    return tuple(tuple(each) for each in value)

"""``[tails]``: which last samples of rollouts may be paused, or run on beside others; and what the
second engines, which the latter takes, need of memory."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.sizes import in_words
from plexrl_slurm.core.tails import TailRules
from plexrl_slurm.tomlcheck import Report, Table, as_count, as_count_or_none, as_seconds, as_switch

#: What vLLM takes on each GPU for keys and values, unless ``kv_cache_bytes`` says otherwise.
KV_CACHE_BYTES: Final = 256 << 20


def read_tails(report: Report, data: Mapping[str, Any]) -> TailRules:
    """The rules; what is wrong goes into ``report``."""
    table = Table(report, "tails", data)
    table.take("pause", as_switch, required=False)
    table.take("running", as_count, required=False)
    table.take("share_percent", _percent, to="share", required=False)
    table.take("least_seconds", as_seconds, to="least_us", required=False)
    table.take("pauses", as_count, required=False)
    table.take("co_resident", as_switch, required=False)
    table.take("slowdown_percent", as_count_or_none, to="slowdown", required=False)
    table.finish()
    return TailRules(**table.values)


def check_slots(
    report: Report,
    tails: TailRules,
    tables: Mapping[str, Any],
    models: Sequence[ModelSpec],
    *,
    slurm: bool,
) -> None:
    """Whether second engines are where they can be used, and fit beside the first ones; ``tables``:
    the ``[[wpg]]`` tables by their key in the report."""
    two = {key: table for key, table in tables.items() if table.second_slot_bytes}
    if tails.co_resident and not two and not any(_has(report, key) for key in tables):
        report.bad(
            "tails.co_resident",
            "no WPG has memory for a second engine: write second_slot_bytes in a [[wpg]] table of "
            "pool rollout, or leave co_resident out",
        )
    for key, table in two.items():
        for at, sentence in _wrong(tails, table, models, slurm=slurm):
            if not report.told(f"{key}.{at}"):
                report.bad(f"{key}.{at}", sentence)
                break


def _has(report: Report, key: str) -> bool:
    """Whether what is written of it is wrong already."""
    return report.told(f"{key}.second_slot_bytes")


def _wrong(
    tails: TailRules, table: Any, models: Sequence[ModelSpec], *, slurm: bool
) -> Iterator[tuple[str, str]]:
    slot = "second_slot_bytes"
    if not tails.co_resident:
        yield slot, "it has no effect without co_resident = true in [tails]: write that too"
    if table.pool != "rollout":
        yield slot, "only rollouts have tails: move it to a table of pool rollout"
    if table.shared:
        yield (
            slot,
            "a WPG that takes turns on its GPUs gives all their memory back, and has no second "
            "engine: leave second_slot_bytes or shared out",
        )
    first, second = table.options.get("device_bytes"), table.second_slot_bytes
    if first is None:
        yield (
            "options.device_bytes",
            "it is missing: with second_slot_bytes, say what the first engine may take",
        )
        return
    cache = 0
    if table.engine == "vllm":
        cache = table.options.get("kv_cache_bytes", KV_CACHE_BYTES) * table.gpus
    largest = max(models, key=lambda model: model.weights_bytes, default=None)
    if largest is not None and (needed := largest.weights_bytes + cache) > min(first, second):
        at, has = (slot, second) if second < needed else ("options.device_bytes", first)
        yield (
            at,
            f"an engine with model {largest.name} takes {in_words(needed)} (weights of "
            f"{in_words(largest.weights_bytes)}, keys and values of {in_words(cache)}), and this "
            f"is {in_words(has)}: raise it, or lower options.kv_cache_bytes",
        )
    total = table.gpu_bytes * table.gpus
    needed = first + second + table.residual_bytes
    if total and needed > total:
        yield (
            slot,
            f"two engines at once take {in_words(needed)} (options.device_bytes "
            f"{in_words(first)}, second_slot_bytes {in_words(second)}, residual_bytes "
            f"{in_words(table.residual_bytes)}), and the GPUs of the WPG have {in_words(total)}: "
            f"lower one of them, or leave second_slot_bytes out",
        )
    elif not total and slurm:
        yield (
            "gpu_bytes",
            "it is missing: with second_slot_bytes, say how much memory one GPU has, so that both "
            "engines are known to fit",
        )


def _percent(value: object) -> int:
    """A whole number from 0 to 100."""
    if as_count_or_none(value) > 100:
        raise ValueError(f"{value!r} is more than 100 percent")
    return as_count_or_none(value)

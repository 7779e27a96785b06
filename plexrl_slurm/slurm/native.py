"""Plain ``sbatch -p PARTITION``: the module of ``job_submit.lua``, and the mark that it leaves."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.slurm.directives import (
    parse_max_slowdown,
    parse_model,
    parse_priority,
    parse_qos,
    parse_seed,
)
from plexrl_slurm.slurm.templates import fill

#: An admin comment that begins so belongs to a job of a native submission.
MARK: Final = "plexrl:1:"


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePartition:
    """What ``job_submit.lua`` must know of one PlexRL partition."""

    #: PlexRL's name for it.
    name: str
    #: What users write after ``sbatch -p``; Slurm itself need not have such a partition.
    slurm_partition: str
    #: Slurm's partition where the jobs run; "": the one that the user named.
    controller_partition: str
    #: Names of the catalogue.
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """What the ``#PLEXRL`` lines of a marked job ask for."""

    partition: str
    models: tuple[str, ...] = ()
    seed: int | None = None
    priority: int | None = None
    max_slowdown: float | None = None
    qos: str | None = None


def submit_module(partitions: Sequence[NativePartition], *, trusted: Collection[int] = ()) -> str:
    """Text of ``plexrl.lua``; ``trusted`` users may release marked jobs of their own."""
    values = {"partitions": partitions, "trusted": sorted({0, *trusted})}
    return fill("plexrl.lua.j2", values)


def read_mark(admin_comment: str) -> Marked | None:
    """What the mark says; ``None`` without one; ``BadInput`` if it is damaged.

    Another comment of the site's may follow behind a space.
    """
    if not admin_comment.startswith(MARK):
        return None
    text = admin_comment.removeprefix(MARK).split(" ", 1)[0]
    partition, _, options = text.partition(":")
    models: list[str] = []
    single: dict[str, str] = {}
    try:
        for option in options.split(";") if options else ():
            name, equals, value = option.partition("=")
            if not equals:
                raise ValueError(f"{option!r} is not NAME=VALUE")
            if name == "model":
                models.append(parse_model(unquote(value, errors="strict")))
            elif name in ("seed", "priority", "max-slowdown", "qos") and name not in single:
                single[name] = unquote(value, errors="strict")
            else:
                raise ValueError(f"{name!r} is unknown, or given twice")
        if not partition:
            raise ValueError("it names no partition")
        return Marked(
            partition=unquote(partition, errors="strict"),
            models=tuple(models),
            seed=parse_seed(single["seed"]) if "seed" in single else None,
            priority=parse_priority(single["priority"]) if "priority" in single else None,
            max_slowdown=(
                parse_max_slowdown(single["max-slowdown"]) if "max-slowdown" in single else None
            ),
            qos=parse_qos(single["qos"]) if "qos" in single else None,
        )
    except ValueError as error:
        raise BadInput(
            f"admin comment {admin_comment[:200]!r} is not a mark of job_submit.lua ({error}): "
            f"run `plexrl admin install` again, and submit the job again"
        ) from None

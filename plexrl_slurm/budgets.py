"""Checks of the tiers: budgets that could never hold an image, folders of a wrong kind."""

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Protocol

from plexrl_slurm.core import zero
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.sizes import image_size, in_words
from plexrl_slurm.filesystems import network_kind
from plexrl_slurm.tomlcheck import Report

#: File systems whose files are in memory.
_IN_MEMORY: Final = ("tmpfs", "ramfs")
#: File systems that take no files of anybody.
_OF_THE_KERNEL: Final = ("proc", "sysfs", "cgroup", "cgroup2", "debugfs", "devpts")

#: GPUs and engine options of a ``[[wpg]]`` table.
Gang = tuple[int, Mapping[str, Any]]


class _Table(Protocol):
    """What is asked of a ``[[wpg]]`` table."""

    @property
    def nodes(self) -> int: ...
    @property
    def options(self) -> Mapping[str, Any]: ...


def on_gangs(model: ModelSpec, gangs: Iterable[Gang]) -> ModelSpec:
    """``model`` with the size of its images on these WPGs; where that differs, the largest."""
    sizes = []
    for gpus, options in gangs:
        with suppress(BadInput):  # told of already
            size = image_size(
                model.parameters, dtype=model.dtype, layout=zero.layout_of(options), ranks=gpus
            )
            sizes.append(size.total)
    return replace(model, image_bytes=max(sizes, default=0))


def share_of(model: ModelSpec, gangs: Iterable[tuple[Gang, int]]) -> int:
    """The most that one node has of an image, on WPGs that each lie on so many nodes."""
    shares = [
        -(-size // nodes) for gang, nodes in gangs if (size := on_gangs(model, [gang]).image_bytes)
    ]
    return max(shares, default=model.train_bytes)


def check_budgets(
    report: Report,
    values: Mapping[str, Any],
    models: Sequence[tuple[str, ModelSpec]],
    *,
    gangs: Sequence[tuple[Gang, int]] = (),
) -> None:
    """Every model has to fit into the host tier, and into what is below it if there is that.

    A switch needs two images in memory: one goes out while the other comes in. ``gangs``: the
    training WPGs, and on how many nodes each lies, which have equal shares of an image.
    """
    host, nvme = values.get("host_bytes"), values.get("nvme_bytes")
    for key, model in models:
        image = share_of(model, gangs)
        each = f"{image / model.parameters:g} bytes a parameter"
        if image < model.train_bytes:
            each += " on each of its nodes"
        needed = 2 * image + model.weights_bytes
        if host is not None and needed > host:
            report.bad(
                key,
                f"model {model.name} needs {in_words(needed)} of the host tier (two training "
                f"images of {in_words(image)}, {each}, because one goes out while the other comes "
                f"in, and a snapshot of {in_words(model.weights_bytes)}) and "
                f"partition.host_bytes is {in_words(host)}: raise host_bytes or take the model out",
            )
        if values.get("nvme_dir") is not None and nvme is not None and image > nvme:
            report.bad(
                "partition.nvme_bytes",
                f"a training image of model {model.name} has {in_words(image)} ({each}) and "
                f"nvme_bytes is {in_words(nvme)}: raise nvme_bytes, or leave nvme_dir and "
                f"nvme_bytes out",
            )


def check_nvme(
    report: Report, values: Mapping[str, Any], *, here: bool, durable: bool = False
) -> None:
    """What must hold of ``nvme_dir`` and ``nvme_bytes``.

    ``here``: the WPGs run on this machine. Otherwise what this one lacks, others may have.
    ``durable``: there are durable images.
    """
    folder, size = values.get("nvme_dir"), values.get("nvme_bytes")
    given = [name for name in ("nvme_dir", "nvme_bytes") if report.has(f"partition.{name}")]
    if len(given) == 1:
        other = "nvme_bytes" if given == ["nvme_dir"] else "nvme_dir"
        report.bad(
            f"partition.{given[0]}",
            f"it has no effect without partition.{other}: write both, or neither",
        )
    if folder is None:
        if report.has("partition.scrub_days") and not given and not durable:
            report.bad(
                "partition.scrub_days",
                "it has no effect without partition.nvme_dir or hold.durable_every: leave it out",
            )
        return
    if wrong := _misplaced(values, folder):
        report.bad("partition.nvme_dir", wrong)
        return
    if kind := network_kind(folder):
        report.bad(
            "partition.nvme_dir",
            f"{folder} is on {kind}, which is not a disk of the node: choose a folder on a local "
            f"file system, or leave nvme_dir and nvme_bytes out",
        )
        return
    if not folder.parent.is_dir() and not folder.is_dir():
        _tell(
            report,
            "partition.nvme_dir",
            f"there is no folder {folder.parent}: mount the disk there, or choose another path",
            here=here,
        )
        return
    place = folder if folder.is_dir() else folder.parent
    wrong = not_writable(place)
    if wrong:
        _tell(report, "partition.nvme_dir", wrong, here=here)
        return
    if kind := _no_place(place):
        _tell(report, "partition.nvme_dir", kind, here=here)
        return
    if file_system(place) in _IN_MEMORY:
        report.warnings.append(
            f"partition.nvme_dir: {folder} is in memory itself ({file_system(place)}), so that "
            f"nothing is gained: choose a folder on a disk, or raise host_bytes instead"
        )
    room = os.statvfs(place)
    _check_room(
        report,
        "nvme",
        size or 0,
        place,
        total=room.f_blocks * room.f_frsize,
        free=room.f_bavail * room.f_frsize,
        here=here,
    )


def _misplaced(values: Mapping[str, Any], folder: Path) -> str:
    """Why ``nvme_dir`` cannot be where it is, beside the other folders; "": it can."""
    if folder.exists() and not folder.is_dir():
        return f"{folder} is a file: name a folder on a disk of the node"
    # Agents own it, and delete it with the hold.
    home = folder / values.get("partition", "")
    for key in ("host_dir", "state_dir"):
        other = values.get(key)
        if other is not None and (folder.is_relative_to(other) or other.is_relative_to(home)):
            return (
                f"{folder} and {key} ({other}) lie in one another, and each tier needs a folder "
                f"of its own: choose another path"
            )
    return ""


def check_host(report: Report, values: Mapping[str, Any], *, here: bool) -> None:
    """What must hold of ``host_dir`` and the file system that it is on."""
    folder = values.get("host_dir")
    if folder is None:
        return
    place = folder if folder.is_dir() else folder.parent
    if not place.is_dir():
        return
    if wrong := _no_place(place):
        _tell(report, "partition.host_dir", wrong, here=here)
        return
    in_memory = file_system(place) in _IN_MEMORY
    if not in_memory:
        report.warnings.append(
            f"partition.host_dir: {folder} is not on a tmpfs, so every switch goes through "
            f"a disk's file system: choose a folder below /dev/shm"
        )
    room = os.statvfs(place)
    _check_room(
        report,
        "host",
        values.get("host_bytes", 0),
        place,
        total=room.f_blocks * room.f_frsize,
        free=room.f_bavail * room.f_frsize,
        here=here,
    )


def not_writable(folder: Path) -> str:
    """Why nobody, or not this user, may make files in ``folder``; "": one may."""
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a file system that is mounted read-only: choose another path"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"you may not write in {folder}: choose another path, or change its mode"
    return ""


def _no_place(place: Path) -> str:
    """Why there can be no files in ``place`` at all; "": there can."""
    kind = file_system(place)
    if kind not in _OF_THE_KERNEL:
        return ""
    return f"{place} is on {kind}, where the kernel shows its own state: choose another path"


def file_system(place: Path) -> str:
    """Its type, as ``/proc/mounts`` says it."""
    best, kind = "", ""
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, what, *_ = line.split()
        inside = place == Path(mount) or Path(mount) in place.parents
        if inside and len(mount) >= len(best):
            best, kind = mount, what
    return kind


def _check_room(
    report: Report, tier: str, size: int, place: Path, *, total: int, free: int, here: bool
) -> None:
    key = f"partition.{tier}_bytes"
    if size > total > 0:
        _tell(
            report,
            key,
            f"{in_words(size)} are more than the whole file system at {place}, which has "
            f"{in_words(total)}: lower {tier}_bytes, or make that larger",
            here=here,
        )
    elif size > free:
        report.warnings.append(
            f"{key}: {in_words(size)} are more than the {in_words(free)} free at {place}: "
            f"lower it, or free space there"
        )


def _tell(report: Report, key: str, sentence: str, *, here: bool) -> None:
    if here:
        report.bad(key, sentence)
    else:
        report.warnings.append(f"{key}: on this host, {sentence}")


def check_swap(
    report: Report,
    values: Mapping[str, Any],
    models: Sequence[ModelSpec],
    wpgs: Sequence[_Table],
) -> None:
    """What ``offload_optimizer = "nvme"`` needs."""
    if not any(wpg.options.get("offload_optimizer") == "nvme" for wpg in wpgs):
        return
    if not report.has("partition.nvme_dir"):
        report.bad(
            "wpg",
            "offload_optimizer = 'nvme' keeps master weights and moments on a disk of the node: "
            "write nvme_dir and nvme_bytes in [partition], or offload_optimizer = 'cpu'",
        )
    if any(w.options.get("offload_optimizer") == "nvme" and w.nodes > 1 for w in wpgs):
        report.bad(
            "wpg",
            "offload_optimizer = 'nvme' needs a WPG on one node, because a swap folder comes back "
            "from the durable tier for all ranks at once: write nodes = 1, or 'cpu'",
        )
    size = values.get("nvme_bytes")
    for model in models:
        needed = (zero.SWAP_VERSIONS * zero.SWAPPED_BYTES + zero.GRADIENT_BYTES) * model.parameters
        if size is not None and needed > size:
            report.bad(
                "partition.nvme_bytes",
                f"with offload_optimizer = 'nvme' one deployment of model {model.name} takes up "
                f"to {in_words(needed)} there ({zero.SWAP_VERSIONS} versions of its state, "
                f"gradients) and nvme_bytes is {in_words(size)}: raise nvme_bytes, or write 'cpu'",
            )

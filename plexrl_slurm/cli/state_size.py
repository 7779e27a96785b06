"""``plexrl state size``: what a model's training images take, and how many fit into a node."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import click

from plexrl_slurm.cli import daemon, show
from plexrl_slurm.cli.app import App, note, shared
from plexrl_slurm.core.errors import BadConfig, BadInput
from plexrl_slurm.core.sizes import (
    WIDTHS,
    ImageSize,
    deployments_that_fit,
    image_size,
    switch_seconds,
)
from plexrl_slurm.core.zero import STAGES, ZeroLayout, layout_of
from plexrl_slurm.settings import Settings, check
from plexrl_slurm.tomlcheck import as_bytes

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([KMBT]?)")
_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
#: PCIe 5 x16 from pinned memory, for each GPU; one direction.
LINK: Final = 50_000_000_000
#: Four NVMe disks, for each node; reading or writing.
DISKS: Final = 20_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where images of a model would lie."""

    layout: ZeroLayout
    gpus: int
    #: That the GPUs of one WPG are on.
    nodes: int
    #: Of each node.
    host_bytes: int
    nvme_bytes: int
    #: Between host and device, for each GPU and direction, in a second.
    link: int = LINK
    #: Of each node's disks.
    disks: int = DISKS


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What one model takes at its place."""

    name: str
    parameters: int
    dtype: str
    place: Place
    image: ImageSize

    @classmethod
    def of(cls, name: str, parameters: int, dtype: str, place: Place) -> Self:
        """By its number of parameters."""
        image = image_size(parameters, dtype=dtype, layout=place.layout, ranks=place.gpus)
        return cls(name=name, parameters=parameters, dtype=dtype, place=place, image=image)

    @property
    def snapshot(self) -> int:
        """Bytes of the sampling weights."""
        return self.parameters * WIDTHS[self.dtype]

    @property
    def per_gpu(self) -> int:
        """Of an image."""
        return self.image.share(1)

    @property
    def per_node(self) -> int:
        """Of an image."""
        return self.image.share(self.place.gpus // self.place.nodes)

    def fit(self, host_bytes: int, nvme_bytes: int = 0) -> int:
        """Deployments on nodes of this size."""
        return deployments_that_fit(
            image=self.per_node,
            snapshot=self.snapshot,
            host_bytes=host_bytes,
            nvme_bytes=nvme_bytes,
        )

    def row(self) -> dict[str, Any]:
        """Everything, for ``--json``."""
        place, image = self.place, self.image
        return {
            "model": self.name,
            "parameters": self.parameters,
            "dtype": self.dtype,
            "layout": place.layout.name,
            "gpus": place.gpus,
            "nodes": place.nodes,
            "bytes_per_parameter": image.total / self.parameters,
            "image_bytes": image.total,
            "weights_bytes": image.weights,
            "masters_bytes": image.masters,
            "moments_bytes": image.moments,
            "gradients_bytes": image.gradients,
            "image_bytes_per_gpu": self.per_gpu,
            "image_bytes_per_node": self.per_node,
            "snapshot_bytes": self.snapshot,
            "host_bytes": place.host_bytes or None,
            "nvme_bytes": place.nvme_bytes or None,
            "deployments": (
                self.fit(place.host_bytes, place.nvme_bytes) if place.host_bytes else None
            ),
            "switch_seconds": self.switch_s(),
            "nvme_switch_seconds": self.nvme_switch_s(),
        }

    def switch_s(self) -> float:
        """Between host and device, in and out at once."""
        return switch_seconds(self.per_gpu, bytes_per_second=self.place.link, both_ways=True)

    def nvme_switch_s(self) -> float:
        """More, if what comes in is on the disk, and what leaves memory for it is not yet."""
        return switch_seconds(self.per_node, bytes_per_second=self.place.disks, both_ways=False)


@click.command("size")
@click.argument("models", metavar="MODEL...", nargs=-1, required=True)
@click.option("--dtype", type=click.Choice(sorted(WIDTHS)), help="Of the weights on devices.")
@click.option("--zero-stage", type=click.IntRange(min(STAGES), max(STAGES)))
@click.option("--gpus", type=click.IntRange(1), help="GPUs of a training WPG.")
@click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Of a WPG.")
@click.option("--host", metavar="SIZE", help="host_bytes of each node, such as 1.2TB.")
@click.option("--nvme", metavar="SIZE", help="nvme_bytes of each node.")
@click.option(
    "--link", metavar="SIZE", default="50GB", show_default=True,
    help="A second, between host and each GPU, one direction.",
)  # fmt: skip
@click.option(
    "--disks", metavar="SIZE", default="20GB", show_default=True,
    help="A second, of each node's disks.",
)  # fmt: skip
@shared
@click.pass_obj
def size(
    app: App,
    models: Sequence[str],
    dtype: str | None,
    zero_stage: int | None,
    gpus: int | None,
    nodes: int,
    host: str | None,
    nvme: str | None,
    link: str,
    disks: str,
) -> None:
    """Say how large the images of MODEL are, and how many of its deployments fit.

    MODEL is a name in the partition's catalogue, a model folder, or a number of parameters such
    as 7B. Where there are settings, they say what is not given here.
    """
    settings = _settings(app)
    place = _place(
        settings,
        zero_stage=zero_stage,
        gpus=gpus,
        nodes=nodes,
        host=_bytes("host", host),
        nvme=_bytes("nvme", nvme),
        link=_bytes("link", link) or LINK,
        disks=_bytes("disks", disks) or DISKS,
    )
    found = [Size.of(name, *_facts(name, dtype, settings), place) for name in models]
    rows = [each.row() for each in found]
    app.answer(rows[0] if len(rows) == 1 else {"models": rows}, lambda: _text(found))


def _settings(app: App) -> Settings | None:
    """What is configured, if anything is."""
    named = app.config is not None or app.partition is not None
    try:
        path = daemon.settings_file(app)
    except BadConfig:
        if named:
            raise
        return None
    found = check(path)
    if found.settings is None:
        if named:
            raise BadConfig(str(path), found.problems)
        note(f"{path} has mistakes and is not used: `plexrl partition check` names them")
    return found.settings


def _place(
    settings: Settings | None,
    *,
    zero_stage: int | None,
    gpus: int | None,
    nodes: int,
    host: int | None,
    nvme: int | None,
    link: int,
    disks: int,
) -> Place:
    tables = [] if settings is None else [w for w in settings.wpgs if w.pool == "train"]
    options = dict(tables[0].options) if tables else {}
    if zero_stage is not None:
        options["zero_stage"] = zero_stage
        if zero_stage != 3:
            options.pop("offload_param", None)
    wanted = gpus or (tables[0].gpus if tables else 1)
    if wanted % nodes:
        raise BadInput(f"{wanted} GPUs cannot be shared out to {nodes} nodes evenly")
    here = (settings.host_bytes, settings.nvme_bytes) if settings is not None else (0, 0)
    return Place(
        layout=layout_of(options),
        gpus=wanted,
        nodes=nodes,
        host_bytes=host or here[0],
        nvme_bytes=nvme or here[1],
        link=link,
        disks=disks,
    )


def _facts(name: str, dtype: str | None, settings: Settings | None) -> tuple[int, str]:
    """Parameters and dtype."""
    if settings is not None and name in settings.models:
        model = settings.models[name]
        return model.parameters, dtype or model.dtype
    number = _COUNT.fullmatch(name.upper())
    if number is not None and float(number[1]) * _UNITS[number[2]] >= 1:
        return round(float(number[1]) * _UNITS[number[2]]), dtype or "bfloat16"
    if not Path(name).is_dir():
        known = f" ({', '.join(settings.models)})" if settings is not None else ""
        raise BadInput(
            f"{name} is no model of the catalogue{known}, no folder and no number of parameters: "
            f"write a name, a path, or a number such as 7B"
        )
    from plexrl_slurm.model_folder import read_model_folder

    found = read_model_folder(Path(name), dtype=dtype)
    return found.parameters, found.dtype


def _bytes(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        return as_bytes(int(text) if text.isdigit() else text)
    except ValueError as error:
        raise BadInput(f"--{name}: {error}") from None


def _text(found: Sequence[Size]) -> str:
    heads = ("MODEL", "LAYOUT", "B/PARAM", "IMAGE", "GPU", "NODE", "SNAPSHOT", "FIT", "SWITCH")
    rows = [
        [
            each.name,
            f"{each.place.layout.name} x {each.place.gpus}",
            f"{each.image.total / each.parameters:g}",
            *(show.gib(n) for n in (each.image.total, each.per_gpu, each.per_node, each.snapshot)),
            each.fit(each.place.host_bytes, each.place.nvme_bytes)
            if each.place.host_bytes
            else "-",
            f"{each.switch_s():.2f} s",
            f"{each.nvme_switch_s():.2f} s",
        ]
        for each in found
    ]
    return show.fitted((*heads, "NVME"), rows)

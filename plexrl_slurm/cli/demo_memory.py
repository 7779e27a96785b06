"""The demo's host memory: ample, or so small that most jobs' images wait on a disk."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.sizes import WIDTHS, image_size
from plexrl_slurm.core.zero import ZeroLayout
from plexrl_slurm.model_folder import read_model_folder

#: One comes in while another goes out.
FEWEST_IMAGES: Final = 2
#: For the headers of slabs.
_SLACK: Final = 1 << 20
_MOVE = re.compile(r"host_room image_(?P<what>left_memory|came_back) .*$", re.MULTILINE)
_BYTES = re.compile(r" bytes=(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Of images between host memory and the disk below it."""

    #: Left memory: written to the disk just then, or before, while nothing else moved.
    out: int = 0
    #: Read back from the disk.
    back: int = 0
    back_bytes: int = 0

    def __sub__(self, before: "Moves") -> "Moves":
        return Moves(
            out=self.out - before.out,
            back=self.back - before.back,
            back_bytes=self.back_bytes - before.back_bytes,
        )

    def row(self) -> dict[str, int]:
        """As the report has it."""
        return {"out": self.out, "back": self.back, "back_bytes": self.back_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes of each tier."""

    #: Images that fit into memory.
    images: int
    image_bytes: int
    host_bytes: int
    nvme_bytes: int

    @classmethod
    def small(cls, jobs: int, model: Path) -> Self:
        """Memory for a quarter of the jobs' images, and a disk for the rest."""
        images = max(FEWEST_IMAGES, jobs // 4)
        found = read_model_folder(model)
        snapshot = found.parameters * WIDTHS[found.dtype]
        image = image_size(found.parameters, dtype=found.dtype, layout=ZeroLayout(), ranks=1).total
        return cls(
            images=images,
            image_bytes=image,
            # Sampling weights, one of each job, lie in memory as well.
            host_bytes=images * image + jobs * snapshot + _SLACK,
            # A deployment may have an older copy there while a newer one is written.
            nvme_bytes=(jobs + images) * image,
        )

    def toml(self, folder: Path) -> str:
        """The keys of ``[partition]``."""
        return (
            f'host_bytes = {self.host_bytes}\nnvme_dir = "{folder / "nvme"}"\n'
            f"nvme_bytes = {self.nvme_bytes}"
        )

    def row(self) -> dict[str, int]:
        """As the report has it."""
        return {
            "images": self.images,
            "image_bytes": self.image_bytes,
            "host_bytes": self.host_bytes,
            "nvme_bytes": self.nvme_bytes,
        }


def moves(state_dir: Path) -> Moves:
    """All until now, from what the agents wrote into their logs."""
    found = Moves()
    for path in sorted(state_dir.glob("holds/*.log")):
        found = _more(found, path.read_text(encoding="utf-8", errors="replace"))
    return found


def _more(found: Moves, text: str) -> Moves:
    out = back = size = 0
    for match in _MOVE.finditer(text):
        if match["what"] == "left_memory":
            out += 1
        else:
            back += 1
            told = _BYTES.search(match[0])
            size += int(told[1]) if told else 0
    return Moves(out=found.out + out, back=found.back + back, back_bytes=found.back_bytes + size)


def refuse_few(jobs: int) -> None:
    """Raise ``BadInput`` if a small memory would hold the images of so many."""
    if jobs <= FEWEST_IMAGES:
        raise BadInput(
            f"--host-memory small needs more jobs than {FEWEST_IMAGES}, whose images always fit "
            f"(one comes in while another goes out): write --jobs {FEWEST_IMAGES + 1} or more"
        )


def sentences(report: Mapping[str, Any]) -> list[str]:
    """What a small memory brought about, a line for each run that shared."""
    budget = report.get("host_memory")
    if budget is None:
        return []
    return [
        f"host memory: {budget['host_bytes'] / 2**20:.1f} MiB, for {budget['images']} of "
        f"{len(report['jobs'])} images of {budget['image_bytes'] / 2**20:.1f} MiB and the "
        f"sampling weights; the others were on the disk",
        *(
            f"{name}: {row['nvme']['out']} times an image left host memory, {row['nvme']['back']} "
            f"times one came back ({row['nvme']['back_bytes'] / 2**20:.1f} MiB)"
            for name, row in report["rows"].items()
        ),
    ]

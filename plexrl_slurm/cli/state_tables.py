"""The sizing tables of docs/state.md: ``python -m plexrl_slurm.cli.state_tables`` prints them."""

import sys
from collections.abc import Sequence
from typing import Final

from plexrl_slurm.cli.state_size import DISKS, LINK, Place, Size
from plexrl_slurm.core.sizes import image_size
from plexrl_slurm.core.zero import STAGES, ZeroLayout

#: Models, the GPUs of a WPG that trains them, and the nodes with 8 GPUs that those are on.
MODELS: Final = (
    ("1.5B", 1_500_000_000, 1, 1),
    ("7B", 7_000_000_000, 8, 1),
    ("14B", 14_000_000_000, 8, 1),
    ("32B", 32_000_000_000, 8, 1),
    ("72B", 72_000_000_000, 16, 2),
    ("235B", 235_000_000_000, 64, 8),
)
#: Memory of a node: what its host tier may have of it, the rest being the engines' own.
NODES: Final = (("1.5 TB", 1_200_000_000_000), ("2 TB", 1_600_000_000_000))
#: Of a node's disks, for images.
NVME: Final = 15_000_000_000_000
_GB: Final = 10**9
_RANKS: Final = (1, 2, 8, 16)


def per_parameter() -> str:
    """Bytes of an image for each parameter, by ZeRO stage and ranks."""
    rows = [["ZeRO stage", *(f"{ranks} GPU" + "s" * (ranks > 1) for ranks in _RANKS)]]
    for stage in STAGES:
        sizes = [
            image_size(1, dtype="bfloat16", layout=ZeroLayout(stage=stage), ranks=ranks).total
            for ranks in _RANKS
        ]
        rows.append([str(stage), *map(str, sizes)])
    return _markdown(rows)


def per_model() -> str:
    """What a job of each model takes, and how many fit into a node, at ZeRO-3 in bfloat16."""
    heads = ["model", "GPUs, nodes", "image (GB)", "of each GPU", "of each node", "snapshot"]
    for name, _ in NODES:
        heads += [f"fit {name}", "and NVMe"]
    rows = [[*heads, "switch (s)", "and NVMe (s)"]]
    for name, parameters, gpus, nodes in MODELS:
        place = Place(
            layout=ZeroLayout(stage=3), gpus=gpus, nodes=nodes, host_bytes=0, nvme_bytes=0
        )
        size = Size.of(name, parameters, "bfloat16", place)
        row = [name, f"{gpus}, {nodes}"]
        row += [
            f"{n / _GB:,.0f}"
            for n in (size.image.total, size.per_gpu, size.per_node, size.snapshot)
        ]
        for _, host in NODES:
            row += [str(size.fit(host)), str(size.fit(host, NVME))]
        rows.append([*row, f"{size.switch_s():.2f}", f"{size.nvme_switch_s():.0f}"])
    return _markdown(rows)


def tables() -> str:
    """Both, with the assumptions between them."""
    hosts = " and ".join(f"{host / 1e12:g} TB of {name}" for name, host in NODES)
    return "\n".join(
        (
            per_parameter(),
            "",
            f"Nodes of 8 GPUs; `host_bytes` is {hosts}, `nvme_bytes` {NVME / 1e12:g} TB; PCIe "
            f"moves {LINK / _GB:g} GB/s for each GPU and direction, the disks of a node "
            f"{DISKS / _GB:g} GB/s.",
            "",
            per_model(),
        )
    )


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    sys.stdout.write(tables() + "\n")

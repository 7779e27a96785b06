"""What an agent says of its tiers."""

from collections.abc import Mapping, Sequence

from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.memory.images import ImageStore
from plexrl_slurm.transport import messages as tm


def of(
    stores: Mapping[str, ImageStore],
    nvme: NvmeTier | None,
    *,
    used_us: Mapping[tuple[str, str], int],
    trouble: str,
    faults: Sequence[tm.ImageFault],
) -> tm.Stock:
    """``used_us``: when each image was last switched in or written; the rest as in ``Stock``."""
    found = [
        tm.StockImage(
            wpg=wpg,
            deployment=held.deployment,
            tier="host",
            progress=held.progress,
            bytes=held.bytes,
            last_use_us=used_us.get((wpg, held.deployment), 0),
        )
        for wpg, store in stores.items()
        for held in [*store.held(), *store.under()]
    ]
    found += [
        tm.StockImage(
            wpg=copy.wpg,
            deployment=copy.deployment,
            tier="nvme",
            progress=copy.progress,
            bytes=copy.bytes,
            last_use_us=used_us.get((copy.wpg, copy.deployment), 0),
        )
        for copy in (nvme.copies() if nvme is not None else ())
    ]
    return tm.Stock(
        images=found,
        nvme_used=nvme.used if nvme is not None else 0,
        nvme_limit=nvme.limit if nvme is not None else None,
        trouble=trouble,
        faults=list(faults),
    )

"""Names of placements, as configurations and ``plexrl sim`` have them."""

from collections.abc import Mapping
from typing import Final

from plexrl_slurm.core.grouping import Placement

#: By name: how groups are filled, and whether a later job may go before one that does not fit.
PLACEMENTS: Final[Mapping[str, tuple[Placement, bool]]] = {
    "isolated": (Placement.ISOLATED, False),
    "isolated_backfill": (Placement.ISOLATED, True),
    "pack": (Placement.PACK, False),
    "spread": (Placement.SPREAD, False),
    "spread_backfill": (Placement.SPREAD, True),
    "fit": (Placement.FIT, True),
}

"""Python's search for garbage in a process that lives for months."""

import gc
from typing import Final

#: Objects that are made before anybody looks for garbage among them; Python's own is 700. They
#: are looked at in some ms.
YOUNG: Final = 10_000


def keep_what_is_there() -> None:
    """Never again look for garbage among what is there now: modules, routes, the jobs that were
    read. In all of it a look takes longer than ten placements, in the middle of one."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, *gc.get_threshold()[1:])

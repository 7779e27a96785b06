"""Which WPGs need no spare slab: those whose images are written over themselves.

An image may be written over the older one of its deployment when a durable image, and the calls
since, could take that one's place. If all images of a WPG are of that kind, what is free beside
them is given back.
"""

import logging
from collections.abc import Container, Mapping

from plexrl_slurm.logs import say
from plexrl_slurm.memory.images import ImageStore

log = logging.getLogger(__name__)


def trim(stores: Mapping[str, ImageStore], *, durable: Container[str]) -> None:
    """Give back free slabs of WPGs on one node; ``durable``: deployments with a durable image."""
    for wpg, store in stores.items():
        held = [each.deployment for each in store.held()]
        if not store.whole_here or not held or not all(name in durable for name in held):
            continue
        if freed := store.trim():
            say(log, "spare_given_back", wpg=wpg, bytes=freed)

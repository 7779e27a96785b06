"""Names of weights by what they are: equal names are equal weights, whoever has them."""

import hashlib
from typing import Final

_BYTES: Final = 7


def of_base(model: str, fingerprint: str = "") -> int:
    """The weights of a model of the catalogue, which may be other ones one day."""
    return _number("base", model, fingerprint)


def of_files(*digests: str) -> int:
    """Weights that were read from files with these checksums."""
    return _number("files", *digests)


def of_step(unique: str) -> int:
    """Weights that an optimizer step made, and nobody else has."""
    return _number("step", unique)


def text(content: int) -> str:
    """As the scheduler and the database have it."""
    return f"weights {content:014x}"


def _number(*words: str) -> int:
    # Small enough for every integer on the way, and too large to meet twice.
    return int.from_bytes(hashlib.sha256("\0".join(words).encode()).digest()[:_BYTES], "big")

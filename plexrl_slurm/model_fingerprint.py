"""Whether a model's folder is what it was: its config, and its weights by samples.

Weights may take minutes to read, so of large ones 256 blocks are looked at, spread over all of
them: other weights differ everywhere. Dates and names of folders do not matter.
"""

import hashlib
from pathlib import Path
from typing import Final

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.model_folder import read_model_folder, weight_files

_BLOCK: Final = 1 << 20
#: Of all files.
_BLOCKS: Final = 256


def fingerprint(folder: Path) -> str:
    """Of its weights; "" if they cannot be read, so that nothing can be said of them."""
    digest = hashlib.sha256()
    try:
        files = weight_files(folder)
        for path in files:
            _sample(digest, path, blocks=max(2, _BLOCKS // len(files)))
    except (BadInput, OSError):
        return ""
    return digest.hexdigest()[:32]


def check_weights(model: ModelSpec, expected: str) -> None:
    """Raises ``BadInput`` if the weights are not those of the fingerprint; "" is of any."""
    if expected and fingerprint(Path(model.path)) != expected:
        raise BadInput(
            f"the weights of model {model.name} in {model.path} were changed since the deployment "
            f"was created: put the former ones back, or create it anew"
        )


def check_config(model: ModelSpec) -> None:
    """Raises ``BadInput`` if the folder is of another architecture than the catalogue says."""
    found = read_model_folder(Path(model.path), dtype=model.dtype).architecture
    if found != model.architecture:
        raise BadInput(
            f"config.json of model {model.name} in {model.path} was changed since the daemon read "
            f"it: put the former one back, or end the jobs that use it and restart the daemon"
        )


def _sample(digest: "hashlib._Hash", path: Path, *, blocks: int) -> None:
    size = path.stat().st_size
    digest.update(f"{size}\n".encode())
    with path.open("rb") as file:
        if size <= _BLOCK * blocks:
            digest.update(file.read())
            return
        last = size - _BLOCK
        for number in range(blocks):
            file.seek(last * number // (blocks - 1))
            digest.update(file.read(_BLOCK))

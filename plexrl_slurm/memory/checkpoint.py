"""Checkpoint folders of training state: one safetensors file per rank, and a manifest.

``manifest.json`` is written last, inside a folder that gets its name last, so a folder with
that name is a whole checkpoint. Engines fill in the tensors; this module knows the files.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Final

import msgspec

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.memory import claims
from plexrl_slurm.memory.files import part_name, publish_folder, saving_errors, write_bytes

MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1
#: Of folders that this process has begun to write.
_claims: dict[Path, str] = {}


class RankFile(msgspec.Struct, frozen=True):
    """One rank's share."""

    name: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True):
    """What a checkpoint folder holds."""

    uri: str
    architecture: str
    world: int
    #: ``float32`` or ``bfloat16``.
    dtype: str
    #: Optimizer steps taken.
    step: int
    files: tuple[RankFile, ...]
    format: int = _FORMAT
    #: Weights are shared out to the ranks too (ZeRO-3).
    sharded: bool = False
    #: Parameter groups, by names in DeepSpeed's order; empty: one, in the model's order.
    groups: tuple[tuple[str, ...], ...] = ()
    #: The folder is a Hugging Face model: it has no optimizer state, and fits any number of ranks.
    weights_only: bool = False

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


def encoded(manifest: Manifest) -> bytes:
    """What its file contains."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1)


def rank_file(rank: int) -> str:
    """Name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def begin(path: Path) -> Path:
    """The empty folder to write into; called by one rank, the others know its name."""
    part = part_name(path)
    with saving_errors(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _claims[part] = claims.claim(path)
        for left in path.parent.glob(f".{path.name}.*part"):  # whose claim is no more
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir()
    return part


def finish(path: Path, manifest: Manifest) -> None:
    """Publish the folder that all ranks have filled; called by one rank.

    Raises ``BadInput`` if somebody else has begun to write it since: another gang took over.
    """
    part = part_name(path)
    with saving_errors(part), claims.publishing(path, _claims.pop(part, "")) as mine:
        if not mine:
            raise BadInput(
                f"{manifest.uri} is being written, or was written, by another gang since this one "
                f"began: what this one has is dropped"
            )
        write_bytes(part / MANIFEST, encoded(manifest))
        publish_folder(part, path)


def abandon(path: Path) -> None:
    """Leave nothing behind of a checkpoint that could not be written."""
    part = part_name(path)
    shutil.rmtree(part, ignore_errors=True)
    if (token := _claims.pop(part, None)) is not None:
        claims.give_up(path, token)


def read_manifest(path: Path, uri: str) -> Manifest:
    """The manifest of the checkpoint at ``path``; raises ``BadInput`` if it is none."""
    try:
        manifest = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise BadInput(
            f"{uri}: there is no checkpoint of training state here; save_state makes one"
        ) from None
    except msgspec.DecodeError as error:
        raise BadInput(f"{uri}: its manifest cannot be read ({error})") from error
    if manifest.format != _FORMAT:
        raise BadInput(f"{uri} has format {manifest.format}; this release reads {_FORMAT}")
    return manifest


def check_file(path: Path, file: RankFile, uri: str) -> None:
    """Compare a rank's file with the manifest; raises ``BadInput``."""
    where = path / file.name
    try:
        with where.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        raise BadInput(f"{uri}: its file {file.name} is missing; load another checkpoint") from None
    if found != file.sha256:
        raise BadInput(f"{uri}: its file {file.name} is damaged; load another checkpoint")

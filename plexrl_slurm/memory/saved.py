"""Saved state as files: is it whole, and what of it makes a model folder."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import BadInput, NotFound
from plexrl_slurm.memory import checkpoint
from plexrl_slurm.memory.checkpoint import MANIFEST, Manifest

#: Most that is read at once for somebody else.
LONGEST_PIECE: Final = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a look at one file found."""

    file: str
    #: ``fine``, ``damaged``, ``missing`` or ``unchecked``.
    state: str
    bytes: int
    #: For a person; "" if it is fine.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """One file of an exported model folder."""

    name: str
    path: Path
    bytes: int
    #: Another file under the same name has another one.
    version: str
    #: As its manifest has it; "" if none does.
    sha256: str


def manifest_of(folder: Path, uri: str) -> Manifest | None:
    """The manifest; ``None`` if there is none that can be read."""
    try:
        return checkpoint.read_manifest(folder, uri)
    except (BadInput, OSError):
        return None


def verify(folder: Path, uri: str) -> list[Verdict]:
    """Read every file of a checkpoint or of sampler weights and compare it with the manifest."""
    if not folder.is_dir():
        return [Verdict(file="", state="missing", bytes=0, reason="its folder is not there")]
    if not (folder / MANIFEST).exists():
        reason = f"it has no {MANIFEST}: what saved it wrote no checksums"
        return [
            Verdict(file=path.name, state="unchecked", bytes=path.stat().st_size, reason=reason)
            for path in sorted(folder.iterdir())
            if path.is_file()
        ] or [Verdict(file="", state="missing", bytes=0, reason="its folder is empty")]
    try:
        manifest = checkpoint.read_manifest(folder, uri)
    except (BadInput, OSError) as error:
        return [Verdict(file=MANIFEST, state="damaged", bytes=0, reason=str(error))]
    return [_compare(folder / file.name, file) for file in manifest.files]


def _compare(path: Path, file: checkpoint.RankFile) -> Verdict:
    try:
        size = path.stat().st_size
        if size != file.bytes:
            reason = f"it has {size} bytes where the manifest says {file.bytes}"
            return Verdict(file=file.name, state="damaged", bytes=size, reason=reason)
        with path.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except FileNotFoundError:
        return Verdict(file=file.name, state="missing", bytes=0, reason="it is not there")
    except OSError as error:
        reason = f"it cannot be read ({error.strerror})"
        return Verdict(file=file.name, state="damaged", bytes=0, reason=reason)
    fine = found == file.sha256
    reason = "" if fine else "its checksum is not that of the manifest"
    return Verdict(file=file.name, state="fine" if fine else "damaged", bytes=size, reason=reason)


def model_files(folder: Path, catalogue: Path | None, uri: str) -> list[ModelFile]:
    """The files that make ``folder``, named sampler weights, a Hugging Face model folder.

    Config and tokenizer come from the model's ``catalogue`` folder where the weights have none.
    """
    manifest = manifest_of(folder, uri)
    sums = {file.name: file.sha256 for file in manifest.files} if manifest is not None else {}
    paths = {path.name: path for path in _files(folder) if path.name != MANIFEST}
    if not any(name.endswith(".safetensors") for name in paths):
        raise NotFound("weights", uri)
    if catalogue is not None and "config.json" not in paths:
        for path in _files(catalogue):
            if not is_weights(path.name):
                paths.setdefault(path.name, path)
    found = []
    for name, path in sorted(paths.items()):
        size, version = _version(path)
        found.append(
            ModelFile(name=name, path=path, bytes=size, version=version, sha256=sums.get(name, ""))
        )
    return found


def read_piece(file: ModelFile, *, version: str, offset: int, length: int) -> bytes:
    """Some bytes of a file that must still be ``version``; raises ``BadInput``."""
    try:
        with file.path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(min(length, LONGEST_PIECE))
        now = _version(file.path)[1]
    except OSError as error:
        raise BadInput(f"{file.name} cannot be read ({error.strerror}): export it again") from error
    if now != version:
        raise BadInput(
            f"{file.name} was written anew while it was read: export it again, or another name"
        )
    return data


def is_weights(name: str) -> bool:
    """Whether a file of a model folder holds weights, or says in which files they are."""
    return name.endswith((".safetensors", ".bin", ".gguf", ".index.json", ".pt"))


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()] if folder.is_dir() else []


def _version(path: Path) -> tuple[int, str]:
    stat = path.stat()
    return stat.st_size, f"{stat.st_ino:x}-{stat.st_mtime_ns:x}-{stat.st_size:x}"

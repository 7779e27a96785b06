"""A durable image that several nodes write: each its ranks' files, one of them the manifest.

The folder has the form of ``memory.durable``, whoever wrote it, so a WPG of as many ranks reads it,
whatever nodes they are on.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from plexrl_slurm.core.errors import BadImage
from plexrl_slurm.memory import durable, manifests
from plexrl_slurm.memory.durable import Manifest, RankFile
from plexrl_slurm.memory.fence import NONE, Token
from plexrl_slurm.memory.files import sync_folder, write_bytes
from plexrl_slurm.memory.slab import read_header


class Share(msgspec.Struct, frozen=True):
    """What one node has written."""

    deployment: str
    progress: tuple[int, int]
    #: Ranks of the whole image.
    world: int
    #: By rank.
    files: dict[int, RankFile]


def write_share(folder: Path, slabs: Sequence[Path], *, name: str) -> bytes:
    """Copy this node's slabs beside those of the others; an encoded :class:`Share`.

    ``name`` is of this copy and of no other. Raises ``BadImage`` and ``StorageFull``.
    """
    headers = [read_header(slab) for slab in slabs]
    part = _part(folder, name)
    part.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        files = {
            header.rank: durable.write_rank(part, slab, header.rank)
            for header, slab in zip(headers, slabs, strict=True)
        }
        sync_folder(part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)  # what the others write is of no use any more
        raise
    share = Share(
        deployment=headers[0].deployment,
        progress=headers[0].progress,
        world=headers[0].world,
        files=files,
    )
    return msgspec.msgpack.encode(share)


def finish(folder: Path, shares: Sequence[bytes], *, name: str, order: Token = NONE) -> Manifest:
    """All nodes have written: the image is there from now on. Raises ``BadImage``, and ``Denied``
    if ``order`` is not the newest one."""
    found = [msgspec.msgpack.decode(share, type=Share) for share in shares]
    files = {rank: file for share in found for rank, file in share.files.items()}
    part, first = _part(folder, name), found[0]
    try:
        if sorted(files) != list(range(first.world)):
            raise BadImage(str(folder), f"lacks ranks: {len(files)} of {first.world} are there")
        if any((s.deployment, s.progress) != (first.deployment, first.progress) for s in found):
            raise BadImage(str(folder), "would be of several states")
        for file in files.values():
            if not (part / file.name).is_file():
                raise BadImage(str(part / file.name), "is not there: is state_dir on all nodes?")
        manifest = Manifest(
            deployment=first.deployment,
            progress=first.progress,
            files=tuple(files[rank] for rank in range(first.world)),
            order=order,
        )
        write_bytes(part / durable.MANIFEST, manifests.encoded(manifest))
        durable.publish(part, folder, order)
        return manifest
    finally:
        # Of a deployment there is one copy under way at most: all others are left over.
        for gone in folder.parent.glob(".*.part"):
            shutil.rmtree(gone, ignore_errors=True)


def _part(folder: Path, name: str) -> Path:
    return folder.with_name(f".{folder.name}.{name}.part")

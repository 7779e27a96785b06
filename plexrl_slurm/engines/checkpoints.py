"""What ranks do together beside DeepSpeed: agree, gather, and write or read files as one."""

import json
import shutil
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plexrl_slurm.core import content
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, PlexError
from plexrl_slurm.engines.reshard import Resharded
from plexrl_slurm.engines.skeleton import Skeleton, bytes_of, dtype_name, read_model
from plexrl_slurm.memory import checkpoint, contents
from plexrl_slurm.memory.checkpoint import Manifest, RankFile
from plexrl_slurm.memory.files import (
    NamedBuffer,
    part_name,
    saving_errors,
    write_tensors,
)
from plexrl_slurm.memory.refusals import READ, refusals

_Value = TypeVar("_Value")


class Gang:
    """The ranks of a WPG, seen from one of them."""

    def __init__(self, *, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def everyones(self, value: _Value) -> list[_Value]:
        """The value of every rank, in rank order."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(values, value)
        return values

    def all_agree(self, fine: bool) -> bool:
        """Whether it is fine on every rank."""
        if self.world == 1:
            return fine
        flag = torch.tensor([int(fine)])
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
        return bool(flag.item())

    def collect(self, values: list[NDArray[np.float32]]) -> None:
        """Give every rank all values; each came with zeros for what others have."""
        if self.world == 1:
            return
        flat = torch.from_numpy(np.concatenate([value.reshape(-1) for value in values]))
        torch.distributed.all_reduce(flat)
        at = 0
        for number, value in enumerate(values):
            values[number] = flat[at : at + value.size].numpy().reshape(value.shape)
            at += value.size

    def share_failure(self, error: PlexError | None) -> None:
        """Raise the first rank's error on all of them, if any has one."""
        for other in self.everyones(error):
            if other is not None:
                raise other


def _buffers(tensors: Iterable[tuple[str, Tensor]]) -> list[NamedBuffer]:
    return [
        NamedBuffer(
            name=name,
            dtype=dtype_name(tensor),
            shape=tuple(tensor.shape),
            data=bytes_of(tensor),
        )
        for name, tensor in tensors
    ]


def save(skeleton: Skeleton, model: ModelSpec, path: Path, uri: str, gang: Gang) -> int:
    """Write the resident's checkpoint folder; an open step's gradients are not part of it."""
    failure: PlexError | None = None
    mine: RankFile | None = None
    written: list[RankFile] = []
    manifest: Manifest | None = None
    try:
        if gang.rank == 0:
            checkpoint.begin(path)
    except PlexError as error:
        failure = error
    gang.share_failure(failure)
    if skeleton.swapped is not None:
        skeleton.swapped.check()
    state = {**skeleton.weights(), **skeleton.masters(), **skeleton.moments()}
    name = checkpoint.rank_file(gang.rank)
    try:
        with saving_errors(part_name(path)):
            file = write_tensors(
                part_name(path) / name, _buffers(state.items()), durable=True, checksum=True
            )
        mine = RankFile(name=name, bytes=file.bytes, sha256=file.sha256)
    except PlexError as error:
        failure = error
    written = [file for file in gang.everyones(mine) if file is not None]
    try:
        if gang.rank == 0 and len(written) == gang.world:
            manifest = Manifest(
                uri=uri,
                architecture=model.architecture,
                world=gang.world,
                dtype=model.dtype,
                step=skeleton.step,
                sharded=skeleton.layout.stage == 3,
                files=tuple(written),
                groups=tuple(tuple(name for name, _ in group) for group in skeleton.groups),
            )
            checkpoint.finish(path, manifest)
    except PlexError as error:
        failure = error
    if gang.rank == 0 and (failure is not None or len(written) < gang.world):
        checkpoint.abandon(path)
    gang.share_failure(failure)
    return sum(file.bytes for file in written)


def load(
    skeleton: Skeleton, model: ModelSpec, path: Path, uri: str, gang: Gang, *, optimizer: bool
) -> tuple[int, int]:
    """Read a checkpoint folder; an open step is closed. Nothing changes if it does not fit.

    Answers with the bytes read and with what the weights are. One of another number of ranks or
    ZeRO stage is dealt anew.
    """
    failure: PlexError | None = None
    try:
        with refusals(path, READ):
            manifest = checkpoint.read_manifest(path, uri)
        _check_model(manifest, model)
        if manifest.weights_only:
            _check_weights(manifest, model, path, gang, optimizer=optimizer)
    except PlexError as error:
        failure = error
    gang.share_failure(failure)
    if manifest.weights_only:
        try:
            with refusals(path, READ):
                base = read_model(replace(model, path=str(path)))
        except PlexError as error:
            failure = error
        gang.share_failure(failure)
        skeleton.reset(base)
        weights = content.of_files(*(file.sha256 for file in manifest.files))
        return manifest.bytes, weights
    try:
        with refusals(path, READ):
            for file in manifest.files[gang.rank :: gang.world]:
                checkpoint.check_file(path, file, uri)
    except PlexError as error:
        failure = error
    gang.share_failure(failure)

    def wanted() -> dict[str, Tensor]:
        return {
            **skeleton.weights(),
            **skeleton.masters(),
            **(skeleton.moments() if optimizer else {}),
        }

    with ExitStack() as opened:
        try:
            with refusals(path, READ):
                source = opened.enter_context(Resharded(path, manifest, skeleton.groups))
                source.plan(wanted(), gang.rank, gang.world, skeleton)
        except PlexError as error:
            failure = error
        except ValueError as error:
            failure = BadInput(
                f"{uri} was saved by {manifest.world} ranks at {_stage(manifest.sharded)} and this "
                f"WPG has {gang.world} at {_stage(skeleton.layout.stage == 3)}: it cannot be dealt "
                f"anew ({error}); load it on a WPG of {manifest.world} ranks at "
                f"{_stage(manifest.sharded)}"
            )
        gang.share_failure(failure)
        with skeleton.rewritten():
            tensors = wanted()
            source.fill(tensors)
            if not optimizer:
                skeleton.reset_moments()
    skeleton.refresh()
    skeleton.close_step()
    skeleton.set_counters({**skeleton.counters(), "step": manifest.step if optimizer else 0})
    read = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return read, content.of_files(*(file.sha256 for file in manifest.files))


def _check_weights(
    manifest: Manifest, model: ModelSpec, path: Path, gang: Gang, *, optimizer: bool
) -> None:
    """Of weights that came from outside; one rank reads them for all."""
    if optimizer:
        raise BadInput(
            f"{manifest.uri} was imported and has no optimizer state: load it without the optimizer"
        )
    if gang.rank == 0:
        with refusals(path, READ):
            for file in manifest.files:
                checkpoint.check_file(path, file, manifest.uri)


def _check_model(manifest: Manifest, model: ModelSpec) -> None:
    if manifest.architecture != model.architecture:
        raise BadInput(
            f"{manifest.uri} is of architecture {manifest.architecture} ({manifest.dtype}) and "
            f"model {model.name} of {model.architecture} ({model.dtype}); load it into a "
            f"deployment of the same base model"
        )


def _stage(sharded: bool) -> str:
    return "zero_stage 3" if sharded else "zero_stage 1 or 2"


def export(
    skeleton: Skeleton,
    model: ModelSpec,
    path: Path,
    durable: Path | None,
    gang: Gang,
    *,
    uri: str = "",
    weights: int,
) -> int:
    """Write the sampling weights to ``path``, and a loadable model folder to ``durable``.

    Equal ``weights`` at ``path``'s side are not written again.
    """
    failure: PlexError | None = None
    written, there = 0, False
    try:
        if gang.rank == 0:
            with saving_errors(path.parent):
                there = contents.link(path, weights)
                written = path.stat().st_size if there else 0
    except PlexError as error:
        failure = error
    gang.share_failure(failure)
    if durable is None and gang.everyones(there)[0]:
        return gang.everyones(written)[0]
    named = skeleton.named_weights()  # all ranks give their share
    if gang.rank == 0:
        buffers = _buffers(named)
        try:
            with saving_errors(path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
                if not there:
                    write_tensors(path, buffers, durable=False)
                    contents.remember(path, weights)
                written = path.stat().st_size
            if durable is not None:
                _export_folder(buffers, model, durable, uri=uri, step=skeleton.step)
        except PlexError as error:
            failure = error
    gang.share_failure(failure)
    return gang.everyones(written)[0]


def _export_folder(
    weights: list[NamedBuffer], model: ModelSpec, path: Path, *, uri: str, step: int
) -> None:
    """A folder that transformers and vLLM load: weights, config, tokenizer; and a manifest."""
    part = checkpoint.begin(path)
    try:
        name = "model.safetensors"
        with saving_errors(part):
            written = write_tensors(part / name, weights, durable=True, checksum=True)
            for file in sorted(Path(model.path).iterdir()):
                if file.is_file() and not _is_weights(file.name):
                    shutil.copyfile(file, part / file.name)
            # The catalogue may train a model in another dtype than it was published in.
            config = json.loads((part / "config.json").read_text())
            config["dtype"] = model.dtype
            config.pop("torch_dtype", None)
            (part / "config.json").write_text(json.dumps(config, indent=2))
        manifest = Manifest(
            uri=uri,
            architecture=model.architecture,
            world=1,
            dtype=model.dtype,
            step=step,
            files=(RankFile(name=name, bytes=written.bytes, sha256=written.sha256),),
        )
        checkpoint.finish(path, manifest)
    finally:
        checkpoint.abandon(path)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf", ".index.json", ".pt"))

"""The training engine: deployments take turns in a DeepSpeed skeleton, on every rank of a gang.

``BadInput`` leaves everything as it was, but an ``optim_step`` with a gradient that is not finite
closes the step, and one without a forward_backward is refused: momentum would move the weights.
"""

import hashlib
import math
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from plexrl_slurm import wire
from plexrl_slurm.core import content
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadImage, BadInput, PlexError, StepSkipped, StorageFull
from plexrl_slurm.core.zero import layout_of
from plexrl_slurm.engines import batching, joining, losses
from plexrl_slurm.engines.adam import check_adam
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.checkpoints import Gang, export, load, save
from plexrl_slurm.engines.device_memory import DeviceMemory, on_gpu
from plexrl_slurm.engines.gpus import check_torch
from plexrl_slurm.engines.movers import Mover, Piece
from plexrl_slurm.engines.skeleton import Skeleton, bytes_of, dtype_name, read_model
from plexrl_slurm.memory import swap
from plexrl_slurm.memory.refusals import READ, WRITTEN, refusals
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor, needed_bytes
from plexrl_slurm.model_fingerprint import check_weights

#: Name under which an image says what its weights are.
_WEIGHTS: Final = "weights"


class DeepSpeedEngine:
    """One rank's half of a training WPG; see :class:`plexrl_slurm.engines.base.TrainEngine`."""

    def __init__(self, spec: RankSpec) -> None:
        """Join the gang: returns when all ranks are there."""
        self._spec = spec
        self._zero = layout_of(spec.options)
        self._max_tokens = int(spec.options.get("max_tokens_per_microbatch", 4096))
        self._share = bool(spec.options.get("prefix_sharing", True))
        if self._max_tokens < 1:
            raise BadInput("max_tokens_per_microbatch must be 1 or more")
        check_torch()
        self._device = joining.join(spec)
        self._gang = Gang(rank=spec.rank, world=spec.world)
        #: By architecture; at most one is awake.
        self._skeletons: dict[str, Skeleton] = {}
        #: The one that is awake, and the one that was last.
        self._skeleton: Skeleton | None = None
        self._last: Skeleton | None = None
        self._deployment = ""
        #: What the resident's weights are; see :mod:`plexrl_slurm.core.content`.
        self._weights = 0
        self._steps, self._unique = 0, self._gang.everyones(uuid.uuid4().hex)[0]
        self._model: ModelSpec | None = None
        self._slabs: dict[Path, Slab] = {}
        self._swap = _swap_folder(spec) if self._zero.swap_optimizer else None
        self._mover = Mover.for_device(self._device, ranks=spec.world)
        # Built now, so that no job waits for it and no job pays for it.
        first = str(spec.options.get("model", next(iter(spec.models), "")))
        if first:
            self._skeleton_for(spec.models[first])

    # -- whose turn it is --------------------------------------------------------------------

    def create(self, deployment: str, body: wire.Create) -> wire.Created:
        model = self._spec.models.get(body.base_model)
        if model is None:
            known = ", ".join(sorted(self._spec.models))
            raise BadInput(f"unknown model {body.base_model!r}; this WPG knows {known}")
        self._gang.share_failure(_changed(model, body.fingerprint))
        torch.manual_seed(body.seed)
        there = model.architecture in self._skeletons
        skeleton = self._skeleton_for(model)
        self._deployment, self._model = "", None  # nobody's, until all is in place
        self._enter(skeleton, deployment)
        # A new one has the base weights already.
        base = self._base(model) if there or skeleton.swapped is not None else None
        self._make_room(skeleton)
        if base is not None:
            skeleton.reset(base)
        self._deployment, self._model = deployment, model
        self._weights = content.of_base(model.name, body.fingerprint)
        return wire.Created(parameters=skeleton.parameters)

    def save_image(self, path: Path, *, deployment: str, progress: tuple[int, int]) -> int:
        slab, pieces = self._leave(path, deployment, progress)
        moved = self._mover.move(out=pieces)
        slab.commit()
        if self._skeleton is not None and self._skeleton.swapped is not None:
            self._skeleton.swapped.saved()
        return moved

    def slab_bytes(self, deployment: str) -> int:
        skeleton, _ = self._resident(deployment)
        # With the longest progress there can be.
        header = self._header(skeleton, skeleton.image(), deployment, (1 << 31, 1 << 31))
        return needed_bytes(header)

    def load_image(self, path: Path, *, deployment: str) -> int:
        slab, header, model = self._open(path, deployment)
        skeleton = self._skeleton_for(model)
        pieces = self._come(path, slab, header, skeleton)
        moved = self._mover.move(into=pieces)
        self._arrive(header, skeleton, deployment, model)
        return moved

    def swap_images(
        self,
        save: Path,
        load: Path,
        *,
        outgoing: str,
        progress: tuple[int, int],
        incoming: str,
    ) -> int:
        leaving, out = self._leave(save, outgoing, progress)
        slab, header, model = self._open(load, incoming)
        if self._resident(outgoing)[0].architecture != model.architecture:
            # The skeleton goes with its tensors.
            moved = self._mover.move(out=out)
            leaving.commit()
            return moved + self.load_image(load, deployment=incoming)
        skeleton = self._skeleton_for(model)
        into = self._come(load, slab, header, skeleton)
        moved = self._mover.move(out=out, into=into)
        leaving.commit()
        self._arrive(header, skeleton, incoming, model)
        return moved

    def _leave(
        self, path: Path, deployment: str, progress: tuple[int, int]
    ) -> tuple[Slab, list[Piece]]:
        """What a slab, now invalid, must get before it is committed."""
        skeleton, _ = self._resident(deployment)
        state, slab = skeleton.image(), self._slab(path)
        header = self._header(skeleton, state, deployment, progress)
        failure: StorageFull | None = None
        try:
            slab.reserve(header)
        except StorageFull as error:
            failure = error
        # Either all ranks overwrite their slabs or none does: half an image is none.
        self._gang.share_failure(failure)
        header = slab.write(header)
        self._mover.pin(path, slab.whole())
        places = slab.views(header.tensors)
        return slab, [
            Piece(tensor=tensor.contiguous(), place=place)
            for tensor, place in zip(state.values(), places, strict=True)
        ]

    def _header(
        self,
        skeleton: Skeleton,
        tensors: Mapping[str, Tensor],
        deployment: str,
        progress: tuple[int, int],
    ) -> SlabHeader:
        swapped = skeleton.swapped
        return SlabHeader(
            deployment=deployment,
            progress=progress,
            rank=self._spec.rank,
            world=self._spec.world,
            architecture=self._layout(skeleton.architecture),
            tensors=tuple(_entry(name, tensor) for name, tensor in tensors.items()),
            state={
                **skeleton.counters(),
                **(swapped.state() if swapped is not None else {}),
                _WEIGHTS: self._weights,
            },
        )

    def _open(self, path: Path, deployment: str) -> tuple[Slab, SlabHeader, ModelSpec]:
        slab = self._slab(path)
        header = slab.read()
        return slab, header, self._model_of(path, header, deployment)

    def _come(self, path: Path, slab: Slab, header: SlabHeader, skeleton: Skeleton) -> list[Piece]:
        """What an image brings; :meth:`_arrive` comes after it."""
        self._mover.pin(path, slab.whole())
        self._deployment, self._model = "", None  # nobody's, until all is in place
        self._enter(skeleton, header.deployment)
        if skeleton.swapped is not None:
            skeleton.swapped.load(header.state, path)
        table = {t.name: (getattr(torch, t.dtype), t.shape) for t in header.tensors}
        try:
            places = skeleton.prepare(table)
        except KeyError as error:
            raise BadImage(str(path), f"has a tensor {error} that is not of this layout") from error
        pieces = []
        for source, (name, place) in zip(slab.views(header.tensors), places.items(), strict=True):
            if source.nbytes != place.numel() * place.element_size():
                raise BadImage(str(path), f"has another size of {name} than this layout")
            pieces.append(Piece(tensor=place, place=source))
        return pieces

    def _arrive(
        self, header: SlabHeader, skeleton: Skeleton, deployment: str, model: ModelSpec
    ) -> None:
        skeleton.settle([tensor.name for tensor in header.tensors], header.state)
        self._deployment, self._model = deployment, model
        self._weights = header.state.get(_WEIGHTS) or self._new_weights()

    def _model_of(self, path: Path, header: SlabHeader, deployment: str) -> ModelSpec:
        if header.deployment != deployment:
            raise BadImage(str(path), f"holds {header.deployment}, not {deployment}")
        if (header.rank, header.world) != (self._spec.rank, self._spec.world):
            raise BadImage(
                str(path),
                f"is of rank {header.rank} of {header.world}; "
                f"this is rank {self._spec.rank} of {self._spec.world}",
            )
        for model in self._spec.models.values():
            if self._layout(model.architecture) == header.architecture:
                return model
        raise BadImage(str(path), f"has architecture {header.architecture}, unknown to this WPG")

    def _layout(self, architecture: str) -> str:
        return f"{architecture}/{self._zero.name}"

    def _slab(self, path: Path) -> Slab:
        for gone in [p for p, slab in self._slabs.items() if not p.exists()]:
            del self._slabs[gone]
            self._mover.unpin(gone)
        return self._slabs.setdefault(path, Slab(path))

    def _skeleton_for(self, model: ModelSpec) -> Skeleton:
        """The skeleton of its architecture, awake; another's gives its memory back first."""
        skeleton = self._skeletons.get(model.architecture)
        if skeleton is None or skeleton is not self._skeleton:
            self._put_to_sleep()
            if skeleton is None:
                scratch = None
                if self._swap is not None:
                    scratch = swap.scratch_of(self._swap, self._spec.wpg, self._spec.rank)
                    scratch /= model.architecture
                    shutil.rmtree(scratch, ignore_errors=True)
                base = self._base(model)
                skeleton = Skeleton(model, base, layout=self._zero, scratch=scratch)
                self._skeletons[model.architecture] = skeleton
            skeleton.wake()
            self._skeleton = skeleton
        return skeleton

    def _put_to_sleep(self) -> None:
        self._deployment, self._model = "", None
        if self._skeleton is not None:
            self._skeleton.sleep()
            self._last, self._skeleton = self._skeleton, None

    def sleep(self) -> DeviceMemory:
        self._put_to_sleep()
        return self.memory()

    def wake(self) -> DeviceMemory:
        if self._skeleton is None and self._last is not None:
            self._last.wake()
            self._skeleton = self._last
        return self.memory()

    def memory(self) -> DeviceMemory:
        held = sum(skeleton.bytes for skeleton in self._skeletons.values())
        return on_gpu() or DeviceMemory(used=held)

    def _base(self, model: ModelSpec) -> Any:
        """The base weights, read on all ranks or on none."""
        failure: PlexError | None = None
        base: Any = None
        try:
            with refusals(Path(model.path), READ):
                base = read_model(model)
        except PlexError as error:
            failure = error
        self._gang.share_failure(failure)
        return base

    def _enter(self, skeleton: Skeleton, deployment: str) -> None:
        """Let go of the resident's swap folder and open another."""
        if skeleton.swapped is not None and self._swap is not None:
            home = swap.home_of(self._swap, self._spec.wpg, deployment)
            skeleton.swapped.enter(home, rank=self._spec.rank, world=self._spec.world)

    def _make_room(self, skeleton: Skeleton) -> None:
        """On all ranks or on none: a new version of what lies on the disk."""
        if skeleton.swapped is None:
            return
        failure: PlexError | None = None
        try:
            with refusals(self._swap or Path(), WRITTEN):
                skeleton.swapped.begin()
        except PlexError as error:
            failure = error
        try:
            self._gang.share_failure(failure)
        except PlexError:
            skeleton.swapped.abandon()
            raise

    def _resident(self, deployment: str | None = None) -> tuple[Skeleton, ModelSpec]:
        if self._skeleton is None or self._model is None:
            raise RuntimeError("no deployment is resident")
        if deployment not in (None, self._deployment):
            raise RuntimeError(f"{self._deployment} is resident, not {deployment}")
        return self._skeleton, self._model

    # -- learning ----------------------------------------------------------------------------

    def forward_backward(self, body: wire.ForwardBackward) -> wire.TrainOutput:
        skeleton, model = self._resident()
        loss, config = losses.find_loss(body.loss_fn, body.loss_fn_config)
        examples = batching.check(body, loss, model)
        share = self._share and skeleton.policy.can_share_prefixes
        rows = batching.make_rows(examples, share=share, longest=self._max_tokens)
        plan = batching.deal(rows, examples, world=self._spec.world, max_tokens=self._max_tokens)[
            self._spec.rank
        ]
        inputs = sorted({key for example in examples for key in example.inputs})
        before = None if body.forward_only else _Undo(skeleton, micro_batches=len(plan))
        metrics = []
        logprobs: list[np.ndarray[Any, np.dtype[np.float32]]] = [
            np.zeros(example.targets.shape, dtype=np.float32) for example in examples
        ]
        for rows in plan:
            batch = batching.build(rows, examples, inputs).to(self._device)
            lp = skeleton.logprobs(batch) if before is None else skeleton.forward(batch)
            total, found = losses.compute(loss, lp, batch.inputs, batch.segments, config)
            if not self._gang.all_agree(math.isfinite(found["loss:sum"])):
                if before is not None:
                    before.undo()
                raise BadInput(
                    f"the loss {body.loss_fn} of this data is not finite; nothing was "
                    f"accumulated (are logprobs and advantages of the right order of size?)"
                )
            if before is not None:
                skeleton.backward(total)
            metrics.append(found)
            for number, part in zip(batch.members, _split(lp, batch), strict=True):
                logprobs[number] = part
        self._gang.collect(logprobs)
        merged = losses.merge(self._gang.everyones(losses.merge(metrics)))
        return wire.TrainOutput(
            logprobs=[wire.Array.of(values) for values in logprobs], metrics=merged
        )

    def optim_step(self, body: wire.OptimStep) -> wire.OptimOutput:
        skeleton, _ = self._resident()
        check_adam(body)
        if not skeleton.open:
            raise BadInput(
                "optim_step without a forward_backward since the last one: there are no gradients"
            )
        self._make_room(skeleton)
        norm = skeleton.take_step(
            lr=body.learning_rate,
            betas=(body.beta1, body.beta2),
            eps=body.eps,
            weight_decay=body.weight_decay,
            clip=body.grad_clip_norm,
        )
        skeleton.close_step()
        if not math.isfinite(norm):
            raise StepSkipped(
                "the gradient is not finite: this step was skipped and its gradients dropped; "
                "weights and moments are as before"
            )
        self._weights = self._new_weights()
        return wire.OptimOutput(
            metrics={
                "grad_norm": norm,
                "learning_rate": body.learning_rate,
                "step": float(skeleton.step),
            }
        )

    # -- files -------------------------------------------------------------------------------

    def save_state(self, body: wire.SaveState) -> wire.Saved:
        skeleton, model = self._resident()
        written = save(skeleton, model, Path(body.path), body.uri, self._gang)
        return wire.Saved(uri=body.uri, bytes=written)

    def load_state(self, body: wire.LoadState) -> wire.Saved:
        skeleton, model = self._resident()
        self._make_room(skeleton)
        read, self._weights = load(
            skeleton, model, Path(body.path), body.uri, self._gang, optimizer=body.optimizer
        )
        return wire.Saved(uri=body.uri, bytes=read)

    def publish(self, body: wire.Publish, path: Path) -> wire.Saved:
        skeleton, model = self._resident()
        durable = Path(body.path) if body.path else None
        written = export(
            skeleton, model, path, durable, self._gang, uri=body.uri, weights=self._weights
        )
        return wire.Saved(uri=body.uri, bytes=written, content=content.text(self._weights))

    def _new_weights(self) -> int:
        """Nobody else's; the same on all ranks."""
        self._steps += 1
        return content.of_step(f"{self._unique} {self._steps}")

    def digest(self) -> str:
        skeleton, _ = self._resident()
        digest = hashlib.sha256()
        state = {**skeleton.weights(), **skeleton.masters(), **skeleton.moments()}
        for name in sorted(state):
            digest.update(name.encode())
            digest.update(bytes_of(state[name]))
        return digest.hexdigest()


class _Undo:
    """Takes back what a forward_backward that fails half-way has accumulated."""

    def __init__(self, skeleton: Skeleton, *, micro_batches: int) -> None:
        self._skeleton = skeleton
        self._counters = skeleton.counters()
        # One micro-batch fails before its backward pass: nothing to take back.
        grads = skeleton.gradients() if micro_batches > 1 else {}
        self._gradients = {name: tensor.detach().clone() for name, tensor in grads.items()}

    def undo(self) -> None:
        if not self._counters["open"]:
            self._skeleton.close_step()
        for name, tensor in self._skeleton.gradients().items():
            if name in self._gradients:
                tensor.detach().copy_(self._gradients[name])
        self._skeleton.set_counters(self._counters)


def _split(lp: Tensor, batch: batching.MicroBatch) -> Sequence[np.ndarray[Any, Any]]:
    """The logprobs of each member of the micro-batch."""
    if not batch.members:
        return []
    sizes = torch.bincount(batch.segments.cpu(), minlength=len(batch.members)).tolist()
    return [part.numpy() for part in lp.detach().cpu().split(sizes)]


def _entry(name: str, tensor: Tensor) -> SlabTensor:
    return SlabTensor(
        name=name,
        dtype=dtype_name(tensor),
        shape=tuple(tensor.shape),
        bytes=tensor.numel() * tensor.element_size(),
    )


def _swap_folder(spec: RankSpec) -> Path:
    """Where swap folders are; raises ``BadInput``."""
    folder = os.environ.get(swap.SWAP_DIR)
    if not folder:
        raise BadInput(
            f"WPG {spec.wpg} has offload_optimizer = 'nvme' and its node no disk for it: write "
            f"nvme_dir and nvme_bytes in the partition's file, or offload_optimizer = 'cpu'"
        )
    return Path(folder)


def _changed(model: ModelSpec, fingerprint: str) -> PlexError | None:
    """Whether the base weights are others than when the deployment was accepted."""
    try:
        check_weights(model, fingerprint)
    except PlexError as error:
        return error
    return None

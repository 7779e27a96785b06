"""Weights in vLLM's own layout: copied straight into the tensors that its kernels read.

For devices with their own memory. Where vLLM's loaders put the parts of a snapshot (fused, sharded)
is noted once, while they do it; a later snapshot of the same architecture is then copied part by
part, through pinned memory, into the same places: nothing is allocated on the device, so captured
graphs stay valid. A model whose loaders do more than copy is refused, and reloaded as vLLM does it.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

#: vLLM's methods of layers whose kernels read the weights as they are.
_PLAIN: Final = ("NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_COPY: Final = torch.ops.aten.copy_.default
_FILL: Final = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
#: Bytes of each of two pinned buffers.
STAGING_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A view of a snapshot's tensor, and the view of a parameter where it belongs."""

    source: str
    shape: tuple[int, ...]
    #: ``(stride, offset)`` of each view in elements.
    source_view: tuple[tuple[int, ...], int]
    target: Tensor


class DeviceWeights:
    """The weights of one worker's model, and how they are replaced."""

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model, self._device = model, device
        self._layout: Layout | None = None
        self._staging: Staging | None = None
        #: Why weights are reloaded as vLLM does it; ``None`` before the first load.
        self.refused: str | None = None

    def load(
        self,
        snapshot: Mapping[str, Tensor],
        *,
        reload: Callable[[Iterator[tuple[str, Tensor]]], object],
    ) -> None:
        """Replace them; ``reload`` is vLLM's way."""
        if self._layout is not None and self._staging is not None:
            self._layout.load(snapshot, self._staging)
            return
        reload(iter(snapshot.items()))
        if self.refused is None:
            self.refused = self._learn(snapshot) or ""
            if self.refused:
                log.warning("weights are reloaded, not copied: %s", self.refused)
                reload(iter(snapshot.items()))

    def _learn(self, snapshot: Mapping[str, Tensor]) -> str | None:
        """Load it once more and note how; ``None``, or why that is not what a reload gives."""
        parameters = dict(self._model.named_parameters())
        expected = {
            name: parameter.detach().cpu().clone() for name, parameter in parameters.items()
        }
        if other := _more_than_weights(self._model):
            return f"{other} makes something else of its weights"
        try:
            layout = Layout.record(parameters.values(), snapshot.items(), self._model.load_weights)
        except Exception as problem:  # loaders fail in many ways after kernels took the weights
            return f"{type(problem).__name__}: {problem}"
        for name, parameter in parameters.items():
            if not torch.equal(parameter.detach().cpu(), expected[name]):
                return f"{name} has another layout in vLLM's kernels"
        self._layout, self._staging = layout, Staging(self._device)
        return None


def _more_than_weights(model: Any) -> str | None:
    """A layer whose kernels read something that is made of its weights."""
    for name, layer in model.named_modules():
        method = type(getattr(layer, "quant_method", None)).__name__
        if method not in _PLAIN or hasattr(layer, "kv_b_proj"):
            return f"{name} ({method})"
    return None


class NotACopy(Exception):
    """A loader did something else than to copy parts of the snapshot into parameters."""


class Layout:
    """Where the parts of a snapshot belong in one model on one worker."""

    def __init__(self, parts: list[_Part], constants: list[tuple[Tensor, float]]) -> None:
        """``constants``: padding, and what it is filled with."""
        self._parts, self._constants = parts, constants

    @classmethod
    def record(
        cls,
        parameters: Iterable[Tensor],
        snapshot: Iterable[tuple[str, Tensor]],
        load: Callable[[Iterator[tuple[str, Tensor]]], object],
    ) -> "Layout":
        """Have ``load`` (a model's ``load_weights``) load a snapshot, and note what it does.

        Raises :class:`NotACopy` when that cannot be repeated by copies; the weights are loaded.
        """
        recorder = _Recorder(parameters)
        with torch.no_grad(), recorder:
            load(recorder.watch(snapshot))
        return cls(*recorder.finish())

    def load(self, snapshot: Mapping[str, Tensor], staging: "Staging") -> int:
        """Copy another snapshot into the same places; returns the bytes moved."""
        moved = 0
        with torch.no_grad():
            for part in self._parts:
                stride, offset = part.source_view
                whole = snapshot[part.source]
                source = whole.as_strided(part.shape, stride, whole.storage_offset() + offset)
                moved += staging.copy(part.target, source)
            staging.wait()
            for padding, value in self._constants:  # gone, if the device's memory was given back
                padding.fill_(value)
        return moved


class _Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is not followed
    """Watches what happens to parameters while a snapshot is loaded."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        #: By the address of their memory: parameters that share it are one.
        self._targets = {p.untyped_storage().data_ptr(): p.detach() for p in parameters}
        #: The snapshot's tensors, which keep their addresses until the end.
        self._sources: list[tuple[str, Tensor]] = []
        self._parts: list[_Part] = []
        #: Padding, which is the same in every snapshot.
        self._constants: list[tuple[Tensor, float]] = []
        self._problem = ""

    def watch(self, snapshot: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hand the tensors on, each with its memory noted."""
        for name, tensor in snapshot:
            self._sources.append((name, tensor.contiguous()))
            yield self._sources[-1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            info = argument.alias_info
            if info is not None and info.is_write and self._is_target(value):
                if func is _COPY:
                    self._copied(value, args[1])
                elif func in _FILL:
                    self._constants.append((value.detach(), float(args[1]) if args[1:] else 0.0))
                else:
                    self._problem = self._problem or f"{func} changes a parameter"
        return func(*args, **(kwargs or {}))

    def _is_target(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.untyped_storage().data_ptr() in self._targets

    def _copied(self, target: Tensor, source: Tensor) -> None:
        for name, whole in self._sources:
            distance = source.data_ptr() - whole.data_ptr()
            if source.shape == target.shape and 0 <= distance < whole.nbytes:
                view = (source.stride(), distance // whole.element_size())
                shape = tuple(source.shape)
                self._parts.append(
                    _Part(source=name, shape=shape, source_view=view, target=target.detach())
                )
                return
        self._problem = self._problem or "a parameter is filled with what is not in the snapshot"

    def finish(self) -> tuple[list[_Part], list[tuple[Tensor, float]]]:
        """The parts and the padding; raises :class:`NotACopy`."""
        views = [*(part.target for part in self._parts), *(each for each, _ in self._constants)]
        for address, tensor in self._targets.items():
            elements = tensor.untyped_storage().nbytes() // tensor.element_size()
            filled = torch.zeros(elements, dtype=torch.uint8)
            for view in views:
                if view.untyped_storage().data_ptr() == address:
                    filled.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
            if int(filled.max()) > 1:
                self._problem = self._problem or "a part of a parameter is filled twice"
            elif not int(filled.min()):
                self._problem = self._problem or "a part of a parameter is not filled"
        if self._problem:
            raise NotACopy(self._problem)
        return self._parts, self._constants


class Staging:
    """Two pinned buffers: one is filled while the other's content goes to the device."""

    def __init__(self, device: torch.device, *, size: int = STAGING_BYTES) -> None:
        pinned = device.type == "cuda"
        self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._events = [torch.cuda.Event() for _ in range(2)] if pinned else []
        self._turn = 0

    def copy(self, target: Tensor, source: Tensor) -> int:
        """Copy from host memory; the target holds it after :meth:`wait`. Returns the bytes."""
        size: int = target.numel() * target.element_size()
        if size > len(self._buffers[0]) and target.dim() and target.shape[0] > 1:
            middle = target.shape[0] // 2
            return self.copy(target[:middle], source[:middle]) + self.copy(
                target[middle:], source[middle:]
            )
        self._turn = 1 - self._turn
        if self._events:
            self._events[self._turn].synchronize()  # its last content has left
        if size <= len(self._buffers[0]):
            place = self._buffers[self._turn][:size].view(target.dtype).view(target.shape)
            place.copy_(source)
            source = place
        target.copy_(source, non_blocking=bool(self._events))
        if self._events:
            self._events[self._turn].record()
        return size

    def wait(self) -> None:
        """Until everything is on the device."""
        for event in self._events:
            event.synchronize()

"""What vLLM's sleep does not do on the CPU: give the memory of weights and KV cache back.

vLLM packs the weights of linear layers for oneDNN or its own kernels and leaves an empty
parameter: the packed copy lives in the layer's ``cpu_linear``, which a reload makes anew.
"""

import ctypes
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from plexrl_slurm.engines.storages import Released, bytes_of


class HostWorker:
    """The memory of a worker of vLLM's that computes on the CPU."""

    def __init__(self, worker: Any) -> None:
        self._model, self._caches = worker.get_model(), worker.model_runner.kv_caches

    @property
    def bytes(self) -> int:
        """What weights and KV cache take; packed weights as much as plain ones."""
        return bytes_of(self._tensors()) + sum(_packed_bytes(layer) for layer in self._packed())

    def release(self) -> Released:
        """Give it back. The layers cannot compute until their weights have been loaded."""
        for layer in self._packed():
            layer.cpu_linear = _asleep
        released = Released(self._tensors())
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)
        return released

    def _tensors(self) -> Iterator[Any]:
        yield from self._model.parameters()
        yield from self._caches

    def _packed(self) -> Iterator[Any]:
        """Layers with a packed copy of their weights."""
        for layer in self._model.modules():
            if getattr(layer, "cpu_linear", _asleep) is not _asleep:
                yield layer


def _asleep(*_: object) -> None:
    raise RuntimeError("this layer has no weights: the engine sleeps")


def _packed_bytes(layer: Any) -> int:
    """Of the copy; as vLLM remembers the weights for a reload."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    weight = get_layerwise_info(layer).restore_metadata[0].get("weight")
    return 0 if weight is None else weight.numel() * weight.element_size()

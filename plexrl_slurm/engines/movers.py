"""Moves images between the device and slabs, chunk by chunk, out and in at the same time.

The image that comes in takes the place of the one that goes out, in the same tensors: a chunk
may be written when whatever of the old image was there has been read. On CUDA each direction has
a stream, and slabs are registered with the driver once, so that the copy engines read and write
them without help; between tensors in host memory and slabs two threads copy. Needs nothing but
torch.
"""

import bisect
import ctypes
import logging
import os
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: Bytes of a chunk on CUDA: a millisecond or two of the bus.
DEVICE_CHUNK: Final = 64 << 20
#: In host memory. Below three quarters of the last cache (225 MiB where it has 300) memcpy
#: goes through the cache, and is slower by a third.
HOST_CHUNK: Final = 256 << 20
#: Not worth a thread.
_SMALL: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of an image and its bytes in a slab."""

    #: Contiguous; on the device, or in host memory if its engine keeps it there.
    tensor: Tensor
    #: Writable, and as long as the tensor.
    place: memoryview


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A part of a piece: as many bytes of uint8 on both sides."""

    tensor: Tensor
    place: Tensor


class Pins:
    """Host memory that CUDA may use directly: registered once for each mapping."""

    def __init__(self, cudart: Any, *, flush: Any = None) -> None:
        """``flush`` runs something on the device, of no consequence."""
        self._cudart, self._flush = cudart, flush
        #: The mapping is kept: the driver must never hold pages that are another's by now.
        self._held: dict[Hashable, Tensor] = {}
        self._refused: set[Hashable] = set()

    def pin(self, key: Hashable, memory: memoryview) -> bool:
        """Register the mapping that ``key`` has now; whether it is registered."""
        space = torch.frombuffer(memory, dtype=torch.uint8)
        if key in self._held:
            held = self._held[key]
            if (held.data_ptr(), held.numel()) == (space.data_ptr(), space.numel()):
                return True
            self.drop(key)
        error = int(self._cudart.cudaHostRegister(space.data_ptr(), space.numel(), 0))
        if error:
            if key not in self._refused:
                say(log, "slab_not_pinned", slab=str(key), bytes=space.numel(), cuda_error=error)
            self._refused.add(key)
            # CUDA would blame the next kernel for it.
            with suppress(RuntimeError):
                self._flush()
            return False
        self._held[key] = space
        return True

    def drop(self, key: Hashable) -> None:
        """Let go of a mapping; its pages can be given back then."""
        if (held := self._held.pop(key, None)) is not None:
            self._cudart.cudaHostUnregister(held.data_ptr())
        self._refused.discard(key)


class Mover:
    """The mover of a rank. Not thread-safe."""

    def __init__(self, *, cuda: Any = None, threads: int = 2, chunk: int = 0) -> None:
        """``cuda``: ``torch.cuda`` where the state is on a GPU; ``chunk`` bytes instead of what is
        best for the device."""
        self._cuda, self._threads, self._chunk = cuda, threads, chunk
        self._streams = (cuda.Stream(), cuda.Stream()) if cuda is not None else None
        self._pins = (
            Pins(cuda.cudart(), flush=lambda: torch.zeros(1, device="cuda"))
            if cuda is not None
            else None
        )

    @classmethod
    def for_device(cls, device: torch.device, *, ranks: int = 1) -> "Mover":
        """``ranks`` of them share the cores of this process."""
        cores = len(os.sched_getaffinity(0)) // ranks
        cuda = torch.cuda if device.type == "cuda" else None
        return cls(cuda=cuda, threads=2 if cores > 1 else 1)

    def pin(self, key: Hashable, memory: memoryview) -> None:
        """Make copies from and to a slab fast; the whole mapping, whenever it may have changed."""
        if self._pins is not None:
            self._pins.pin(key, memory)

    def unpin(self, key: Hashable) -> None:
        """The slab is gone or will be."""
        if self._pins is not None:
            self._pins.drop(key)

    def move(self, *, out: Sequence[Piece] = (), into: Sequence[Piece] = ()) -> int:
        """Copy tensors of ``out`` to their places, and the places of ``into`` to their tensors.

        Tensors of both may be the same memory. Everything is in place when it returns: the bytes.
        """
        device = [
            [piece for piece in pieces if self._on_device(piece.tensor)] for pieces in (out, into)
        ]
        host = [
            [piece for piece in pieces if not self._on_device(piece.tensor)]
            for pieces in (out, into)
        ]
        if any(device):
            self._start(*(self._chunks(pieces, DEVICE_CHUNK) for pieces in device))
        if any(host):
            self._copy(*(self._chunks(pieces, HOST_CHUNK) for pieces in host))
        if any(device):
            self._finish()
        return sum(piece.place.nbytes for piece in (*out, *into))

    def _on_device(self, tensor: Tensor) -> bool:
        return self._cuda is not None and tensor.device.type != "cpu"

    def _chunks(self, pieces: Sequence[Piece], size: int) -> list[_Chunk]:
        return [chunk for piece in pieces for chunk in _cut(piece, self._chunk or size)]

    # -- CUDA --------------------------------------------------------------------------------
    def _start(self, out: list[_Chunk], into: list[_Chunk]) -> None:
        assert self._streams is not None  # for the type checker: there is a device
        leaving, coming = self._streams
        for stream in self._streams:
            stream.wait_stream(self._cuda.current_stream())
        events = []
        with self._cuda.stream(leaving):
            for chunk in out:
                chunk.place.copy_(chunk.tensor, non_blocking=True)
                event = self._cuda.Event()
                event.record(leaving)
                events.append(event)
        with self._cuda.stream(coming):
            for chunk, first in zip(into, _freed_by(out, into), strict=True):
                if first:
                    coming.wait_event(events[first - 1])
                chunk.tensor.copy_(chunk.place, non_blocking=True)

    def _finish(self) -> None:
        assert self._streams is not None
        for stream in self._streams:
            stream.synchronize()

    # -- host memory -------------------------------------------------------------------------
    def _copy(self, out: list[_Chunk], into: list[_Chunk]) -> None:
        first = _freed_by(out, into)
        size = sum(chunk.place.numel() for chunk in (*out, *into))
        if self._threads < 2 or size < _SMALL or not out or not into:
            left = 0
            for chunk, needed in zip(into, first, strict=True):
                for leaving in out[left:needed]:
                    copy_bytes(leaving.place, leaving.tensor)
                left = max(left, needed)
                copy_bytes(chunk.tensor, chunk.place)
            for leaving in out[left:]:
                copy_bytes(leaving.place, leaving.tensor)
            return
        gone = threading.Semaphore(0)

        def leave() -> None:
            for chunk in out:
                copy_bytes(chunk.place, chunk.tensor)
                gone.release()

        thread = threading.Thread(target=leave, name="mover")
        thread.start()
        seen = 0
        for chunk, needed in zip(into, first, strict=True):
            while seen < needed:
                gone.acquire()
                seen += 1
            copy_bytes(chunk.tensor, chunk.place)
        thread.join()


def copy_bytes(to: Tensor, source: Tensor) -> int:
    """Copy between contiguous tensors of one size in host memory; returns the bytes."""
    size: int = source.numel() * source.element_size()
    # memcpy streams past the cache, which copy_ does not; and other threads run meanwhile.
    ctypes.memmove(to.data_ptr(), source.data_ptr(), size)
    return size


def _cut(piece: Piece, size: int) -> Iterator[_Chunk]:
    if not piece.tensor.is_contiguous():
        raise ValueError("only contiguous tensors can be moved")
    tensor = piece.tensor.detach().reshape(-1).view(torch.uint8)
    if tensor.numel() != piece.place.nbytes:
        raise ValueError(f"a tensor of {tensor.numel()} bytes and {piece.place.nbytes} for it")
    if not piece.place.nbytes:
        return
    place = torch.frombuffer(piece.place, dtype=torch.uint8)
    for start in range(0, tensor.numel(), size):
        yield _Chunk(tensor[start : start + size], place[start : start + size])


def _freed_by(out: Sequence[_Chunk], into: Sequence[_Chunk]) -> list[int]:
    """For each of ``into``, how many of ``out`` must have left before it may come."""
    order = sorted(range(len(out)), key=lambda number: out[number].tensor.data_ptr())
    starts = [out[number].tensor.data_ptr() for number in order]
    ends = [start + out[number].tensor.numel() for start, number in zip(starts, order, strict=True)]
    needed = []
    for chunk in into:
        start = chunk.tensor.data_ptr()
        # Tensors of one image never overlap, so ends are in the order of starts.
        low = bisect.bisect_right(ends, start)
        high = bisect.bisect_left(starts, start + chunk.tensor.numel())
        needed.append(max((order[at] + 1 for at in range(low, high)), default=0))
    return needed

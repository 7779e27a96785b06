"""What the mover promises, on the CPU; of CUDA only what is said to it, by a stand-in."""

import contextlib
import mmap
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from plexrl_slurm.engines.movers import Mover, Piece, Pins

pytestmark = pytest.mark.engines


def places(tensors: list[Tensor], fill: int) -> list[memoryview]:
    return [
        memoryview(bytearray([fill]) * (tensor.numel() * tensor.element_size()))
        for tensor in tensors
    ]


def pieces(tensors: list[Tensor], spaces: list[memoryview]) -> list[Piece]:
    return [Piece(tensor=t, place=p) for t, p in zip(tensors, spaces, strict=True)]


def state(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sizes, generator=generator).to(dtype)
        for sizes, dtype in (
            ((300, 7), torch.float32),
            ((1000,), torch.bfloat16),
            ((), torch.float32),
            ((0, 3), torch.float32),
            ((5000,), torch.float32),
        )
    ]


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk", [1000, 1 << 20])
@pytest.mark.parametrize("order", ["same", "other"])
def test_what_comes_in_takes_the_place_of_what_goes_out(
    threads: int, chunk: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plexrl_slurm.engines.movers._SMALL", 0)
    device = state(1)
    old, new = [bytes_of(tensor) for tensor in device], [bytes_of(tensor) for tensor in state(2)]
    out = pieces(device, places(device, 0))
    into = pieces(device, [memoryview(bytearray(data)) for data in new])
    numbers = list(range(len(device)))
    if order == "other":
        random.Random(3).shuffle(numbers)
    moved = Mover(threads=threads, chunk=chunk).move(out=out, into=[into[i] for i in numbers])
    assert [bytes(piece.place) for piece in out] == old
    assert [bytes_of(tensor) for tensor in device] == new
    assert moved == 2 * sum(map(len, old))


def test_an_image_may_use_other_parts_of_the_same_memory() -> None:
    whole = torch.arange(1000, dtype=torch.int32)
    before = whole.clone()
    out = pieces([whole[:300], whole[300:]], places([whole[:300], whole[300:]], 0))
    new = torch.arange(5000, 6000, dtype=torch.int32)
    into = pieces(
        [whole[600:], whole[:600]],
        [memoryview(bytearray(bytes_of(part))) for part in (new[600:], new[:600])],
    )
    Mover(chunk=256).move(out=out, into=into)
    assert torch.equal(whole, new)
    assert b"".join(bytes(piece.place) for piece in out) == bytes_of(before)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_direction_is_a_move_too(threads: int) -> None:
    tensors = state(4)
    out = pieces(tensors, places(tensors, 0))
    mover = Mover(threads=threads, chunk=777)
    mover.move(out=out)
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    mover.move(into=pieces(copies, [piece.place for piece in out]))
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))


def test_a_place_of_another_size_and_scattered_tensors_are_refused() -> None:
    tensor = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="64 bytes and 63 for it"):
        Mover().move(out=[Piece(tensor=tensor, place=memoryview(bytearray(63)))])
    with pytest.raises(ValueError, match="contiguous"):
        Mover().move(out=[Piece(tensor=tensor.T[1:], place=memoryview(bytearray(48)))])


class Runtime:
    """Stands in for ``torch.cuda.cudart()``."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.said: list[tuple[str, int]] = []

    def cudaHostRegister(self, at: int, size: int, flags: int) -> int:
        self.said.append(("register", at))
        return self.error

    def cudaHostUnregister(self, at: int) -> int:
        self.said.append(("unregister", at))
        return 0


def address(memory: memoryview) -> int:
    return int(torch.frombuffer(memory, dtype=torch.uint8).data_ptr())


def test_a_slab_is_pinned_once_until_it_is_mapped_anew() -> None:
    runtime = Runtime()
    pins = Pins(runtime)
    first, second = (memoryview(mmap.mmap(-1, size)) for size in (4096, 8192))
    assert all(pins.pin("slab", first) for _ in range(3))
    assert pins.pin("slab", second)
    pins.drop("slab")
    pins.drop("slab")
    assert runtime.said == [
        ("register", address(first)),
        ("unregister", address(first)),
        ("register", address(second)),
        ("unregister", address(second)),
    ]


def test_memory_that_cannot_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    flushed: list[int] = []
    pins = Pins(Runtime(error=2), flush=lambda: flushed.append(1))
    memory = memoryview(mmap.mmap(-1, 4096))
    assert [pins.pin("slab", memory) for _ in range(2)] == [False, False]
    assert len(flushed) == 2
    (line,) = caplog.messages
    assert line == "slab_not_pinned slab=slab bytes=4096 cuda_error=2"


class Cuda:
    """Stands in for ``torch.cuda``: remembers in which order streams were told what."""

    def __init__(self) -> None:
        self.said: list[tuple[Any, ...]] = []
        self.streams = 0
        self.current = "compute"

    def cudart(self) -> Runtime:
        return Runtime()

    def Stream(self) -> "FakeStream":
        self.streams += 1
        return FakeStream(self, self.streams)

    def Event(self) -> "FakeEvent":
        return FakeEvent(self)

    def current_stream(self) -> str:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: "FakeStream") -> Iterator[None]:
        self.said.append(("on", stream.number))
        yield


class FakeStream:
    def __init__(self, cuda: Cuda, number: int) -> None:
        self._cuda, self.number = cuda, number

    def wait_stream(self, other: str) -> None:
        self._cuda.said.append(("wait", self.number, other))

    def wait_event(self, event: "FakeEvent") -> None:
        self._cuda.said.append(("after", self.number, event.number))

    def synchronize(self) -> None:
        self._cuda.said.append(("synchronize", self.number))


class FakeEvent:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.number = -1

    def record(self, stream: FakeStream) -> None:
        self.number = sum(each[0] == "recorded" for each in self._cuda.said)
        self._cuda.said.append(("recorded", stream.number))


def test_on_cuda_a_chunk_comes_after_the_one_that_leaves_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Mover, "_on_device", lambda self, tensor: True)
    cuda = Cuda()
    device = [torch.zeros(250, dtype=torch.uint8), torch.zeros(50, dtype=torch.uint8)]
    out = pieces(device, places(device, 0))
    into = pieces(device, places(device, 7))
    mover = Mover(cuda=cuda, chunk=100)
    mover.move(out=out, into=into)
    assert cuda.said == [
        ("wait", 1, "compute"),
        ("wait", 2, "compute"),
        ("on", 1),
        *[("recorded", 1)] * 4,
        ("on", 2),
        *[("after", 2, number) for number in range(4)],
        ("synchronize", 1),
        ("synchronize", 2),
    ]
    assert all(bool((tensor == 7).all()) for tensor in device)
    assert all(not any(piece.place) for piece in out)


def test_tensors_in_host_memory_move_while_streams_do(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = torch.ones(64)
    weights = torch.ones(64)
    monkeypatch.setattr(Mover, "_on_device", lambda self, tensor: tensor is weights)
    cuda = Cuda()
    out = pieces([weights, moments], places([weights, moments], 0))
    Mover(cuda=cuda).move(out=out)
    assert [bytes(piece.place) for piece in out] == [bytes_of(weights), bytes_of(moments)]
    assert cuda.said[-2:] == [("synchronize", 1), ("synchronize", 2)]

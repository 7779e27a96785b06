"""What ``gpu_check`` measures with: a device, a model of flat tensors, images in shared memory."""

import ctypes
import gc
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from plexrl_slurm.engines.movers import Mover, Piece

PAGE: Final = 4096
#: Bytes of memory that are asked for at once, and that are left to others.
STRIDE: Final = 256 << 20
SPARE: Final = 512 << 20
#: Bytes that one thread makes a digest of.
DIGESTED: Final = 64 << 20


class Device:
    """The GPU, or the CPU in its place."""

    def __init__(self, *, small: bool) -> None:
        self.cuda = torch.cuda.is_available()
        if not self.cuda and not small:
            raise SystemExit("there is no GPU here: take --small")
        self.torch = torch.device("cuda" if self.cuda else "cpu")
        self.name = torch.cuda.get_device_name() if self.cuda else "CPU"

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def taken(self) -> int:
        """Bytes of the GPU that are not free, whoever has them."""
        if not self.cuda:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds."""
        self.wait()
        start = time.perf_counter()
        action()
        self.wait()
        return time.perf_counter() - start


class NoRoom(Exception):
    """Host memory for all slabs is not to be had."""


def reserve(descriptor: int, size: int, *, patience_s: float = 20.0) -> None:
    """Give a file in memory its pages, no faster than a machine whose memory grows can follow."""
    for at in range(0, size, STRIDE):
        part = min(STRIDE, size - at)
        deadline = time.monotonic() + patience_s
        while (free := available_memory()) < part + SPARE:
            if time.monotonic() > deadline:
                raise NoRoom(f"{at / 1e9:.1f} of {size / 1e9:.1f} GB; {free / 1e9:.1f} GB are free")
            time.sleep(0.05)
        try:
            os.posix_fallocate(descriptor, at, part)
        except OSError as error:
            raise NoRoom(f"{at / 1e9:.1f} of {size / 1e9:.1f} GB: {error.strerror}") from error


def available_memory() -> int:
    """Bytes that may still be taken, of the machine and of this control group."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    cached = int(statistics.get("file", 0)) - int(statistics.get("shmem", 0))
    return min(free, int(limit) - used + max(0, cached))


class HostImage:
    """Mapped shared memory, as a slab is; a slab's header needs packages that are not here.

    It has no name, so that ``/dev/shm`` may be small and a run that is killed leaves nothing.
    """

    def __init__(self, name: str, size: int) -> None:
        """Raises :class:`NoRoom`."""
        descriptor = os.memfd_create(name)
        try:
            reserve(descriptor, size)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self.memory = memoryview(mmap.mmap(descriptor, size, flags=flags))
        finally:
            os.close(descriptor)
        self.name = name
        #: What a slab's header says: names, and everything that is not a tensor.
        self.names: list[str] = []
        self.counters: dict[str, int] = {}

    def places(self, tensors: dict[str, Tensor]) -> list[Piece]:
        at, pieces = PAGE, []
        for tensor in tensors.values():
            size = tensor.numel() * tensor.element_size()
            pieces.append(Piece(tensor=tensor, place=self.memory[at : at + size]))
            at += -(-size // PAGE) * PAGE
        return pieces


class Trainer:
    """One model whose weights, master weights, moments and gradients are flat tensors."""

    def __init__(self, device: Device, *, small: bool, layers: int) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        shape = (
            {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
            if small
            else {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}
        )
        config = LlamaConfig(
            **shape,
            vocab_size=256 if small else 32768,
            num_hidden_layers=layers,
            num_key_value_heads=2 if small else 8,
            tie_word_embeddings=False,
        )
        self._vocabulary, self._device = config.vocab_size, device
        self._tokens = (2, 16) if small else (4, 512)
        with device.torch:
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation="eager"
            )
        self.size = sum(p.numel() for p in self.model.parameters())
        self.weights = self._flat(torch.bfloat16)
        self.gradients = self._flat(torch.bfloat16)
        self.master = torch.nn.Parameter(self._flat(torch.float32))
        self._adam = torch.optim.AdamW([self.master], lr=1e-3, betas=(0.9, 0.95), fused=True)
        self._step = torch.zeros((), dtype=torch.float32, device=device.torch)
        self.moments = {name: self._flat(torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        self._adam.state[self.master] = {"step": self._step, **self.moments}
        at = 0
        for parameter in self.model.parameters():
            end = at + parameter.numel()
            parameter.data = self.weights[at:end].view(parameter.shape)
            parameter.grad = self.gradients[at:end].view(parameter.shape)
            at = end
        self.open = False
        self.seen = 0

    def _flat(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.size, dtype=dtype, device=self._device.torch)

    def tensors(self, *, is_open: bool) -> dict[str, Tensor]:
        """What an image holds."""
        state = {"weights": self.weights, "master": self.master.detach(), **self.moments}
        return state | ({"gradients": self.gradients} if is_open else {})

    def counters(self) -> dict[str, int]:
        return {"step": int(self._step), "open": self.open, "seen": self.seen}

    def set_counters(self, counters: dict[str, int]) -> None:
        self._step.fill_(counters["step"])
        self.open, self.seen = bool(counters["open"]), counters["seen"]
        if not self.open:
            self.gradients.zero_()

    def reset(self) -> None:
        """The same fresh state for every job."""
        generator = torch.Generator(self._device.torch).manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)
            self.master.copy_(self.weights)
        for moment in self.moments.values():
            moment.zero_()
        self.set_counters({"step": 0, "open": 0, "seen": 0})

    def run(self, job: str, operations: str) -> list[float]:
        """Losses."""
        losses = []
        for operation in operations:
            if operation == "f":
                losses.append(self._forward_backward(job))
            else:
                self._optimizer_step()
        return losses

    def _forward_backward(self, job: str) -> float:
        generator = torch.Generator().manual_seed(1000 * ord(job) + self.seen)
        rows, length = self._tokens
        tokens = torch.randint(0, self._vocabulary, (rows, length + 1), generator=generator)
        tokens = tokens.to(self._device.torch)
        logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.reshape(-1, self._vocabulary).float(), tokens[:, 1:].reshape(-1)
        )
        loss.backward()
        self.open, self.seen = True, self.seen + 1
        return float(loss.detach())

    def _optimizer_step(self) -> None:
        self.master.grad = self.gradients.float()
        self._adam.step()
        self.master.grad = None
        self.weights.copy_(self.master.detach())
        self.gradients.zero_()
        self.open = False

    def digest(self) -> str:
        """Of everything that an image between two steps holds."""
        return digest_of(self.tensors(is_open=self.open))

    def give_back(self) -> None:
        """All memory of the state, as a skeleton does for one of another architecture."""
        for tensor in self.tensors(is_open=True).values():
            tensor.untyped_storage().resize_(0)

    def take_again(self) -> None:
        """Memory for the state; its content comes from an image."""
        for tensor in self.tensors(is_open=True).values():
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def digest_of(tensors: Mapping[str, Tensor]) -> str:
    """Of their bytes; several threads, because one takes a minute for what a GPU holds."""
    chunks = [
        chunk
        for tensor in tensors.values()
        for chunk in tensor.detach().reshape(-1).view(torch.uint8).split(DIGESTED)
    ]

    def one(chunk: Tensor) -> bytes:
        host = chunk.cpu()
        return hashlib.sha256(
            (ctypes.c_ubyte * host.numel()).from_address(host.data_ptr())
        ).digest()

    with ThreadPoolExecutor(min(16, len(os.sched_getaffinity(0)))) as pool:
        return hashlib.sha256(b"".join(pool.map(one, chunks))).hexdigest()


def image_bytes(parameters: int) -> int:
    """Of a slab for an open step: weights, masters, two moments and gradients."""
    pages = sum(-(-parameters * width // PAGE) for width in (2, 4, 4, 4, 2))
    return (pages + 1) * PAGE


class Switcher:
    """Images of both jobs and a spare slab, as an agent keeps them."""

    def __init__(self, trainer: Trainer, device: Device, slabs: list[HostImage]) -> None:
        """Three of them."""
        self._trainer, self._device, self._slabs = trainer, device, slabs
        self.mover = Mover.for_device(device.torch)
        self.pin_s = 0.0
        for slab in slabs:
            started = time.perf_counter()
            self.mover.pin(slab.name, slab.memory)
            self.pin_s += time.perf_counter() - started
        self.images = {"a": slabs[0], "b": slabs[1]}
        self.spare = slabs[2]
        self.pinned = all(torch.frombuffer(s.memory, dtype=torch.uint8).is_pinned() for s in slabs)
        self.seconds: list[float] = []

    def close(self) -> None:
        """The slabs' memory can be given back then."""
        for slab in self._slabs:
            self.mover.unpin(slab.name)
        self.images.clear()
        self._slabs.clear()
        del self.spare
        gc.collect()

    def save(self, job: str) -> int:
        """Into the spare slab, which is the job's image then."""
        moved = self.mover.move(out=self._leave())
        self._keep(job)
        return moved

    def load(self, job: str) -> int:
        image = self.images[job]
        moved = self.mover.move(into=self._come(image))
        self._trainer.set_counters(image.counters)
        return moved

    def switch(self, leaving: str, coming: str) -> int:
        """Both at the same time."""
        out, image = self._leave(), self.images[coming]
        moved = self.mover.move(out=out, into=self._come(image))
        self._keep(leaving)
        self._trainer.set_counters(image.counters)
        return moved

    def timed_switch(self, leaving: str, coming: str) -> tuple[int, float]:
        moved = 0

        def act() -> None:
            nonlocal moved
            moved = self.switch(leaving, coming)

        seconds = self._device.timed(act)
        return moved, seconds

    def _leave(self) -> list[Piece]:
        tensors = self._trainer.tensors(is_open=self._trainer.open)
        self.spare.names, self.spare.counters = list(tensors), self._trainer.counters()
        return self.spare.places(tensors)

    def _come(self, image: HostImage) -> list[Piece]:
        tensors = self._trainer.tensors(is_open=True)
        return image.places({name: tensors[name] for name in image.names})

    def _keep(self, job: str) -> None:
        self.images[job], self.spare = self.spare, self.images[job]

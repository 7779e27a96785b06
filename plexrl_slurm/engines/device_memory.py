"""How much device memory an engine takes, and what is refused because of it.

Two engines that take turns on the same GPUs: the one gives its memory back, what it could not
give back is measured, and the other gets its turn only if its memory is really there.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass

from plexrl_slurm.core.errors import DeviceBusy


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Of all GPUs of a rank together. Without GPUs, the engine's own books."""

    #: On GPUs: whoever has it, contexts and graphs too. Else: what the engine's tensors take.
    used: int
    #: ``None`` without GPUs: there it is the host's memory, which this engine has no share of.
    free: int | None = None


def check_given_back(memory: DeviceMemory, *, limit: int, who: str, beside: int = 0) -> None:
    """Raise ``DeviceBusy`` if more than ``limit`` is left of an engine that sleeps.

    ``beside``: what others that sleep may keep; on GPUs theirs is in use too.
    """
    limit += 0 if memory.free is None else beside
    if memory.used > limit:
        raise DeviceBusy(
            f"{who} sleeps and {memory.used / 2**20:.0f} MiB of device memory are still in use, "
            f"with {limit / 2**20:.0f} MiB allowed: raise residual_bytes, or see what else is on "
            f"these GPUs"
        )


def check_room(memory: DeviceMemory, *, needed: int, who: str) -> None:
    """Raise ``DeviceBusy`` if an engine would be given memory that is not free."""
    if memory.free is not None and memory.free < needed:
        raise DeviceBusy(
            f"{who} needs {needed / 2**20:.0f} MiB of device memory and "
            f"{memory.free / 2**20:.0f} MiB are free: see what else is on these GPUs"
        )


def on_gpu() -> DeviceMemory | None:
    """Of the GPU that this process computes on; ``None`` without one."""
    import torch

    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(used=total - free, free=free)


def together(parts: Iterable[DeviceMemory]) -> DeviceMemory:
    """Of several processes with a GPU each; the fullest GPU says what is free."""
    parts = list(parts)
    free = [part.free for part in parts if part.free is not None]
    return DeviceMemory(
        used=sum(part.used for part in parts), free=min(free) * len(free) if free else None
    )


def on_the_same(parts: Iterable[DeviceMemory]) -> DeviceMemory:
    """Of several engines on the same GPUs, each of which sees all that is used there."""
    parts = list(parts)
    if any(part.free is not None for part in parts):
        return parts[-1]
    return DeviceMemory(used=sum(part.used for part in parts))

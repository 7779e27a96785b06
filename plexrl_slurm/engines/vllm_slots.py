"""A *slot*: one AsyncLLM with its processes, which samples any weights of one architecture.

A slot that sleeps has given its device memory back and keeps its processes, so that it is awake
again after a reload of weights and not after a start of vLLM. What its workers do for that is in
:mod:`plexrl_slurm.engines.vllm_extension`.
"""

import asyncio
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import InvalidTransition
from plexrl_slurm.engines import snapshot_files
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.device_memory import DeviceMemory, together
from plexrl_slurm.engines.gpus import has_gpus
from plexrl_slurm.engines.processes import Watch
from plexrl_slurm.engines.vllm_extension import RANK_PID, WorkerExtension

_EXTENSION: Final = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"


class Slot:
    """One AsyncLLM and what is in it."""

    def __init__(self, engine: Any, model: ModelSpec, files: list[Path]) -> None:
        """``files``: the weights that the engine was started with, the model folder's own."""
        self.engine = engine
        #: The catalogue entry whose weights it holds.
        self.model = model
        #: Shape of every tensor of the architecture.
        self.shapes = shapes_of(files)
        #: ``None`` while it holds no weights: they are being replaced, or that failed, or asleep.
        self.key: snapshot_files.Key | None = snapshot_files.key_of(files)
        self.asleep = False
        #: Calls that it is working on.
        self.running: set[str] = set()
        self._watch: Watch | None = None

    @classmethod
    async def open(
        cls, spec: RankSpec, model: ModelSpec, *, ended: Callable[[str], None]
    ) -> "Slot":
        """Start vLLM (tens of seconds); ``ended`` is told when one of its processes ends."""
        files = snapshot_files.find(Path(model.path))
        slot = cls(await asyncio.to_thread(_start_engine, spec, model), model, files)
        slot._watch = Watch(_names(await slot.ask("plexrl_pids")), ended)
        await slot.ask("plexrl_draws")
        return slot

    async def ask(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the extension in every worker; the answers in rank order."""
        answers: list[Any] = await self.engine.collective_rpc(method, args=args)
        return answers

    async def load(self, files: list[Path], key: snapshot_files.Key, model: ModelSpec) -> int:
        """Replace the weights in place; each worker takes its share. Returns the bytes moved."""
        self.key = None
        await self.ask("plexrl_load", [str(file) for file in files])
        if not await self.engine.reset_prefix_cache():
            raise InvalidTransition("prefix cache", "in use", f"reset for {files[0]}", ())
        self.key, self.model = key, model
        return sum(size for _, _, _, size in key)

    async def sleep(self) -> None:
        """Give the memory of weights and KV cache back, in every worker."""
        self.key, self.asleep = None, True
        await self.ask("plexrl_sleep")

    async def wake(self) -> None:
        """Take it again; :meth:`load` has to fill it."""
        await self.ask("plexrl_wake")
        self.asleep = False

    async def memory(self) -> DeviceMemory:
        """What its workers take now."""
        answers = await self.ask("plexrl_memory")
        return together(DeviceMemory(used=used, free=free) for used, free in answers)

    async def close(self) -> None:
        """End its processes."""
        if self._watch is not None:
            self._watch.close()
        if (handler := self.engine.output_handler) is not None:
            handler.cancel()  # or it takes the end of the engine's process for a crash
            await asyncio.wait((handler,))
        await asyncio.to_thread(self.engine.shutdown)
        self.engine = None
        # It is part of cycles, and its __del__ must not run while Python ends.
        await asyncio.to_thread(gc.collect)


def shapes_of(files: list[Path]) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every tensor in some files."""
    return dict(shape for file in files for shape in snapshot_files.shapes_in(file))


def _names(pids: list[tuple[int, int]]) -> dict[int, str]:
    """What the processes are, from what the workers say of themselves and their creators."""
    names = {creator: "the engine's process" for _, creator in pids if creator != os.getpid()}
    many = len(pids) > 1
    for rank, (pid, _) in enumerate(pids):
        names[pid] = f"tensor-parallel worker {rank}" if many else "the engine's process"
    return names


def _start_engine(spec: RankSpec, model: ModelSpec) -> Any:
    """Import vLLM and start one AsyncLLM; takes about ten seconds and blocks."""
    threads = max(1, len(spec.cores) // spec.gpus)
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)  # this thread's, which the engine process inherits
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": thread_binding(spec.cores, spec.gpus, threads),
            # Workers talk to each other on this node only.
            "VLLM_HOST_IP": "127.0.0.1",
            # One process less between us and the weights: on one core 19 ms against 25 ms
            # for a small request, and a start of 10 s against 30 s.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            RANK_PID: str(os.getpid()),
        }
    )
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model.path,
            dtype=model.dtype,
            max_model_len=model.max_context_length,
            tensor_parallel_size=spec.gpus,
            max_num_seqs=int(spec.options.get("max_num_seqs", 256)),
            # A prompt cut in two samples a token too many and takes it back, which a seeded
            # generator of the CPU cannot: "CPU Generator does not use offset" ends the engine.
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(2048, model.max_context_length),
            block_size=int(spec.options.get("block_size", 32)),
            enable_prefix_caching=bool(spec.options.get("prefix_caching", False)),
            kv_cache_memory_bytes=int(spec.options.get("kv_cache_bytes", 256 << 20)),
            gpu_memory_utilization=0.1,
            max_logprobs=-1,
            enforce_eager=True,
            enable_sleep_mode=has_gpus(),
            disable_log_stats=True,
            worker_extension_cls=_EXTENSION,
        )
    )


def thread_binding(cores: tuple[int, ...], gpus: int, threads: int) -> str:
    """``0,1|2,3``: cores of each tensor-parallel worker; ``nobind`` when there are too few."""
    if len(cores) < gpus:
        return "nobind"
    shares = (cores[start * threads : (start + 1) * threads] for start in range(gpus))
    return "|".join(",".join(map(str, share)) for share in shares)

"""What we add to vLLM's worker, inside the worker's process.

Importing it there starts a thread that waits for the end of the rank process, so that a rank
that was killed leaves nothing running: vLLM's own engine process would wait for ever.
"""

import multiprocessing
import os
import select
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from plexrl_slurm.engines.device_memory import on_gpu
from plexrl_slurm.engines.vllm_draws import Draws
from plexrl_slurm.engines.vllm_host import HostWorker

#: Environment variable with the pid of the rank process.
RANK_PID: Final = "PLEXRL_RANK_PID"


class WorkerExtension:
    """Mixed into vLLM's worker class; every method can be called by ``collective_rpc``."""

    def plexrl_pids(self) -> tuple[int, int]:
        """This process, and the one that started it."""
        return os.getpid(), os.getppid()

    def plexrl_draws(self) -> None:
        """Let requests go on after a pause with the draws that they would have had."""
        worker: Any = self
        if not hasattr(self, "_plexrl_draws"):
            self._plexrl_draws = Draws(worker.model_runner)

    def plexrl_load(self, paths: Sequence[str]) -> None:
        """Replace the weights in place by those in some safetensors files."""
        worker: Any = self
        if worker.device.type == "cpu":
            self._plexrl_reload(_tensors(paths))
            return
        from plexrl_slurm.engines.vllm_layout import DeviceWeights

        if not hasattr(self, "_plexrl_weights"):
            self._plexrl_weights = DeviceWeights(worker.get_model(), worker.device)
        self._plexrl_weights.load(dict(_tensors(paths)), reload=self._plexrl_reload)

    def _plexrl_reload(self, tensors: Iterator[tuple[str, Any]]) -> None:
        """As vLLM does it: every layer is made anew, and packed for its kernels."""
        worker: Any = self
        worker.reload_weights(weights_iterator=tensors)
        # A tied head has no tensor of its own, so the reload leaves its packed copy (CPU) stale.
        head: Any = getattr(worker.get_model(), "lm_head", None)
        if worker.model_config.hf_text_config.tie_word_embeddings and hasattr(head, "weight"):
            head.quant_method.process_weights_after_loading(head)

    def plexrl_sleep(self) -> None:
        """Give the memory of weights and KV cache back; what is in them is gone."""
        worker: Any = self
        if worker.device.type != "cpu":
            worker.sleep(level=2)
        elif not hasattr(self, "_plexrl_released"):
            self._plexrl_released = HostWorker(worker).release()

    def plexrl_wake(self) -> None:
        """Take that memory again; the weights have to be loaded."""
        worker: Any = self
        if worker.device.type != "cpu":
            worker.wake_up()
        elif hasattr(self, "_plexrl_released"):
            self._plexrl_released.take()
            del self._plexrl_released

    def plexrl_memory(self) -> tuple[int, int | None]:
        """Used and free: of this worker's GPU; without one, what weights and KV cache take."""
        gpu = on_gpu()
        return (HostWorker(self).bytes, None) if gpu is None else (gpu.used, gpu.free)


def _tensors(paths: Sequence[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                yield name, file.get_tensor(name)


def _end_with(rank: int) -> None:
    """Wait until process ``rank`` has ended, then end this one and the engine between them."""
    with suppress(ProcessLookupError):  # it ended before we looked
        poll = select.poll()
        poll.register(os.pidfd_open(rank), select.POLLIN)
        poll.poll()
    # Asked only now: it is not known yet while a spawned process imports its main module.
    creator = multiprocessing.parent_process()
    if creator is not None and creator.pid is not None and creator.pid != rank:
        with suppress(ProcessLookupError):
            os.kill(creator.pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_rank() -> None:
    rank = int(os.environ.get(RANK_PID, "0"))
    if rank not in (0, os.getpid()):
        watch = threading.Thread(target=_end_with, args=(rank,), name="watch-rank", daemon=True)
        watch.start()


_watch_rank()

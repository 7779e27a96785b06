"""One DeepSpeed ZeRO engine that many deployments take turns in: what an image holds.

Deployments of one architecture are copied in and out of the engine's own flat buffers, in
place. DeepSpeed runs with ``managed_gradient_accumulation`` off: a backward pass only
accumulates and ``step()`` is the boundary, so a step may stay open for as long as one likes
and its gradients are part of the image. Which attributes hold what was found by experiment with
DeepSpeed 0.19 (bit-identity at ZeRO-1, 2 and 3, with and without offload, fp32 and bf16, one, two
and four ranks; the tests of this package repeat it); another release must pass the same tests
before it is allowed. Where each
stage keeps its tensors is in :mod:`plexrl_slurm.engines.buffers`.
"""

import ctypes
import io
import logging
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.shards import Groups
from plexrl_slurm.core.zero import ZeroLayout
from plexrl_slurm.engines import storages
from plexrl_slurm.engines.batching import MicroBatch
from plexrl_slurm.engines.buffers import Buffers, ShardedWeights, WholeWeights
from plexrl_slurm.engines.infinity import Swapped
from plexrl_slurm.engines.policy import Policy

#: Counters of the engine and of its ZeRO optimizer that a deployment takes with it.
_ENGINE_COUNTERS: Final = (
    "global_steps",
    "micro_steps",
    "global_samples",
    "skipped_steps",
    "_unmanaged_backward_count",
    "_step_applied",
)
_ZERO_COUNTERS: Final = (
    "micro_step_id",
    "_epilogue_ran_this_backward",
    "_backward_seen_this_step",
    "overflow",
)
#: Gradients are reduced in buckets of so many elements.
_BUCKET_ELEMENTS: Final = 1 << 24
#: With the optimizer's state on a disk, a step moves so many elements at once.
_SUB_GROUP_ELEMENTS: Final = 1 << 26


def dtype_name(tensor: Tensor) -> str:
    """``float32``, ``bfloat16``, …"""
    return str(tensor.dtype).removeprefix("torch.")


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's bytes in host memory, not copied if they are there; keep the tensor alive."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return memoryview(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    # Not through numpy(): that would make the storage one that cannot be given back.
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


@contextmanager
def quiet() -> Iterator[None]:
    """Other people's deprecation warnings and progress reports end here."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


class Skeleton:
    """The engine of one architecture. Whose state is in it is its owner's business."""

    def __init__(
        self, model: ModelSpec, base: Any, *, layout: ZeroLayout, scratch: Path | None
    ) -> None:
        """Build it; all ranks together. Its first content is ``base`` (see :func:`read_model`), but
        for what is in swap folders; ``scratch`` is one for what belongs to nobody."""
        import deepspeed

        self.architecture = model.architecture
        self.layout = layout
        self.policy = Policy(base)
        for parameter in self.policy.parameters():
            parameter.data = parameter.data.clone()  # mapped from the file until now
        groups = _parameter_groups(self.policy, layout)
        names = {id(each): name for name, each in self.policy.model.named_parameters()}
        #: Names and sizes of the parameters, by DeepSpeed's parameter groups.
        self.groups: Groups = [
            [(names[id(each)], each.numel()) for each in group] for group in groups
        ]
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        with quiet():
            self._engine = deepspeed.initialize(
                model=self.policy,
                model_parameters=[{"params": group} for group in groups],
                config=_config(model, layout, scratch),
            )[0]
        self._zero: Any = self._engine.optimizer
        self._inner: Any = self._zero.optimizer
        self._buffers: Buffers = (
            ShardedWeights(self.policy, self._zero)
            if layout.stage == 3
            else WholeWeights(self.policy, self._zero, partition_gradients=layout.stage == 2)
        )
        #: What of the masters and moments lies on a disk.
        self.swapped = Swapped(self._zero) if layout.swap_optimizer else None
        on_disk = self.swapped.groups if self.swapped is not None else ()
        for index, master in enumerate(self._buffers.masters):
            if index in on_disk:
                continue
            # What AdamW would make in its first step, so that images can be copied into it.
            self._inner.state[master] = {
                "step": 0
                if layout.offload_optimizer
                else torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master.detach()),
                "exp_avg_sq": torch.zeros_like(master.detach()),
            }
        #: True between a forward_backward and the optim_step that ends the step.
        self.open = False
        #: Where gradients of a loaded open step live.
        self._slots: dict[str, Tensor] = {}
        #: Its memory, while it sleeps.
        self._released: storages.Released | None = None
        self._fresh = self.counters()

    # -- the state ---------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps that the content has taken."""
        return int(next(iter(self._inner.state.values()))["step"])

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return self._buffers.parameters()

    def weights(self) -> dict[str, Tensor]:
        """Parameters as the model computes with them; at ZeRO-3 this rank's share."""
        return {f"weights.{i}": t for i, t in enumerate(self._buffers.weights())}

    def masters(self) -> dict[str, Tensor]:
        """This rank's share of the fp32 master weights."""
        found = {f"master.{i}": t.detach() for i, t in enumerate(self._buffers.masters)}
        return found | self._on_disk("master")

    def moments(self) -> dict[str, Tensor]:
        """This rank's share of AdamW's moments."""
        found = {
            f"{name}.{i}": self._inner.state[master][name]
            for i, master in enumerate(self._buffers.masters)
            for name in ("exp_avg", "exp_avg_sq")
        }
        return found | self._on_disk("exp_avg")

    def _on_disk(self, part: str) -> dict[str, Tensor]:
        tensors = self.swapped.tensors() if self.swapped is not None else {}
        return {name: tensor for name, tensor in tensors.items() if name.startswith(part)}

    def _in_memory(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        groups = self.swapped.groups if self.swapped is not None else frozenset()
        return {
            name: tensor
            for name, tensor in tensors.items()
            if int(name.rpartition(".")[2]) not in groups or name.startswith("weights")
        }

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the open step; empty when none is open."""
        return self._buffers.gradients() if self.open else {}

    def image(self) -> dict[str, Tensor]:
        """Everything that an image must hold: moments only once there are some."""
        state = {**self.weights(), **self._in_memory(self.masters())}
        if self.step:
            state |= self._in_memory(self.moments())
        return state | {name: t.detach() for name, t in self.gradients().items()}

    def counters(self) -> dict[str, int]:
        """Everything that an image must hold and that is not a tensor."""
        found = {f"engine.{name}": getattr(self._engine, name) for name in _ENGINE_COUNTERS}
        found |= {f"zero.{name}": getattr(self._zero, name) for name in _ZERO_COUNTERS}
        found |= {**self._buffers.state(), "open": self.open}
        return {name: int(value) for name, value in found.items()} | {"step": self.step}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """The counterpart of :meth:`counters`; gradients must have been set before."""
        for name in _ENGINE_COUNTERS:
            was = getattr(self._engine, name)
            setattr(self._engine, name, type(was)(counters[f"engine.{name}"]))
        for name in _ZERO_COUNTERS:
            was = getattr(self._zero, name)
            setattr(self._zero, name, type(was)(counters[f"zero.{name}"]))
        self._set_step(counters["step"])
        self.open = bool(counters["open"])
        self._buffers.set_state(counters, is_open=self.open)

    def _set_step(self, step: int) -> None:
        for state in self._inner.state.values():
            if isinstance(state["step"], int):
                state["step"] = step
            else:
                state["step"].fill_(step)

    def prepare(
        self, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> dict[str, Tensor]:
        """Where the tensors of an image with this table belong; :meth:`settle` comes after them.

        Whatever gradients were there are forgotten. Raises ``KeyError`` for a foreign name.
        """
        places = {
            **self.weights(),
            **self._in_memory(self.masters()),
            **self._in_memory(self.moments()),
        }
        self._buffers.forget_gradients()
        grads = {name: shape for name, shape in tensors.items() if name.startswith("grad.")}
        for name, (dtype, shape) in grads.items():
            places[name] = self._buffers.place(name, partial(self._slot, name, dtype, shape))
        return {name: places[name] for name in tensors}

    def _slot(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
    ) -> Tensor:
        if name not in self._slots:
            self._slots[name] = torch.empty(shape, dtype=dtype, device=device)
        return self._slots[name]

    def settle(self, tensors: Collection[str], counters: Mapping[str, int]) -> None:
        """All tensors of an image are in place: moments that it lacks are zero."""
        moments = self._in_memory(self.moments())
        if not any(name in tensors for name in moments):
            for tensor in moments.values():
                tensor.zero_()
        self.set_counters(counters)
        self.refresh()

    def reset_moments(self) -> None:
        """Zero moments and step, as before the first optimizer step."""
        for tensor in self.moments().values():
            tensor.zero_()
        self._set_step(0)

    def close_step(self) -> None:
        """Forget an open step: no gradients, counters as between two steps."""
        counters = self.counters()
        self._buffers.forget_gradients()
        fresh = {f"zero.{name}": self._fresh[f"zero.{name}"] for name in _ZERO_COUNTERS}
        self.set_counters(
            {**counters, **fresh, "engine._unmanaged_backward_count": 0, "zero.ready": 0, "open": 0}
        )

    def reset(self, base: Any) -> None:
        """Fresh state: the weights of ``base`` (see :func:`read_model`), zero moments, step 0."""
        self._buffers.fill(dict(base.named_parameters()))
        with self.rewritten():
            self._buffers.follow_weights(list(self.masters().values()))
            self.reset_moments()
        self._buffers.forget_gradients()
        self.set_counters(self._fresh)
        self.refresh()

    @contextmanager
    def rewritten(self) -> Iterator[None]:
        """While all masters and moments are written from outside; room for them has been made
        with ``swapped.begin()``."""
        if self.swapped is not None:
            self.swapped.fresh()
        yield
        if self.swapped is not None:
            self.swapped.commit()

    def refresh(self) -> None:
        """To be called when the weights have been changed from outside."""
        self._buffers.refresh()

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Parameters by their Hugging Face names, tied ones once.

        At ZeRO-3 on rank 0 only, and all ranks must ask.
        """
        return list(self._buffers.named())

    @property
    def bytes(self) -> int:
        """What its tensors take on this rank."""
        return storages.bytes_of(self._tensors())

    def sleep(self) -> None:
        """Give the memory back; what was in it is gone, until :meth:`wake` and a new content."""
        if self._released is None:
            self._released = storages.Released(self._tensors())
            if self.swapped is not None:
                self.swapped.leave()
            self._slots.clear()
            self._buffers.forget_gradients()
            self.open = False

    def wake(self) -> None:
        """Take the memory again, for :meth:`reset` or :meth:`prepare` to fill."""
        if self._released is not None:
            self._released.take()
            self._released = None

    def _tensors(self) -> list[Tensor]:
        state = {**self._in_memory(self.moments()), **self.gradients()}
        return [*self._buffers.all(), *state.values(), *self._slots.values()]

    # -- computing ---------------------------------------------------------------------------

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Logprobs without a gradient; no counter moves."""
        with torch.no_grad(), quiet():
            result: Tensor = self.policy(batch)
        return result

    def forward(self, batch: MicroBatch) -> Tensor:
        """Logprobs that a loss can be made of."""
        with quiet():
            result: Tensor = self._engine(batch)
        return result

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients to the open step, or open one. Collective from ZeRO-2."""
        if self.layout.stage == 3:
            # It can only average over the ranks.
            loss = loss * torch.distributed.get_world_size()
        with quiet():
            self._engine.backward(loss)
        self.open = True

    def take_step(self, *, clip: float, **adam: Any) -> float:
        """AdamW with the open step's gradients; the global norm before clipping.

        Not finite: nothing was changed, but the gradients are gone. Collective.
        """
        self._zero.clip_grad = clip
        for group in self._inner.param_groups:
            group.update(adam)
        if not self.layout.decay_vectors:
            self._inner.param_groups[-1]["weight_decay"] = 0.0
        if self.layout.offload_optimizer:
            self._forget_beta_powers()
        with quiet():
            self._engine.step()
        self.open = False
        skipped = bool(self._zero.overflow)
        if self.swapped is not None:
            (self.swapped.abandon if skipped else self.swapped.commit)()
        return float("nan") if skipped else float(self._zero._global_grad_norm)

    def _forget_beta_powers(self) -> None:
        """Make DeepSpeedCPUAdam compute beta^step anew.

        In C++ it multiplies by beta from step to step, unless somebody else's step came in
        between or the process is a new one; a new object has nothing to multiply.
        """
        inner, group = self._inner, self._inner.param_groups[0]
        inner.ds_opt_adam.create_adam(
            inner.opt_id,
            group["lr"],
            *group["betas"],
            group["eps"],
            group["weight_decay"],
            inner.adam_w_mode,
            False,
        )


def _parameter_groups(policy: Policy, layout: ZeroLayout) -> list[list[Any]]:
    """Those that decay, and those that do not if there are such."""
    parameters = list(policy.parameters())
    if layout.decay_vectors:
        return [parameters]
    return [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]


def read_model(model: ModelSpec) -> Any:
    """The model of a folder."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    if not (Path(model.path) / "config.json").is_file():
        raise BadInput(f"model {model.name}: there is no config.json in {model.path}")
    transformers_logging.disable_progress_bar()
    with quiet():
        return AutoModelForCausalLM.from_pretrained(
            model.path,
            dtype=getattr(torch, model.dtype),
            attn_implementation="sdpa",
            local_files_only=True,
        )


def _config(model: ModelSpec, layout: ZeroLayout, scratch: Path | None) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": layout.stage,
        "overlap_comm": False,
        "reduce_bucket_size": _BUCKET_ELEMENTS,
    }
    # Not pinned: what moves is copied by us, and images are not pinned either.
    host = {"device": "cpu", "pin_memory": False}
    if layout.offload_optimizer:
        zero["offload_optimizer"] = host
    if layout.swap_optimizer:
        zero["offload_optimizer"] = {**host, "device": "nvme", "nvme_path": str(scratch)}
        zero["sub_group_size"] = _SUB_GROUP_ELEMENTS
    if layout.offload_param:
        zero["offload_param"] = host
    if layout.stage == 3:
        # No parameter stays whole between calls: loading an image would have to gather it.
        zero["stage3_param_persistence_threshold"] = 0
    adam: dict[str, Any] = {"lr": 0.0}
    if not layout.offload_optimizer:
        adam |= {"torch_adam": True, "fused": True}  # its whole state is in tensors
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        # Losses are sums over tokens, so gradients are sums over ranks; see also backward().
        "gradient_allreduce_op": "mean" if layout.stage == 3 else "sum",
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": adam},
        "bf16": {"enabled": model.dtype == "bfloat16"},
        "steps_per_print": None,
    }

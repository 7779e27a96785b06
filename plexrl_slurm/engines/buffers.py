"""Where DeepSpeed's ZeRO optimizers keep a deployment's tensors, for each stage."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Buffers(Protocol):
    """What a skeleton asks of the optimizer; gradients are those of an open step."""

    @property
    def masters(self) -> list[Any]:
        """This rank's share of the fp32 master weights."""

    def parameters(self) -> int:
        """Number of parameters on all ranks, tied ones once."""

    def weights(self) -> list[Tensor]:
        """What this rank has of the weights between two calls."""

    def gradients(self) -> dict[str, Tensor]:
        """By name; the caller knows whether a step is open."""

    def place(self, name: str, make: "SlotMaker") -> Tensor:
        """Where a gradient of this name is to be copied; ``KeyError``: there is none such."""

    def forget_gradients(self) -> None:
        """As between two steps."""

    def state(self) -> dict[str, int]:
        """Small things beside the common counters."""

    def set_state(self, state: Mapping[str, int], *, is_open: bool) -> None:
        """The counterpart; gradients and common counters must have been set before."""

    def fill(self, base: Mapping[str, Tensor]) -> None:
        """Take these weights, by the names of :meth:`named`."""

    def follow_weights(self, masters: Sequence[Tensor]) -> None:
        """Make these, the master weights, those of the model."""

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights on rank 0. All ranks together."""

    def refresh(self) -> None:
        """Forget whatever was made of weights that have changed."""

    def all(self) -> Iterable[Tensor]:
        """Everything that takes memory even when no step is open."""


class SlotMaker(Protocol):
    """Makes the tensor for a gradient that the optimizer has no tensor for yet."""

    def __call__(self, device: torch.device) -> Tensor: ...


class WholeWeights:
    """ZeRO-1 and 2: every rank has all weights."""

    def __init__(self, policy: Any, zero: Any, *, partition_gradients: bool) -> None:
        self._model, self._parameters = policy.model, list(policy.parameters())
        self._zero = zero
        self._partitioned = partition_gradients

    @property
    def masters(self) -> list[Any]:
        return list(self._zero.single_partition_of_fp32_groups)

    def parameters(self) -> int:
        return sum(p.numel() for p in self._parameters)

    def weights(self) -> list[Tensor]:
        return list(self._zero.bit16_groups_flat)

    def gradients(self) -> dict[str, Tensor]:
        if not self._partitioned:
            return {
                f"grad.{i}": p.grad for i, p in enumerate(self._parameters) if p.grad is not None
            }
        if self._zero.cpu_offload:
            found = self._zero.accumulated_grads_in_cpu
            return {f"grad.cpu.{i}": found[i] for i in sorted(found)}
        return {
            f"grad.{group}.{i}": tensor
            for group, tensors in self._zero.all_grad_tensors.items()
            for i, tensor in enumerate(tensors or ())
        }

    def place(self, name: str, make: SlotMaker) -> Tensor:
        group, _, index = name.removeprefix("grad.").rpartition(".")
        in_host = self._partitioned and self._zero.cpu_offload
        slot = make(torch.device("cpu") if in_host else self._parameters[0].device)
        if not self._partitioned:
            self._parameters[int(index)].grad = slot
        elif in_host:
            self._zero.accumulated_grads_in_cpu[int(index)] = slot
        else:
            self._zero.all_grad_tensors.setdefault(int(group), []).append(slot)
        return slot

    def forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._zero.all_grad_tensors = {}
        self._zero.averaged_gradients = {}
        if self._zero.cpu_offload:
            self._zero.accumulated_grads_in_cpu = {}

    def state(self) -> dict[str, int]:
        return {"zero.ready": int(self._zero.ready_for_gradients)}

    def set_state(self, state: Mapping[str, int], *, is_open: bool) -> None:
        if self._zero.cpu_offload:
            # Every parameter has a gradient in every backward pass.
            found = self._zero.accumulated_grads_in_cpu if is_open else ()
            self._zero._offload_accumulated_param_ids = set(found)
            self._zero.norm_for_param_grads = {}
            self._zero.local_overflow = False
        # The buckets of a ZeRO-1 step are set up by its first backward pass and dropped by
        # its last; without them the next backward pass of a loaded step finds none.
        self._zero._release_ipg_buffers()
        if state["zero.ready"]:
            self._zero.micro_step_id -= 1
            self._zero.setup_buckets()

    def fill(self, base: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(base[name])

    def follow_weights(self, masters: Sequence[Tensor]) -> None:
        for master, partitions, group in zip(
            masters,
            self._zero.parallel_partitioned_bit16_groups,
            self._zero.real_dp_process_group,
            strict=True,
        ):
            master.copy_(partitions[torch.distributed.get_rank(group)])

    def named(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

    def refresh(self) -> None:
        """Nothing is made of the weights."""

    def all(self) -> Iterable[Tensor]:
        return [*self.weights(), *(master.detach() for master in self.masters)]


class ShardedWeights:
    """ZeRO-3: every rank has a piece of each parameter, and of its gradient."""

    def __init__(self, policy: Any, zero: Any) -> None:
        import deepspeed

        self._model, self._zero = policy.model, zero
        self._parameters = list(policy.parameters())
        # The policy computes logprobs itself, outside the output layer's own forward pass.
        head = policy.model.get_output_embeddings().weight
        deepspeed.zero.register_external_parameter(policy, head)

    @property
    def masters(self) -> list[Any]:
        return list(self._zero.fp32_partitioned_groups_flat)

    def parameters(self) -> int:
        return sum(p.ds_numel for p in self._parameters)

    def weights(self) -> list[Tensor]:
        return list(self._zero.fp16_partitioned_groups_flat)

    def gradients(self) -> dict[str, Tensor]:
        return {"grad.flat": self._zero.grad_partitions_flat_buffer}

    def place(self, name: str, make: SlotMaker) -> Tensor:
        return self.gradients()[name]

    def forget_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._zero.averaged_gradients = {}

    def state(self) -> dict[str, int]:
        return {}

    def set_state(self, state: Mapping[str, int], *, is_open: bool) -> None:
        if self._zero.offload_optimizer:
            # Every parameter has a gradient in every backward pass; the last ranks may have
            # no piece of a small one.
            rank = torch.distributed.get_rank()
            self._zero._offload_boundary_param_ids = {
                p.ds_id
                for p in self._parameters
                if is_open and p.partition_numel() * rank < p.ds_numel
            }
            self._zero.norm_for_param_grads = {}
        elif is_open:
            pieces = self._zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
            self._zero.averaged_gradients = {
                i: [pieces[p.ds_id] for p in group]
                for i, group in enumerate(self._zero.fp16_groups)
            }

    def fill(self, base: Mapping[str, Tensor]) -> None:
        rank = torch.distributed.get_rank()
        for name, parameter in self._model.named_parameters():
            piece = parameter.ds_tensor
            size = piece.numel()
            mine = base[name].detach().reshape(-1)[rank * size : (rank + 1) * size]
            piece.zero_()  # the last piece is padded
            piece[: mine.numel()].copy_(mine)

    def follow_weights(self, masters: Sequence[Tensor]) -> None:
        for master, weights in zip(masters, self.weights(), strict=True):
            master.copy_(weights)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        first = torch.distributed.get_rank() == 0
        world = torch.distributed.get_world_size()
        for name, parameter in self._model.named_parameters():
            piece = parameter.ds_tensor.detach()
            pieces = [torch.empty_like(piece) for _ in range(world)] if first else None
            torch.distributed.gather(piece.contiguous(), pieces, dst=0)
            if pieces is not None:
                whole = torch.cat([part.reshape(-1) for part in pieces])
                yield name, whole[: parameter.ds_numel].reshape(parameter.ds_shape)

    def refresh(self) -> None:
        self._zero._partition_all_parameters()

    def all(self) -> Iterable[Tensor]:
        masters = [master.detach() for master in self.masters]
        # Where gradients wait to be reduced; nothing is in it between two calls.
        waiting = [bucket.buffer for bucket in self._zero.ipg_buckets.values()]
        return [*self.weights(), *masters, self._zero.grad_partitions_flat_buffer, *waiting]

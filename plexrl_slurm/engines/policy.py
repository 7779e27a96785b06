"""A causal language model that answers with logprobs of given tokens, in bounded memory."""

from typing import Any

import torch
from torch import Tensor, nn

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines.batching import MicroBatch

#: Logits (fp32) that exist at once.
_CHUNK_ELEMENTS = 1 << 25


class _Logprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    """Logprobs of ``targets`` from hidden states, a chunk of positions at a time.

    Only the log-normaliser is kept; the backward pass computes the logits of a chunk again,
    and skips positions whose logprob has no gradient (prompts, padding).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        wide = targets if targets.ndim == 2 else targets[:, None]
        logprobs = hidden.new_empty(wide.shape, dtype=torch.float32)
        norm = hidden.new_empty(len(hidden), dtype=torch.float32)
        for rows in _chunks(torch.arange(len(hidden), device=hidden.device), head):
            logits = (hidden[rows] @ head.T).float()
            norm[rows] = torch.logsumexp(logits, dim=-1)
            logprobs[rows] = logits.gather(1, wide[rows]) - norm[rows, None]
        ctx.save_for_backward(hidden, head, wide, norm)
        return logprobs.reshape(targets.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, head, wide, norm = ctx.saved_tensors
        grad = grads[0].reshape(wide.shape)
        to_hidden, to_head = torch.zeros_like(hidden), torch.zeros_like(head)
        for rows in _chunks(torch.nonzero((grad != 0).any(dim=1))[:, 0], head):
            logits = (hidden[rows] @ head.T).float()
            pull = (logits - norm[rows, None]).exp_().mul_(-grad[rows].sum(dim=1, keepdim=True))
            pull.scatter_add_(1, wide[rows], grad[rows])
            narrow = pull.to(head.dtype)
            to_hidden[rows] = narrow @ head
            to_head.addmm_(narrow.T, hidden[rows])
        return to_hidden, to_head, None


def _chunks(rows: Tensor, head: Tensor) -> tuple[Tensor, ...]:
    return rows.split(max(1, _CHUNK_ELEMENTS // len(head))) if len(rows) else ()


class Policy(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Wraps a Hugging Face causal model; DeepSpeed sees this module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        head = model.get_output_embeddings()
        for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
            if getattr(model.config, name, None) not in (None, 1.0):
                raise BadInput(
                    f"models whose config has {name} cannot be trained: take another base model"
                )
        if getattr(head, "bias", None) is not None:
            raise BadInput("models with a bias in the output layer cannot be trained")
        # Dropout would make the logprobs differ from the sampler's and need an RNG state.
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0

    @property
    def can_share_prefixes(self) -> bool:
        """Whether a 4-D mask means the same to every layer."""
        kinds = set(getattr(self.model.config, "layer_types", None) or ["full_attention"])
        return kinds == {"full_attention"}

    def forward(self, batch: MicroBatch) -> Tensor:
        """``[N]`` or ``[N, K]`` float32 logprobs of the micro-batch's targets."""
        states = self.model.base_model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        hidden = states.reshape(-1, states.shape[-1])[batch.places]
        head = self.model.get_output_embeddings().weight
        logprobs: Tensor = _Logprobs.apply(hidden, head, batch.targets)
        return logprobs[batch.expand]

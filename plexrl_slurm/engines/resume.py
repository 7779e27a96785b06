"""How a sample call that was paused at a token boundary goes on. No torch here.

It goes on as a prompt that is longer by what it has sampled. Its random draws go on too: a sample
whose seed has given n tokens takes the draws from n on, see :mod:`plexrl_slurm.engines.vllm_draws`.
"""

from typing import Final

import msgspec
import numpy as np

from plexrl_slurm import wire

#: ``stop_reason`` of a sequence that goes on.
PAUSED: Final = "paused"


def can_pause(body: wire.Sample) -> bool:
    """Whether it can be split between two tokens.

    Not if a stop string may lie across the border, nor if the logprobs of the prompt, which a run
    gives at its beginning, are wanted at its end.
    """
    return not (body.stop_strings or body.prompt_logprobs or body.topk_prompt_logprobs)


def rests(body: wire.Sample) -> list[int]:
    """Which of the samples of a resumed call go on; greedy ones are all the same one."""
    numbers = [i for i, before in enumerate(body.resume) if before.stop_reason == PAUSED]
    return numbers[:1] if body.temperature == 0 else numbers


def rest(body: wire.Sample, number: int) -> wire.Sample:
    """What is left of sample ``number`` as a call of its own."""
    done = body.resume[number].tokens
    return msgspec.structs.replace(
        body,
        prompt=[*body.prompt, *done],
        max_tokens=body.max_tokens - len(done),
        seed=body.seed + number,
        num_samples=1,
        resume=[],
    )


def whole(body: wire.Sample, ended: dict[int, wire.Sequence]) -> list[wire.Sequence]:
    """All samples of a resumed call, after those of :func:`rests` have come so far."""
    after = {number: joined(body.resume[number], sequence) for number, sequence in ended.items()}
    if body.temperature == 0:
        return [*after.values()] * body.num_samples if after else body.resume
    return [after.get(number, before) for number, before in enumerate(body.resume)]


def joined(before: wire.Sequence, after: wire.Sequence) -> wire.Sequence:
    """One sequence out of two stretches of it."""
    topk = after.topk
    if before.topk is not None and topk is not None:
        topk = wire.TopK(
            _stacked(before.topk.tokens, topk.tokens),
            _stacked(before.topk.logprobs, topk.logprobs),
        )
    return wire.Sequence(
        tokens=[*before.tokens, *after.tokens],
        logprobs=[*before.logprobs, *after.logprobs],
        stop_reason=after.stop_reason,
        topk=topk,
    )


def _stacked(first: wire.Array, second: wire.Array) -> wire.Array:
    return wire.Array.of(np.concatenate((first.numpy(), second.numpy())))

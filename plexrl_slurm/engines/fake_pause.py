"""How far a fake engine is with a sample call, and what is left of it after a pause."""

import asyncio
from contextlib import suppress

from plexrl_slurm import wire
from plexrl_slurm.engines.resume import PAUSED, can_pause


class Progress:
    """One run of a sample call whose answer is known from the start; its tokens come evenly."""

    def __init__(
        self, body: wire.Sample, output: wire.SampleOutput, delay_s: float, token_s: float
    ) -> None:
        self._body, self._output = body, output
        #: Tokens of the longest sample, and how many of them there were before.
        self._steps = max(len(sequence.tokens) for sequence in output.sequences)
        self._done = max((len(before.tokens) for before in body.resume), default=0)
        for before, sequence in zip(body.resume, output.sequences, strict=bool(body.resume)):
            assert sequence == before or _cut(sequence, len(before.tokens)) == before, (
                f"a call goes on from {before}, and never was there"
            )
        left = (self._steps - self._done) / self._steps
        self._seconds = (delay_s + token_s * self._steps) * left

    async def run(self, pause: asyncio.Event) -> wire.SampleOutput | wire.Paused:
        """The answer, or what there is of it when ``pause`` is set."""
        if not can_pause(self._body):
            pause = asyncio.Event()
        loop = asyncio.get_running_loop()
        began = loop.time()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await pause.wait()
            share = (loop.time() - began) / self._seconds if self._seconds else 1.0
            at = self._done + int((self._steps - self._done) * share)
            if at < self._steps:
                return wire.Paused([_cut(sequence, at) for sequence in self._output.sequences])
        if not self._body.resume:
            return self._output
        return wire.SampleOutput(
            sequences=self._output.sequences,
            cached_tokens=self._output.cached_tokens,
            prefilled=(len(self._body.prompt) + self._done, 1000),
        )


def _cut(sequence: wire.Sequence, tokens: int) -> wire.Sequence:
    if len(sequence.tokens) <= tokens:
        return sequence
    topk = sequence.topk
    if topk is not None:
        topk = wire.TopK(
            wire.Array.of(topk.tokens.numpy()[:tokens]),
            wire.Array.of(topk.logprobs.numpy()[:tokens]),
        )
    return wire.Sequence(
        tokens=sequence.tokens[:tokens],
        logprobs=sequence.logprobs[:tokens],
        stop_reason=PAUSED,
        topk=topk,
    )

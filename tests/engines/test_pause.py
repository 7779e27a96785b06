"""Samples that are paused at a token boundary, lose their engine, and go on elsewhere."""

import asyncio
import os
import warnings
from collections.abc import Awaitable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.engines.base import RankSpec
from plexrl_slurm.engines.vllm import VllmEngine

pytestmark = [
    pytest.mark.engines,
    # vLLM leaves its sockets to the garbage collector when it shuts down.
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),
]
T = TypeVar("T")
#: The context of the tiny model is 128.
LONG = 120


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One engine for all tests, and the loop that it lives in."""

    engine: VllmEngine
    runner: asyncio.Runner
    tiny: str

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(main())


@pytest.fixture(scope="module")
def rollout(tiny_folder: Path, tiny_model: ModelSpec) -> Generator[Rollout, None, None]:
    spec = RankSpec(
        wpg="rollout-0", engine="vllm", rank=0, world=1, gpus=1, master_port=0, agent="",
        models={"tiny": tiny_model}, options={"kv_cache_bytes": 64 << 20},
        cores=(max(os.sched_getaffinity(0)),),
    )  # fmt: skip
    with asyncio.Runner() as runner, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports
        engine = VllmEngine(spec)
        runner.run(engine.start())
        runner.run(engine.load_snapshot(Path(tiny_model.path), model="tiny"))
        yield Rollout(engine=engine, runner=runner, tiny=tiny_model.path)
        runner.run(engine.close())


def make_sample(**fields: Any) -> wire.Sample:
    shared = {
        "prompt": [10, 42, 7, 33, 5], "num_samples": 1, "max_tokens": LONG, "seed": 11,
        "ignore_eos": True,
    }  # fmt: skip
    return wire.Sample(**{**shared, **fields})


async def paused(rollout: Rollout, body: wire.Sample) -> wire.Paused | wire.SampleOutput:
    """The call, paused when it has sampled at least 20 tokens more."""
    (slot,) = rollout.engine._slots
    task = asyncio.create_task(rollout.engine.sample("call", body))
    states = slot.engine.output_processor.request_states
    while not task.done() and all(s.detokenizer.num_output_tokens() < 20 for s in states.values()):
        await asyncio.sleep(0)
    await rollout.engine.pause("call")
    result = await task
    assert slot.engine.get_num_unfinished_requests() == 0, "the device is free"
    assert slot.running == set()
    return result


async def in_stretches(
    rollout: Rollout, body: wire.Sample, *, pauses: int
) -> tuple[wire.SampleOutput, list[wire.Paused]]:
    """The call paused so often; other weights come and go while it is."""
    found: list[wire.Paused] = []
    for _ in range(pauses):
        result = await paused(rollout, body)
        assert isinstance(result, wire.Paused), "it ended before it could be paused"
        found.append(result)
        body = msgspec.structs.replace(body, resume=result.sequences)
        other = make_sample(seed=5, max_tokens=3)
        assert isinstance(await rollout.engine.sample("other", other), wire.SampleOutput)
    output = await rollout.engine.sample("call", body)
    assert isinstance(output, wire.SampleOutput)
    return output, found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0, "num_samples": 2},
        {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
        {"num_samples": 3, "topk_sample_logprobs": 4},
        # Some of the samples of a call end before it is paused.
        {"num_samples": 6, "stop_tokens": [3]},
    ],
)
def test_a_paused_call_ends_as_one_that_was_not(rollout: Rollout, fields: dict[str, Any]) -> None:
    body = make_sample(**fields)
    whole = rollout.run(rollout.engine.sample("call", body))
    assert isinstance(whole, wire.SampleOutput)
    output, pauses = rollout.run(in_stretches(rollout, body, pauses=2))
    assert pauses[0].tokens > 0, "it had got somewhere"
    assert len(pauses[1].sequences[-1].tokens) >= len(pauses[0].sequences[-1].tokens)
    for before, after in zip(whole.sequences, output.sequences, strict=True):
        assert after.tokens == before.tokens
        assert after.stop_reason == before.stop_reason
        assert after.logprobs == before.logprobs
        if before.topk is not None and after.topk is not None:
            assert after.topk.tokens == before.topk.tokens
    tokens, took_us = output.prefilled
    assert tokens > 5 and took_us > 0

"""What a pause leaves of a sample call, with the engine that needs no torch."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm import wire
from plexrl_slurm.engines.fake import FakeSampleEngine
from tests.engines.test_fake import make_spec


def make_sample(**fields: Any) -> wire.Sample:
    shared: dict[str, Any] = {"prompt": [1, 2], "num_samples": 2, "max_tokens": 20, "seed": 3}
    return wire.Sample(**{**shared, **fields})


async def make_engine(token_us: int) -> FakeSampleEngine:
    engine = FakeSampleEngine(make_spec(engine="fake_sample", options={"token_us": token_us}))
    await engine.start()
    await engine.load_snapshot(Path("/models/tiny"), model="tiny")
    return engine


async def paused(body: wire.Sample, *, after_s: float = 0.05) -> wire.SampleOutput | wire.Paused:
    engine = await make_engine(10_000)
    task = asyncio.create_task(engine.sample("a", body))
    await asyncio.sleep(after_s)
    await engine.pause("a")
    result = await task
    await engine.close()
    return result


@pytest.mark.parametrize("fields", [{}, {"topk_sample_logprobs": 1}, {"temperature": 0.0}])
def test_a_paused_call_goes_on_to_the_same_end(fields: dict[str, Any]) -> None:
    async def main() -> None:
        body = make_sample(**fields)
        whole = await (await make_engine(0)).sample("a", body)
        first = await paused(body)
        assert isinstance(whole, wire.SampleOutput) and isinstance(first, wire.Paused)
        assert 0 < first.tokens < 40
        assert wire.decode_paused(wire.encode(first)) == first
        assert wire.decode_paused(wire.encode(whole)) is None
        again = msgspec.structs.replace(body, resume=first.sequences)
        assert wire.decode_body(wire.encode(again)) == again
        second = await paused(again)
        assert isinstance(second, wire.Paused) and second.tokens > first.tokens
        again = msgspec.structs.replace(body, resume=second.sequences)
        output = await (await make_engine(0)).sample("a", again)
        assert isinstance(output, wire.SampleOutput)
        assert output.sequences == whole.sequences
        assert output.prefilled[0] > 2

    asyncio.run(main())


def test_samples_that_have_ended_are_left_as_they_are() -> None:
    async def main() -> None:
        whole = await (await make_engine(0)).sample("a", make_sample())
        assert isinstance(whole, wire.SampleOutput)
        body = make_sample(stop_tokens=[whole.sequences[0].tokens[2]])
        first = await paused(body, after_s=0.1)
        assert isinstance(first, wire.Paused)
        ended = [s for s in first.sequences if s.stop_reason == "stop"]
        again = msgspec.structs.replace(body, resume=first.sequences)
        output = await (await make_engine(0)).sample("a", again)
        assert isinstance(output, wire.SampleOutput)
        assert ended and all(sequence in output.sequences for sequence in ended)

    asyncio.run(main())


@pytest.mark.parametrize(
    "fields",
    [{"stop_strings": ["x"]}, {"prompt_logprobs": True}, {"topk_prompt_logprobs": 1}],
)
def test_a_call_whose_answer_is_more_than_its_tokens_runs_to_its_end(
    fields: dict[str, Any],
) -> None:
    result = asyncio.run(paused(make_sample(**fields)))
    assert isinstance(result, wire.SampleOutput)


def test_a_pause_of_what_does_not_run_is_nothing() -> None:
    async def main() -> None:
        await (await make_engine(0)).pause("nobody")

    asyncio.run(main())

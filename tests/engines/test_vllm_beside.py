"""Two snapshots sampled at once in one rank, each in an engine of its own: as if alone."""

import asyncio
import os
import shutil
import warnings
from collections.abc import Awaitable, Generator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import InvalidTransition
from plexrl_slurm.engines.vllm import VllmEngine
from tests.engines.test_vllm import make_folder, make_sample, make_spec

pytestmark = [
    pytest.mark.engines,
    # vLLM leaves its sockets to the garbage collector when it shuts down.
    pytest.mark.filterwarnings("ignore:Unclosed:ResourceWarning"),
]
T = TypeVar("T")
TAIL = [make_sample(seed=seed, max_tokens=120, num_samples=2, ignore_eos=True) for seed in (3, 70)]
OTHER = [make_sample(seed=seed, max_tokens=20, ignore_eos=True) for seed in (5, 6, 7)]


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One engine for all tests of this file, and the loop that it lives in."""

    engine: VllmEngine
    runner: asyncio.Runner
    tiny: Path
    #: Another one's weights; another architecture's.
    other: Path
    tied: Path

    def run(self, work: Awaitable[T]) -> T:
        async def main() -> T:
            return await asyncio.wait_for(work, 200)

        return self.runner.run(main())

    async def alone(self, path: Path, bodies: list[wire.Sample], model: str = "tiny") -> list[str]:
        """What they give when nothing else runs."""
        await self.engine.load_snapshot(path, model=model)
        return await self.samples("alone", bodies)

    async def samples(self, name: str, bodies: list[wire.Sample]) -> list[str]:
        calls = (self.engine.sample(f"{name}-{i}", body) for i, body in enumerate(bodies))
        return [repr(output) for output in await asyncio.gather(*calls)]

    async def tail(self) -> "asyncio.Task[list[str]]":
        """Of the tiny model's own weights, when it has begun."""
        await self.engine.load_snapshot(self.tiny, model="tiny")
        slot = self.engine._slots[-1]
        task = asyncio.create_task(self.samples("tail", TAIL))
        states = slot.engine.output_processor.request_states
        while all(s.detokenizer.num_output_tokens() < 5 for s in states.values()):
            await asyncio.sleep(0)
        return task


@pytest.fixture(scope="module")
def rollout(
    tiny_folder: Path, tiny_model: ModelSpec, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Rollout, None, None]:
    folder = tmp_path_factory.mktemp("beside")
    path = make_folder(folder / "tied", tiny_folder, seed=5, tied=True)
    tied = replace(tiny_model, name="tied", architecture="tied", path=str(path))
    made = make_folder(folder / "made", tiny_folder, seed=6, tied=False)
    other = Path(shutil.copy(made / "model.safetensors", folder / "other.safetensors"))
    spec = make_spec(tiny_model, tied, cores=(max(os.sched_getaffinity(0)),))
    spec = replace(spec, options={**spec.options, "second_slot": True})
    with asyncio.Runner() as runner, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's imports
        engine = VllmEngine(spec)
        runner.run(engine.start())
        yield Rollout(
            engine=engine, runner=runner, tiny=Path(tiny_model.path), other=other, tied=path
        )
        runner.run(engine.close())


def test_both_give_bit_by_bit_what_they_give_alone(rollout: Rollout) -> None:
    async def main() -> None:
        tail_alone = await rollout.alone(rollout.tiny, TAIL)
        other_alone = await rollout.alone(rollout.other, OTHER)
        assert tail_alone[0] != other_alone[0]
        tail = await rollout.tail()
        await rollout.engine.load_snapshot(rollout.other, model="tiny")
        assert await rollout.samples("other", OTHER) == other_alone
        assert not tail.done(), "they ran at once"
        assert await tail == tail_alone

    rollout.run(main())


def test_the_tail_becomes_the_resident_again_without_a_load(rollout: Rollout) -> None:
    async def main() -> None:
        tail_alone = await rollout.alone(rollout.tiny, TAIL)
        mine_alone = await rollout.alone(rollout.tiny, OTHER)
        await rollout.alone(rollout.other, OTHER)
        tail = await rollout.tail()
        await rollout.engine.load_snapshot(rollout.other, model="tiny")
        assert await rollout.engine.load_snapshot(rollout.tiny, model="tiny") == 0
        mine = await rollout.samples("mine", OTHER)
        assert not tail.done()
        # The rest of the batch changes no bit.
        assert mine == mine_alone and await tail == tail_alone

    rollout.run(main())


def test_a_third_is_refused_while_both_are_sampled(rollout: Rollout) -> None:
    async def main() -> None:
        tail = await rollout.tail()
        await rollout.engine.load_snapshot(rollout.other, model="tiny")
        other = asyncio.create_task(rollout.samples("other", TAIL))
        while not rollout.engine._slots[-1].running:
            await asyncio.sleep(0)
        with pytest.raises(InvalidTransition, match="sampling 4 calls"):
            await rollout.engine.load_snapshot(rollout.tied, model="tied")
        await asyncio.gather(tail, other)

    rollout.run(main())


def test_another_architecture_runs_beside_a_tail(rollout: Rollout) -> None:
    async def main() -> None:
        tail_alone = await rollout.alone(rollout.tiny, TAIL)
        tied_alone = await rollout.alone(rollout.tied, OTHER, "tied")
        tail = await rollout.tail()
        await rollout.engine.load_snapshot(rollout.tied, model="tied")
        assert len(rollout.engine._awake()) == 2
        assert await rollout.samples("tied", OTHER) == tied_alone
        assert not tail.done(), "they ran at once"
        assert await tail == tail_alone

    rollout.run(main())

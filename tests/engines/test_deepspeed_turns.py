"""Two models on a training WPG of two ranks, as its agent runs it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from plexrl_slurm import wire
from plexrl_slurm.engines import ranklink
from tests.engines.ranks import Ranks, wpg
from tests.engines.training import adam, grpo, supervised, tiny_spec

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
WPG = "train-0"
CALLS: list[wire.Body] = [
    supervised(1, 5, 9, 20),
    grpo(2, group=4),
    adam(grad_clip_norm=5.0),
    supervised(3, 12, 7),
    adam(),
    grpo(4, group=3),
]


@pytest.mark.parametrize("stage", [2, 3])
def test_two_models_take_turns_and_sleep_on_two_ranks_and_learn_as_they_do_alone(
    tiny_folder: Path, tmp_path: Path, stage: int
) -> None:
    half = replace(tiny_spec(tiny_folder, "bfloat16"), name="half")
    models = {model.name: model for model in (tiny_spec(tiny_folder), half)}

    async def main() -> None:
        async with Ranks.running(
            tmp_path, models, wpg(WPG, "deepspeed", gpus=2, zero_stage=stage)
        ) as ranks:

            async def call(name: str, body: wire.Body) -> bytes:
                answer = await ranks.order(WPG, ranklink.Call("c", name, wire.encode(body)))
                assert answer.ok, answer.error
                return answer.result

            async def switch(incoming: str, outgoing: str = "") -> None:
                def load(rank: int) -> ranklink.Operation:
                    return ranklink.Load(
                        incoming=incoming,
                        load_path=str(tmp_path / f"{incoming}.{rank}"),
                        outgoing=outgoing,
                        save_path=str(tmp_path / f"{outgoing}.{rank}") if outgoing else "",
                    )

                answers = await ranks.orders(WPG, load)
                assert all(answer.ok for answer in answers), answers

            async def save(name: str) -> None:
                answers = await ranks.orders(
                    WPG, lambda rank: ranklink.Save(name, str(tmp_path / f"{name}.{rank}"), (0, 0))
                )
                assert all(answer.ok for answer in answers), answers

            alone = {}
            for name in models:
                await call(name, wire.Create(base_model=name))
                await save(name)
                alone[name] = [await call(name, body) for body in CALLS]
            await switch("tiny")
            turns: dict[str, list[bytes]] = {name: [] for name in models}
            for number, body in enumerate(CALLS):
                turns["tiny"].append(await call("tiny", body))
                if number % 2:  # the rollout engine's turn on the same GPUs
                    await save("tiny")
                    slept = await ranks.orders(WPG, lambda _: ranklink.Sleep(limit=0))
                    assert [(a.ok, a.used_bytes) for a in slept] == [(True, 0)] * 2
                    woken = await ranks.orders(WPG, lambda _: ranklink.Wake(needed=0))
                    assert all(answer.ok and answer.used_bytes for answer in woken)
                    await switch("half")
                else:
                    await switch("half", "tiny")
                turns["half"].append(await call("half", body))
                await switch("tiny", "half")
            assert turns == alone
            assert ranks.gangs[WPG].incarnation == 1

    asyncio.run(main())

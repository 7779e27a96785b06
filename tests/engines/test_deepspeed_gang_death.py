"""A gang of two loses a rank in the middle of a forward_backward, as its agent sees it."""

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from plexrl_slurm import wire
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.daemons.gang import GangLost
from plexrl_slurm.engines import ranklink
from plexrl_slurm.memory import swap
from tests.engines.gang import LAYOUTS
from tests.engines.ranks import Ranks, wpg
from tests.engines.training import CREATE, adam, supervised, tiny_spec

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]
WPG = "train-0"
#: The rank dies in the fourth of them, in the step's second half.
CALLS: list[wire.Body] = [
    supervised(1, 5, 9, 20),
    adam(weight_decay=0.1),
    supervised(2, 12, 7),
    supervised(3, 8, 14),
    adam(grad_clip_norm=1.0, eps=1e-6),
    supervised(4, 9),
    adam(),
]
Call = Callable[[str, wire.Body], Awaitable[bytes]]


@pytest.fixture(scope="module")
def wide(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A rank's share of it is more than the 1 MiB below which DeepSpeed swaps nothing."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("wide") / "tiny"
    shutil.copytree(tiny_folder, folder)
    config = AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": 256, "intermediate_size": 512, "dtype": torch.float32})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(folder)
    return tiny_spec(folder)


@pytest.mark.parametrize("layout", ["2", "3-optimizer-param", "3-swapped"])
def test_the_gang_comes_back_and_what_it_learns_is_what_it_would_have_learned(
    wide: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setenv(swap.SWAP_DIR, str(tmp_path / "swap"))
    options = LAYOUTS[layout]

    async def main() -> None:
        config = wpg(WPG, "deepspeed", gpus=2, model="tiny", **options)
        async with Ranks.running(tmp_path, {"tiny": wide}, config) as ranks:

            async def call(name: str, body: wire.Body) -> bytes:
                answer = await ranks.order(WPG, ranklink.Call("c", name, wire.encode(body)))
                assert answer.ok, answer.error
                return answer.result

            undisturbed = await learn(call, "undisturbed", tmp_path / "undisturbed", CALLS)
            first = [await call("a", body) for body in (CREATE, *CALLS[:3])]
            answers = await ranks.orders(
                WPG, lambda rank: ranklink.Save("a", str(tmp_path / f"a.{rank}"), (3, 0))
            )
            assert all(answer.ok for answer in answers), answers
            victim = ranks.gangs[WPG].pids[1]
            os.kill(victim, signal.SIGSTOP)  # so that the other certainly waits for it
            doomed = asyncio.create_task(call("a", CALLS[3]))
            await asyncio.sleep(1)
            assert not doomed.done()
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(GangLost):
                await doomed
            await ranks.reaches(WPG, incarnation=2)
            answers = await ranks.orders(
                WPG, lambda rank: ranklink.Load(incoming="a", load_path=str(tmp_path / f"a.{rank}"))
            )
            assert all(answer.ok for answer in answers), answers
            rest = await learn(call, "a", tmp_path / "a", CALLS[3:])
            assert [*first[1:], *rest[0]] == undisturbed[0]
            assert rest[1] == undisturbed[1]
            assert any((tmp_path / "swap").glob("*/a/*/*/*.swp")) == (layout == "3-swapped")

    asyncio.run(main())


async def learn(
    call: Call, name: str, path: Path, bodies: list[wire.Body]
) -> tuple[list[bytes], dict[str, bytes]]:
    """What it was told, and its whole state; from the beginning if these are all calls."""
    if bodies is CALLS:
        await call(name, CREATE)
    told = [await call(name, body) for body in bodies]
    await call(name, wire.SaveState(path=str(path), uri="u"))
    return told, files_in(path)


def files_in(folder: Path) -> dict[str, bytes]:
    found = {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}
    assert found
    return found

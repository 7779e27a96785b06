"""A rollout WPG of two GPUs (two gloo workers here), as its agent runs it."""

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.daemons import left_behind
from plexrl_slurm.engines import ranklink
from tests.engines.ranks import Ranks, wpg
from tests.engines.test_vllm import PROMPT, hf_logprobs, is_alive, make_folder

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]


def group_of(pid: int) -> dict[int, str]:
    """Processes of a process group, and what each is called."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text(encoding="utf-8").partition("(")[2].rpartition(")")
            if int(rest.split()[2]) == pid:
                command = (stat.parent / "cmdline").read_text(encoding="utf-8")
                found[int(stat.parent.name)] = command.split("\0")[0] or name
        except OSError:
            continue
    return found


def test_two_workers_sample_the_same_every_time_and_a_killed_one_restarts_its_gang_only(
    tiny_folder: Path, tiny_model: ModelSpec, tmp_path: Path
) -> None:
    other = make_folder(tmp_path / "other", tiny_folder, seed=6, tied=False)
    snapshot = tmp_path / "other.safetensors"
    shutil.copy(other / "model.safetensors", snapshot)

    async def main() -> None:
        configs = (
            wpg("rollout-0", "vllm", gpus=2, kv_cache_bytes=64 << 20),
            wpg("rollout-1", "fake_sample"),
        )
        async with Ranks.running(tmp_path, {"tiny": tiny_model}, *configs) as ranks:
            first = await ranks.sample("rollout-0")
            answer = await ranks.load("rollout-0", snapshot, model="tiny")
            assert (answer.ok, answer.moved_bytes) == (True, snapshot.stat().st_size)
            sampled = await ranks.sample("rollout-0")
            for sequence in sampled.sequences:
                expected = hf_logprobs(other, PROMPT + sequence.tokens)
                assert np.abs(expected[len(PROMPT) - 1 :] - sequence.logprobs).max() < 1e-5
            assert (await ranks.load("rollout-0", tiny_model.path, model="tiny")).ok
            assert await ranks.sample("rollout-0") == first != sampled

            asleep = await ranks.order("rollout-0", ranklink.Sleep(limit=0))
            assert (asleep.ok, asleep.used_bytes) == (True, 0)
            awake = await ranks.order("rollout-0", ranklink.Wake(needed=0))
            assert awake.ok and awake.used_bytes > 2 * (60 << 20)  # the KV cache of each
            assert (await ranks.load("rollout-0", tiny_model.path, model="tiny")).ok
            assert await ranks.sample("rollout-0") == first

            gang, bystander = ranks.gangs["rollout-0"], list(ranks.gangs["rollout-1"].pids)
            (rank,) = gang.pids
            before = group_of(rank)
            workers = [pid for pid, name in before.items() if name.startswith("VLLM::Worker_TP")]
            assert len(workers) == 2
            mapped = left_behind.mapped_by([rank])
            # vLLM's kernels for AVX2 have no communicator in shared memory: its workers use gloo.
            assert any("vllm_dist" in file for file in mapped) is torch.cpu._is_avx512_supported()
            killed = time.monotonic()
            os.kill(workers[1], signal.SIGKILL)
            while not ranks.reasons["rollout-0"]:  # idle, and noticed
                assert time.monotonic() < killed + 5
                await asyncio.sleep(0.05)
            (reason,) = ranks.reasons["rollout-0"]
            assert "tensor-parallel worker" in reason and str(workers[1]) in reason
            while any(map(is_alive, before)):
                assert time.monotonic() < killed + 5
                await asyncio.sleep(0.05)
            assert not any(map(os.path.exists, mapped))

            await ranks.reaches("rollout-0", incarnation=2)
            assert await ranks.sample("rollout-0") == first
            assert (await ranks.load("rollout-0", snapshot, model="tiny")).ok
            assert await ranks.sample("rollout-0") == sampled
            assert ranks.gangs["rollout-1"].incarnation == 1
            assert ranks.gangs["rollout-1"].pids == bystander

    asyncio.run(main())

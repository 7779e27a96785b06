"""What is answered to whoever asks about the queue."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.limits import LimitRules, Limits
from plexrl_slurm.queue_settings import QueueSettings
from tests.daemons.controllers_bench import bench_in
from tests.daemons.test_turns import FAST, USERS, Queue

NOW = 10**15


def test_every_limit_is_explained_and_the_first_is_the_word(tmp_path: Path) -> None:
    async def scene() -> None:
        limits = LimitRules(users=Limits(max_jobs=1), qos=FAST)
        async with bench_in(tmp_path) as bench:
            q = Queue(bench, QueueSettings(limits=limits), 9)
            first, job = await q.submit(qos="slow"), await q.submit(qos="slow")
            assert await q.look() == [first]
            assert q.words() == {job: "AssocMaxJobsLimit"}
            found = await bench.service.explain_job(USERS["a"], job)
            told = found["obstacles"]
            assert [each["word"] for each in told] == ["AssocMaxJobsLimit", "QOSGrpJobsLimit"]
            assert found["sentences"][:2] == [each["sentence"] for each in told]

    asyncio.run(scene())


def test_an_expected_start_is_never_in_the_past(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def expect() -> dict[str, Any]:
        return {"jobs": [{"start_us": at_us} for at_us in (NOW, NOW + 9_000_000, None)]}

    async def scene() -> None:
        async with bench_in(tmp_path) as bench:
            monkeypatch.setattr(bench.service, "_expect", expect)
            for now in (NOW, NOW + 1_000_000):
                monkeypatch.setattr(bench.service, "now_us", lambda now=now: now)
                found = await bench.service.starts(USERS["a"])
                starts = [each["start_us"] for each in found["jobs"]]
                assert starts == [now, NOW + 9_000_000, None]

    asyncio.run(scene())

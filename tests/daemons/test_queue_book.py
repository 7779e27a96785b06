"""What the queue decided is written where it is news, and enough to decide it again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.dues import Dues
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import LimitRules, Limits
from plexrl_slurm.core.queue_pass import (
    Queued,
    QueueNews,
    QueuePass,
    Refused,
    Said,
    decide_again,
)
from plexrl_slurm.core.states import JobState
from plexrl_slurm.queue_settings import QueueSettings
from tests.daemons.controllers_bench import bench_in
from tests.daemons.test_turns import Queue


class Notes:
    """A journal that is kept in memory, and decides again at once."""

    def __init__(self, queue: Queue) -> None:
        self.rules = queue.bench.service.standings.rules
        self.jobs: dict[JobId, Queued] = {}
        self.dues = Dues(self.rules.weights.half_life_us)
        self.passes: list[dict[JobId, str]] = []
        self.refusals: list[Refused] = []

    def passed(
        self, news: QueueNews, at_us: int, told: Sequence[Said], said: Sequence[Said]
    ) -> None:
        self.jobs |= {each.job: each for each in news.jobs}
        for job in news.gone:
            del self.jobs[job]
        self.dues.hear(news.dues)
        jobs = tuple(self.jobs.values())
        made = QueuePass(self.rules, at_us=at_us, jobs=jobs, dues=self.dues)
        assert decide_again(made, told) == said
        self.passes.append(dict(said) | dict(told))

    def refused(self, refused: Refused) -> None:
        assert refused.again(self.rules) == refused.kind
        self.refusals.append(refused)


def test_passes_that_are_news_can_be_decided_again(tmp_path: Path) -> None:
    async def scene(q: Queue) -> None:
        notes = q.bench.service.standings.journal = Notes(q)
        earlier = await q.submit("c", "physics", bound=False)
        await q.use(earlier, 500)
        large, small = await q.submit(models=2), await q.submit("b", "physics")
        assert await q.look() == [small]
        await q.look()  # the first without it
        await q.look()
        assert notes.passes == [{large: "host_memory", small: "placed"}, {large: "host_memory"}]
        assert notes.jobs[small].placed
        assert notes.dues.usage(now_us()) == pytest.approx(
            q.bench.service.standings.dues.usage(now_us())
        )
        with pytest.raises(BadInput, match="max_submit is 2"):
            await q.submit("d", "physics")
        await q.look()
        assert [each.subject.user for each in notes.refusals] == ["d"]
        await q.bench.service.end_job(small, state=JobState.COMPLETED, reason="", exit_code=0)
        last = await q.submit("b", "physics")
        assert await q.look() == [last]
        assert notes.passes[-1] == {large: "host_memory", last: "placed"}
        assert small not in notes.jobs

    async def whole() -> None:
        limits = LimitRules(account={"physics": Limits(max_submit=2)})
        async with bench_in(tmp_path) as bench:
            await scene(Queue(bench, QueueSettings(limits=limits), free=1))

    asyncio.run(whole())

"""Copies what Slurm's accounting says of the holds, and tells it what ended jobs have used.

It asks slurmdbd, never slurmctld, and nothing waits for it: what fails is tried again later, by
the next daemon if need be.
"""

import asyncio
import logging
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import Denied, PlexError, SlurmRejected
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.db import queue, usage
from plexrl_slurm.logs import say
from plexrl_slurm.slurm.port import ENDED, ClusterPort, PastJob

log = logging.getLogger(__name__)

#: Between two questions about everything.
PERIOD_US = 60_000_000
#: Between two questions about what has just ended, and for how long they are asked.
SOON_US = 2_000_000
EAGER_US = 30_000_000
#: Accounting has heard of all components of a hold so long after its end.
RECENT_US = 180_000_000
#: What accounting has not said after so long it will never say.
LONGEST_US = 7 * 86_400_000_000
#: Most jobs in one look.
BATCH = 200
#: A record that begins so much before its hold is that of an older job with the same number.
SLACK_US = 3_600_000_000
#: First word of what we write, and of the marks of ``job_submit.lua``.
OURS = "plexrl:"


class Usage:
    """A loop of the daemon."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._holds: frozenset[str] = frozenset()
        self._jobs: frozenset[JobId] = frozenset()
        self._full_us = self._soon_us = self._eager_us = 0
        #: Ended holds of which accounting has said its last word, though there was nothing to keep.
        self._settled: set[str] = set()
        #: What Slurm's record of each job was to say.
        self._told: dict[SlurmId, str] = {}
        self._trouble = ""

    async def run(self) -> None:
        """Look whenever there may be news."""
        while True:
            await self._parts.watch.news(timeout_s=10.0)
            now = now_us()
            if self._due(now):
                await self.look(now)

    def _due(self, now: int) -> bool:
        keeper = self._parts.holds
        live = frozenset(keeper.live if keeper is not None else ())
        jobs = frozenset(self._parts.state.jobs)
        if self._holds - live or self._jobs - jobs:
            self._eager_us = now + EAGER_US
        self._holds, self._jobs = live, jobs
        if now - self._full_us >= PERIOD_US:
            return True
        return now < self._eager_us and now - self._soon_us >= SOON_US

    async def look(self, now: int) -> None:
        """Ask about holds, then about jobs; what cannot be done now is tried again."""
        full = now - self._full_us >= PERIOD_US
        self._soon_us = now
        self._full_us = now if full else self._full_us
        try:
            await self._look_at_holds(now, all_of_them=full)
            await self._look_at_jobs(now)
        except PlexError as problem:
            self._troubled(str(problem))
        except Exception:
            # Whatever it is: accounts must not end a daemon that works.
            log.exception("accounting failed")
        else:
            self._trouble = ""

    def _troubled(self, words: str) -> None:
        if words != self._trouble:
            say(log, "accounting_waits", reason=words)
        self._trouble = words

    def _cluster(self) -> ClusterPort:
        return self._parts.port  # type: ignore[return-value]

    # -- holds -------------------------------------------------------------------------------
    async def _look_at_holds(self, now: int, *, all_of_them: bool) -> None:
        found = await self._parts.store.run(
            usage.incomplete, self._parts.settings.partition, since_us=now - RECENT_US
        )
        asked = [
            hold
            for hold in found
            if hold.id not in self._settled
            and (all_of_them or hold.ended_us is not None)
            and (hold.ended_us is None or now - hold.ended_us < LONGEST_US)
        ]
        if not asked:
            return
        leaders = [SlurmId(str(hold.leader)) for hold in asked]
        # Records are as of now or later; the report cuts both sides where the books end anyway.
        asked_us = now_us()
        records = await asyncio.to_thread(self._cluster().past, leaders)
        by_hold = whose(asked, records)
        await self._parts.store.run(_write, by_hold, asked_us)
        for hold in asked:
            mine = by_hold.get(hold.id, [])
            old = hold.ended_us is not None and now - hold.ended_us > RECENT_US
            if old and mine and all(record.end_us is not None for record in mine):
                self._settled.add(hold.id)

    # -- jobs --------------------------------------------------------------------------------
    async def _look_at_jobs(self, now: int) -> None:
        parts = self._parts
        found = await parts.store.run(
            usage.untold,
            parts.settings.partition,
            epoch_us=parts.epoch,
            since_us=now - LONGEST_US,
            limit=BATCH,
        )
        if not found:
            return
        records = await asyncio.to_thread(self._cluster().past, list(found))
        refusals: list[SlurmRejected] = []
        for slurm_id, job in found.items():
            record = records.get(slurm_id, ())[-1:]
            # slurmctld sends its own AdminComment with the job's end, and would replace ours.
            if not record or record[0].state not in ENDED or record[0].end_us is None:
                continue
            try:
                await self._tell(job, record[0], now)
            except SlurmRejected as problem:
                refusals.append(problem)
        if refusals:
            raise Denied(
                f"Slurm does not let this user write AdminComment, so that sacct does not show "
                f"what {len(refusals)} job(s) used: `sacctmgr modify user NAME set "
                f"adminlevel=operator` ({refusals[0]})"
            )

    async def _tell(self, job: JobId, record: PastJob, now: int) -> None:
        """Write the summary, or see that it is there."""
        there = record.admin_comment
        if there and not there.lower().startswith(OURS):
            text = "the record has an AdminComment of the site's, which was left alone"
            await self._note(job, text, now)
            return
        summary = await self._parts.store.run(usage.summary_of, job)
        if there == summary.lower():
            await self._note(job, summary, now)
            return
        if self._told.get(record.id) == summary:
            text = f"AdminComment says {there!r} though Slurm took {summary!r}"
            await self._note(job, text, now)
            return
        await asyncio.to_thread(self._cluster().annotate, record.id, summary)
        say(log, "usage_told", job=record.id, text=summary)
        self._told[record.id] = summary
        self._eager_us = now + EAGER_US

    async def _note(self, job: JobId, text: str, now: int) -> None:
        await self._parts.store.run(_add_note, job, text, now)


def whose(
    asked: Sequence[usage.Incomplete], records: Mapping[SlurmId, Iterable[PastJob]]
) -> dict[str, list[PastJob]]:
    """The records of each hold.

    Slurm numbers the components of a heterogeneous job one after the other, so that a record is
    of the hold with the nearest number below.
    """
    ordered = sorted(asked, key=lambda hold: (hold.leader, hold.submitted_us))
    leaders = [hold.leader for hold in ordered]
    found: dict[str, list[PastJob]] = {}
    for many in records.values():
        for record in many:
            at = bisect_right(leaders, int(record.id)) - 1 if record.id.isdecimal() else -1
            if at < 0:
                continue
            hold = ordered[at]
            begins_us = record.start_us or record.end_us
            if begins_us is None or begins_us >= hold.submitted_us - SLACK_US:
                found.setdefault(hold.id, []).append(record)
    return found


def _write(session: Any, found: Mapping[str, Iterable[PastJob]], now: int) -> None:
    for hold, records in found.items():
        for record in records:
            usage.record_usage(
                session,
                hold,
                slurm_id=record.id,
                start_us=record.start_us,
                end_us=record.end_us,
                elapsed_us=record.elapsed_us,
                gpus=record.gpus,
                word=record.word,
                now_us=now,
            )


def _add_note(session: Any, job: JobId, text: str, now: int) -> None:
    queue.note(session, job, at_us=now, kind=usage.TOLD, text=text)

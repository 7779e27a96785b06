"""What ``plexrl sprio`` and ``plexrl squeue --start`` ask for."""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from plexrl_slurm.api.service import Principal
from plexrl_slurm.core.expected_start import Candidate, Expected, Unknown, expected_starts
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.core.priority import aged
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons.dry_run import DryRun
from plexrl_slurm.daemons.evictions import EvictCalls
from plexrl_slurm.daemons.job_views import PROMISE, live_job
from plexrl_slurm.daemons.outside import held_outside
from plexrl_slurm.db import queue
from plexrl_slurm.db.attributed import usual_lengths
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.slurm.port import SlurmState

#: An answer is given again for so long: it is much to work out, and everybody may ask.
FRESH_US: Final = 5_000_000

_WHY: Final = {
    Unknown.ENDS: "a job that runs, or goes before, has no known end: give jobs a --time",
    Unknown.NO_PLACE: "it finds no place even when all that run have ended",
    Unknown.HELD: "its owner, Slurm, a limit of GPU time or its QOS holds it",
    Unknown.FAR: "too many jobs end before",
}


class QueueCalls(EvictCalls):
    """See :class:`plexrl_slurm.api.service.Service`."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self._starts_us = 0
        self._starts: dict[str, Any] = {}

    async def priorities(self, who: Principal) -> dict[str, Any]:
        rows = await self._waiting()
        now = self.now_us()
        await self.standings.refresh(self.store, now)
        weights = self.standings.queue.weights
        return {
            "weights": {
                "age": weights.age,
                "fairshare": weights.fairshare,
                "qos": weights.qos,
                "job": weights.job,
            },
            "jobs": [
                {
                    "job_id": each.row.id,
                    "slurm_id": each.row.slurm_id,
                    "name": each.row.name,
                    "user": each.row.user,
                    "account": each.row.account,
                    "partition": each.row.partition,
                    "qos": self.standings.subject(each.row).qos,
                    "priority": each.priority.total,
                    "parts": {
                        "age": each.priority.age,
                        "fairshare": each.priority.fairshare,
                        "qos": each.priority.qos,
                        "job": each.priority.job,
                    },
                    "factors": {
                        "age": each.factors.age,
                        "fairshare": each.factors.fairshare,
                        "qos": each.factors.qos,
                        "job": each.factors.job,
                    },
                }
                for each in self.standings.in_order(rows, now)
            ],
        }

    async def starts(self, who: Principal) -> dict[str, Any]:
        async def work() -> None:
            if not 0 <= self.now_us() - self._starts_us < FRESH_US:
                self._starts = await self._expect()
                self._starts_us = self.now_us()

        await self.once("expected starts", work)
        now = self.now_us()  # what was worked out a moment ago is no instant of the past
        return {
            "jobs": [
                each
                | {"start_us": None if each["start_us"] is None else max(each["start_us"], now)}
                for each in self._starts["jobs"]
            ]
        }

    async def standing(self, row: JobRow) -> list[str]:
        """How many go before a waiting job, and by which priority; nothing of any other."""
        if row.state is not JobState.PENDING or row.slurm_id is None:
            return []
        now = self.now_us()
        await self.standings.refresh(self.store, now)
        order = self.standings.in_order(await self._waiting(), now)
        place = next((index for index, each in enumerate(order) if each.row.id == row.id), None)
        if place is None:
            return []
        parts = order[place].priority
        before = "it is the first in the queue"
        if place:
            before = f"{place} job{'s go' if place > 1 else ' goes'} before it in the queue"
        return [
            f"{before}; its priority is {parts.total} (age {parts.age}, fairshare "
            f"{parts.fairshare}, qos {parts.qos}, job {parts.job}; see plexrl sprio)"
        ]

    async def _waiting(self) -> list[JobRow]:
        rows = await self.store.read(queue.living, self.settings.partition)
        return [row for row in rows if row.state is JobState.PENDING and row.slurm_id is not None]

    async def _expect(self) -> dict[str, Any]:
        now, partition = self.now_us(), self.settings.partition
        await self.standings.refresh(self.store, now)
        rows = await self.store.read(queue.living, partition)
        usual = await self.store.read(usual_lengths, partition, rows)
        inside = [row for row in rows if JobId(row.id) in self.state.jobs]
        waiting = [
            row
            for row in rows
            if row.state is JobState.PENDING and row.slurm_id is not None and row not in inside
        ]
        fit = [row for row in waiting if all(self.model_named(name) for name in row.models)]
        standings, weights = self.standings.of(waiting, now), self.standings.queue.weights

        def priority(job: JobId, at_us: int) -> float:
            each = standings[job]
            return aged(each.priority, at_us - each.row.submitted_us, weights)

        found = await asyncio.to_thread(
            expected_starts,
            [self._candidate(row, usual.get(JobId(row.id)), known=row in fit) for row in waiting],
            ends_us={
                JobId(row.id): self._end_us(row, usual.get(JobId(row.id)), now) for row in inside
            },
            now_us=now,
            rules=self.standings.queue.turns,
            priority=priority,
            room=self._dry_run(inside, waiting, fit),
            joins_first=self.standings.rules.joins_first,
        )
        by_id = {JobId(row.id): row for row in waiting}
        return {"jobs": [self._start_view(by_id[job], each) for job, each in found.items()]}

    def _candidate(self, row: JobRow, usual_us: int | None, *, known: bool) -> Candidate:
        qos = self.standings.qos(row)
        lengths = [each for each in (usual_us, self._limit_us(row)) if each is not None]
        return Candidate(
            job=JobId(row.id),
            since_us=row.submitted_us,
            shape=(
                tuple(row.models),
                qos.reserved,
                row.options.get(PROMISE),
                row.priority * qos.weight,
            ),
            length_us=min(lengths, default=None),
            held=(
                not known
                or held_outside(row, self._parts.watch.jobs, self.now_us()) is not None
                or self.standings.has_wrong_qos(row)
            ),
            reserved=qos.reserved and self.standings.queue.reservation.any,
        )

    def _end_us(self, row: JobRow, usual_us: int | None, now_us: int) -> int | None:
        """By what is known of its steps, else by its like before it, else by its time limit."""
        live = self.state.jobs[JobId(row.id)]
        if live.user_held and not live.started:
            return None  # its owner lets it go, or never does
        if (known := self.placer.ends_of(live)) is not None:
            return known
        began = row.started_us or now_us
        status, limit = self._parts.watch.jobs.get(live.slurm_id), self._limit_us(row)
        if status is not None and status.state is SlurmState.PENDING:
            began = now_us  # Slurm requeued it, or has no node yet: its limit begins anew
        last = status.end_us if status is not None else None
        if last is None and limit is not None:
            last = began + limit
        if usual_us is not None and began + usual_us > now_us:
            return min(began + usual_us, last or began + usual_us)
        return last

    def _limit_us(self, row: JobRow) -> int | None:
        """Of its controller: Slurm knows best, else as the submission told."""
        status = self._parts.watch.jobs.get(SlurmId(str(row.slurm_id)))
        if status is not None and status.limit_us is not None:
            return status.limit_us
        said = str(row.options.get("time_limit_us", ""))
        return int(said) if said.isdecimal() else None

    def _start_view(self, row: JobRow, found: Expected) -> dict[str, Any]:
        view = {"job_id": row.id, "slurm_id": row.slurm_id}
        if self.state.draining:
            sentence = "the partition is draining and admits no job"
            return view | {"start_us": None, "unknown": "draining", "sentence": sentence}
        unknown = found.unknown
        return view | {
            "start_us": found.at_us,
            "unknown": None if unknown is None else str(unknown),
            "sentence": "" if unknown is None else _WHY[unknown],
        }

    def _dry_run(
        self, inside: Sequence[JobRow], waiting: Sequence[JobRow], fit: Sequence[JobRow]
    ) -> DryRun:
        """Made here, where nothing changes meanwhile; used in another thread."""
        rows = [*inside, *waiting]
        subjects = {JobId(row.id): self.standings.subject(row) for row in rows}
        tally = self.standings.tally([], self.now_us())
        for row in inside:
            tally.enter(subjects[JobId(row.id)])
        return DryRun(
            self.placer.partition(),
            self.placer.rules,
            applicants={
                JobId(row.id): self.placer.applicant(
                    live_job(row, self.standings.qos(row)), row.models
                )
                for row in fit
            },
            subjects=subjects,
            tally=tally,
            reservation=self.standings.queue.reservation,
            reserved=frozenset(JobId(r.id) for r in rows if self.standings.qos(r).reserved),
        )

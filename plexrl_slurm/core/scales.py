"""Weighs those that want a WPG, for the policy to choose from."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from plexrl_slurm.core import shared
from plexrl_slurm.core.books import Books
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.lane import Fare, Lane, Tenant
from plexrl_slurm.core.messages import FunctionKind, Pool
from plexrl_slurm.core.phase import LEAST_HOLD_US
from plexrl_slurm.core.policy import Candidate

#: After them a job goes on in its other pool.
_LAST: Final = frozenset({FunctionKind.PUBLISH, FunctionKind.SAMPLE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Reads the books, and keeps with each deployment what it was found to weigh."""

    books: Books
    #: Whether the resident may keep its WPG for its next call.
    holds: bool

    def weigh(self, lane: Lane, tenants: Sequence[Tenant]) -> list[Candidate]:
        """These, as of now."""
        fare = self._fare(lane)
        return [self._candidate(lane, tenant, fare) for tenant in tenants]

    def complaints(self) -> Iterator[str]:
        """Where what is kept of a candidate is not what would be found. For tests."""
        for lane in self.books.lanes.values():
            kept, fare = self._waiting(lane), self._fare(lane)
            for known, tenant in zip(kept, lane.waiting.values(), strict=True):
                if known != self._candidate(lane, tenant, fare):
                    yield f"{tenant.key} was weighed as {known}, which it is not any more"

    def candidates(self, lane: Lane) -> list[Candidate]:
        """All that want ``lane`` or its GPUs, and its resident if it is worth waiting for."""
        found = self._waiting(lane)
        if lane.group is not None:
            found += self.rivals(lane)
        if found and self.held_until_us(lane) is not None and lane.resident is not None:
            found.append(self._candidate(lane, lane.resident, lane.fare))
        return found

    def rivals(self, lane: Lane) -> list[Candidate]:
        """Of those that wait for the GPUs of ``lane``, and sleep."""
        return [c for other in shared.rivals(lane) for c in self._waiting(other)]

    def _waiting(self, lane: Lane) -> list[Candidate]:
        """Those that wait on ``lane``. Most are away, and were at the last decision: what was
        found of them then is right until they run or something is learned of their job; only
        instants go on, and what a switch costs."""
        books, now_us, resident = self.books, lane.now_us, lane.resident
        versions, rollouts, fare = books.estimates.versions, books.rollouts, self._fare(lane)
        found = []
        for tenant in lane.waiting.values():
            known, ready_us = tenant.weighed, tenant.ready_us
            if (
                known is None
                or ready_us is None
                or tenant is resident
                or tenant.version != versions.get(known.job)
            ):
                found.append(self._candidate(lane, tenant, fare))
                continue
            known.waited_us = now_us - ready_us
            if tenant.fare is not fare:
                tenant.fare = fare
                known.fares(self._switch_us(lane, tenant, fare))
            if known.job in rollouts:
                known.slack_us = self._slack_us(known.job, now_us)
            found.append(known)
        return found

    def held_until_us(self, lane: Lane) -> int | None:
        """Until when the resident, which has no call, is worth waiting for."""
        tenant = lane.resident
        if (
            tenant is None
            or tenant.gone
            or not self.holds
            or tenant.key in lane.waiting
            or lane.working()
            or all(member.job != tenant.last_job for member in tenant.members.values())
        ):
            return None
        phase = lane.phase(tenant, tenant.last_job)
        if phase.last_kind in _LAST and shared.waits_elsewhere(lane, tenant.last_job):
            return None  # it would wait for itself
        if phase.last_kind is FunctionKind.PUBLISH and self.books.samples_wait(tenant.last_job):
            return None  # what it asks next follows its samples, and those wait for a WPG
        until_us = phase.hold_until_us(self.books.estimates, self._longest_us(lane, tenant))
        if phase.waiting or until_us is None or until_us <= lane.now_us:
            return None
        return until_us

    def _longest_us(self, lane: Lane, tenant: Tenant) -> int:
        """How long the resident is worth waiting for at most. One that samples: for as long as it
        takes that it goes, for somebody of its size, and comes back."""
        books = self.books
        if tenant.program is not None:
            return books.hold_us
        turn_us = 0 if lane.group is None else shared.turn_us(lane, books.costs)
        away_us = 2 * (books.costs.estimate_us(lane.id, tenant.image_bytes) + turn_us)
        return min(books.hold_us, max(LEAST_HOLD_US, away_us))

    def _candidate(self, lane: Lane, tenant: Tenant, fare: Fare) -> Candidate:
        books, now_us, head = self.books, lane.now_us, tenant.head()
        estimates, resident = books.estimates, tenant is lane.resident
        if head is None:
            job, kind, waited_us = tenant.last_job, None, 0
            weight = max(m.priority for m in tenant.members.values() if m.job == job)
        else:
            call = head.call
            job, kind = call.job, call.kind
            waited_us = now_us - (head.ready_us if tenant.ready_us is None else tenant.ready_us)
            weight = tenant.members[call.deployment].priority
        phase = lane.phase(tenant, job)
        there = resident or tenant is lane.beside
        kind = kind or phase.last_kind or FunctionKind.SAMPLE
        found = Candidate(
            key=tenant.key,
            job=job,
            weight=weight,
            waited_us=waited_us,
            switch_us=0 if there else self._switch_us(lane, tenant, fare),
            remaining_us=phase.remaining_us(kind, now_us, estimates),
            step_us=estimates.step_us(job),
            phase_waited_us=phase.waited_us,
            resident=resident,
            mid_phase=resident and phase.in_middle(),
            virtual=head is None,
            turn=tenant.turn,
            slack_us=0 if tenant.program is None else self._slack_us(job, now_us),
            attained_us=books.attained_us.get((lane.id, job), 0),
        )
        if head is not None and tenant.program is not None and not resident:
            tenant.weighed, tenant.fare = found, fare
            tenant.version = estimates.versions.get(job)
        return found

    def _slack_us(self, job: JobId, now_us: int) -> int:
        """How long the job goes on sampling, if it does: a training phase is due at its end."""
        rollout = self.books.rollouts.get(job)
        if rollout is None or not rollout.running:
            return 0
        total_us = self.books.estimates.phase_us(job, Pool.ROLLOUT)
        if total_us is None:
            return 0
        return max(0, total_us - rollout.served_us - (now_us - rollout.busy_us))

    def _fare(self, lane: Lane) -> Fare:
        """What a switch moves and takes whoever it is for: the same object while it is the same,
        which is from one switch to the next."""
        resident, group, costs = lane.resident, lane.group, self.books.costs
        out_bytes = resident.image_bytes if resident is not None and resident.dirty else 0
        turn_us = 0 if group is None else shared.turn_us(lane, costs)
        fare = (out_bytes, costs.bytes_per_s(lane.id), turn_us)
        if fare != lane.fare:
            lane.fare = fare
        return lane.fare

    def _switch_us(self, lane: Lane, tenant: Tenant, fare: Fare) -> int:
        program, (out_bytes, _, turn_us) = tenant.program, fare
        in_bytes = 0 if program is not None and program.image is None else tenant.image_bytes
        return self.books.costs.estimate_us(lane.id, in_bytes + out_bytes) + turn_us

"""Where jobs stand: who is next in the queue, who has how much, and who may ask for more.

Knows the ledger as far as it was read; everything that decides is in ``core``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from plexrl_slurm.core.dues import MINUTE_US, Dues
from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import NORMAL, Qos, Subject, Tally
from plexrl_slurm.core.priority import DAY_US, REMEMBERED, Factors, Owner, Priority
from plexrl_slurm.core.queue_pass import Queued, Refused, ordered, standings
from plexrl_slurm.core.states import JobState
from plexrl_slurm.daemons.job_views import PROMISE
from plexrl_slurm.db import queue
from plexrl_slurm.db.attributed import attributed
from plexrl_slurm.db.engine import Session
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.db.store import Store
from plexrl_slurm.settings import Settings

if TYPE_CHECKING:
    from plexrl_slurm.daemons.queue_book import QueueJournal

#: Between two looks at the ledger.
REFRESH_US: Final = 5_000_000
#: What was used is kept by parts of a half-life.
_PARTS: Final = 1024
#: In a row's options: which QOS it asks for.
QOS: Final = "qos"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One waiting job."""

    row: JobRow
    factors: Factors
    priority: Priority


class Standings:
    """One a daemon."""

    def __init__(self, settings: Settings) -> None:
        self.queue = settings.queue
        self.rules = settings.queue.rules(joins_first=settings.sharing.joins_first)
        self._partition, self._models = settings.partition, settings.models
        half_life_us = self.queue.weights.half_life_us
        self.dues = Dues(half_life_us)
        #: Since somebody asked the last time.
        self.refused: list[Refused] = []
        #: Told of passes and refusals.
        self.journal: QueueJournal | None = None
        self._bucket_us = MINUTE_US
        if half_life_us:
            self._bucket_us = max(1, min(MINUTE_US, half_life_us // _PARTS))
        #: Last row of the ledger that was read, and when.
        self._last = 0
        self._read_us: int | None = None
        self._reading = False
        self._needed = self.queue.weights.fairshare > 0 or self.queue.limits.daily()

    async def refresh(self, store: Store, now_us: int) -> None:
        """Read what the ledger has got meanwhile; not often, and never twice at once."""
        fresh = self._read_us is not None and 0 <= now_us - self._read_us < REFRESH_US
        if fresh or self._reading or not self._needed:
            return
        half_life_us = self.queue.weights.half_life_us
        longest_us = max(DAY_US, REMEMBERED * half_life_us) if half_life_us else now_us
        self._read_us, self._reading = now_us, True
        try:
            self._last, found = await store.read(
                attributed,
                self._partition,
                after=self._last,
                since_us=now_us - longest_us,
                bucket_us=self._bucket_us,
            )
        finally:
            self._reading = False
        for each in found:
            self.dues.add(Owner(each.account, each.user), each.qos, each.gpu_us, each.at_us)
        self.dues.forget(now_us)

    # -- order -------------------------------------------------------------------------------
    def of(self, rows: Sequence[JobRow], now_us: int) -> dict[JobId, Standing]:
        """How urgent each of the waiting ``rows`` is."""
        jobs = [self.queued(row) for row in rows]
        found = standings(self.rules, jobs, self.dues, now_us)
        return {
            JobId(row.id): Standing(
                row=row,
                factors=found[JobId(row.id)].factors,
                priority=found[JobId(row.id)].priority,
            )
            for row in rows
        }

    def in_order(self, rows: Sequence[JobRow], now_us: int) -> list[Standing]:
        """Who is next."""
        jobs = [self.queued(row) for row in rows]
        found = ordered(self.rules, standings(self.rules, jobs, self.dues, now_us).values(), now_us)
        by_id = {JobId(row.id): row for row in rows}
        return [
            Standing(row=by_id[each.of.job], factors=each.factors, priority=each.priority)
            for each in found
        ]

    def queued(self, row: JobRow) -> Queued:
        """A row as a pass sees it."""
        given = row.options.get(PROMISE)
        return Queued(
            job=JobId(row.id),
            label=row.slurm_id or str(row.id),
            user=row.user,
            account=row.account,
            qos=str(row.options.get(QOS) or NORMAL),
            since_us=row.submitted_us,
            priority=row.priority,
            models=tuple(row.models),
            host_bytes=self.host_bytes(row.models),
            promise=None if given is None else str(given),
            placed=row.state is not JobState.PENDING,
        )

    # -- limits ------------------------------------------------------------------------------
    def tally(self, rows: Iterable[JobRow], now_us: int) -> Tally:
        """What everybody has; ``rows`` are all that live."""
        found = Tally(self.queue.limits, self.dues.today(now_us))
        for row in rows:
            subject = self.subject(row)
            found.submit(subject)
            if row.state is not JobState.PENDING:
                found.enter(subject)
        return found

    def subject(self, row: JobRow) -> Subject:
        """A row as limits see it."""
        return Subject(
            job=JobId(row.id),
            user=row.user,
            account=row.account,
            qos=str(row.options.get(QOS) or NORMAL),
            host_bytes=self.host_bytes(row.models),
        )

    def host_bytes(self, models: Iterable[str]) -> int:
        """Of a state and of the weights of each model; what the catalogue has lost counts 0."""
        known = (self._models.get(name.partition(":")[0]) for name in models)
        return sum(spec.train_bytes + spec.weights_bytes for spec in known if spec is not None)

    def qos(self, row: JobRow) -> Qos:
        """Its QOS; one that was taken away gives nothing."""
        return self.queue.qos_named(row.options) or Qos(name=str(row.options.get(QOS)))

    def has_wrong_qos(self, row: JobRow) -> bool:
        """It has been taken away, or is for others now."""
        return self._wrong_qos(row.user, row.account, row.options) is not None

    def check_qos(self, user: str, account: str, options: Mapping[str, Any]) -> None:
        """Refuse a QOS that there is not, or that is for others. Raises ``BadInput``."""
        if (wrong := self._wrong_qos(user, account, options)) is not None:
            raise BadInput(wrong)

    def check_submission(
        self,
        session: Session,
        *,
        user: str,
        account: str,
        qos: str,
        models: Sequence[str],
        but: JobId | None = None,
    ) -> None:
        """Refuse a job that is over a limit before it waits; raises ``BadInput``.

        Runs in the transaction that queues it, before it is there; ``but``: it is there as this.
        """
        tally = Tally(self.queue.limits)
        for row in queue.living(session, self._partition):
            if row.id != but:
                tally.submit(self.subject(row))
        wanted = Subject(
            job=JobId(0),
            user=user,
            account=account,
            qos=qos,
            host_bytes=self.host_bytes(models),
        )
        if (held := tally.refusal(wanted)) is not None:
            self.refused.append(
                Refused(subject=wanted, submitted=tally.submitted(wanted), kind=held.kind)
            )
            raise BadInput(f"{held.sentence} ({held.kind})")

    def _wrong_qos(self, user: str, account: str, options: Mapping[str, Any]) -> str | None:
        return self.rules.wrong_qos(str(options.get(QOS) or NORMAL), user, account)

"""Where jobs stand: who is next in the queue, who has how much, and who may ask for more.

Knows the ledger as far as it was read; everything that decides is in ``core``.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.core.ids import JobId
from plexrl_slurm.core.limits import (
    NORMAL,
    Held,
    HeldKind,
    Key,
    Qos,
    Subject,
    Tally,
    keys_of,
)
from plexrl_slurm.core.priority import (
    DAY_US,
    REMEMBERED,
    Factors,
    Owner,
    Priority,
    Usage,
    factors,
    fair_shares,
    in_order,
    weighted,
)
from plexrl_slurm.core.states import JobState
from plexrl_slurm.db import queue
from plexrl_slurm.db.attributed import attributed
from plexrl_slurm.db.engine import Session
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.db.store import Store
from plexrl_slurm.settings import Settings

#: Between two looks at the ledger.
REFRESH_US: Final = 5_000_000
#: What was used is kept by minutes of a day, and by parts of a half-life.
MINUTE_US: Final = 60_000_000
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
        self._partition, self._models = settings.partition, settings.models
        half_life_us = self.queue.weights.half_life_us
        self._usage = Usage(half_life_us)
        #: By minute, and by who.
        self._day: Counter[tuple[int, str, str, str]] = Counter()
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
            self._usage.add(Owner(each.account, each.user), each.gpu_us, each.at_us)
            minute = each.at_us // MINUTE_US
            self._day[minute, each.user, each.account, each.qos] += each.gpu_us
        oldest = (now_us - DAY_US) // MINUTE_US
        for key in [key for key in self._day if key[0] < oldest]:
            del self._day[key]

    # -- order -------------------------------------------------------------------------------
    def of(self, rows: Sequence[JobRow], now_us: int) -> dict[JobId, Standing]:
        """How urgent each of the waiting ``rows`` is."""
        owners = [Owner(row.account, row.user) for row in rows]
        fair = fair_shares(self._usage.at(now_us), self.queue.shares, owners)
        weights, most_qos = self.queue.weights, self.queue.most_qos
        found: dict[JobId, Standing] = {}
        for row, owner in zip(rows, owners, strict=True):
            qos = self.queue.qos_named(row.options)
            of_job = factors(
                waited_us=now_us - row.submitted_us,
                fairshare=fair[owner],
                qos=0 if qos is None else qos.priority,
                most_qos=most_qos,
                priority=row.priority,
                weights=weights,
            )
            found[JobId(row.id)] = Standing(
                row=row, factors=of_job, priority=weighted(of_job, weights)
            )
        return found

    def in_order(self, rows: Sequence[JobRow], now_us: int) -> list[Standing]:
        """Who is next."""
        return in_order(
            self.of(rows, now_us).values(),
            at_us=now_us,
            guard_us=self.queue.turns.guard_us,
            priority=lambda each: each.priority.total,
            since_us=lambda each: each.row.submitted_us,
            number=lambda each: each.row.id,
        )

    # -- limits ------------------------------------------------------------------------------
    def tally(self, rows: Iterable[JobRow]) -> Tally:
        """What everybody has; ``rows`` are all that live."""
        found = Tally(self.queue.limits, self._used_today())
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

    def holds(self, row: JobRow, tally: Tally) -> Held | None:
        """What keeps a waiting job from a place, if there were one."""
        if (wrong := self._wrong_qos(row.user, row.account, row.options)) is not None:
            return Held(kind=HeldKind.INVALID_QOS, sentence=wrong)
        return tally.holds(self.subject(row))

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
            raise BadInput(f"{held.sentence} ({held.kind})")

    def _wrong_qos(self, user: str, account: str, options: Mapping[str, Any]) -> str | None:
        qos = self.queue.qos_named(options)
        if qos is None:
            return (
                f"unknown qos {str(options.get(QOS))[:60]!r}; this partition has "
                f"{self.queue.known_qos()}: submit with one of these"
            )
        if not qos.admits(user, account):
            return (
                f"qos {qos.name} is not for user {user} in account {account or 'default'}: leave "
                f"--qos out, or ask your admin ([qos.{qos.name}])"
            )
        return None

    def _used_today(self) -> dict[Key, int]:
        found: Counter[Key] = Counter()
        for (_, user, account, qos), gpu_us in self._day.items():
            for key in keys_of(Subject(job=JobId(0), user=user, account=account, qos=qos)):
                found[key] += gpu_us
        return found

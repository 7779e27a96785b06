"""The books: every held GPU-microsecond, written once, never changed, and audited."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Activity, Charge
from plexrl_slurm.db.models import LedgerRow, WpgRow
from plexrl_slurm.db.upsert import table_of

LEDGER, WPGS = table_of(LedgerRow), table_of(WpgRow)
_APPEND = insert(LEDGER)


class FlawKind(StrEnum):
    """What can be wrong with the books of a WPG."""

    #: Time that nobody has booked.
    GAP = "gap"
    #: Time that was booked twice, or outside its stay in the hold.
    OVERLAP = "overlap"
    #: A stretch whose rows do not add up to its length times the WPG's GPUs.
    AMOUNT = "amount"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """One fault that the audit found."""

    wpg: WpgId
    kind: FlawKind
    start_us: int
    stop_us: int
    #: Booked less due: negative where something is missing.
    gpu_us: int


def append(session: Session, charges: Iterable[Charge], *, holds: Mapping[WpgId, str]) -> None:
    """Write stretches in one insert; ``holds`` says which hold each WPG belongs to.

    Called in the transaction that ends a call, and when a stretch closes without one.
    """
    rows = [
        {
            "hold_id": holds[charge.wpg],
            "wpg": charge.wpg,
            "activity": charge.activity,
            "job_id": charge.job,
            "call_id": charge.call,
            "start_us": charge.start_us,
            "stop_us": charge.stop_us,
            "gpu_us": charge.gpu_us,
            "cause": charge.cause,
        }
        for charge in charges
    ]
    if rows:
        session.execute(_APPEND, rows)


def last_stop(session: Session, hold_id: str) -> dict[WpgId, int]:
    """Up to when each WPG that the hold still has is booked: where a new daemon goes on."""
    booked = (
        select(func.max(LEDGER.c.stop_us))
        .where(LEDGER.c.hold_id == hold_id, LEDGER.c.wpg == WPGS.c.name)
        .where(LEDGER.c.stop_us >= WPGS.c.held_us)
        .scalar_subquery()
    )
    asked = select(WPGS.c.name, func.coalesce(booked, WPGS.c.held_us)).where(
        WPGS.c.hold_id == hold_id, WPGS.c.released_us.is_(None)
    )
    return {WpgId(name): int(stop) for name, stop in session.execute(asked)}


def totals(
    session: Session, *, hold_id: str | None = None, job_id: JobId | None = None
) -> dict[Activity, int]:
    """GPU-microseconds by activity, of a hold or a job; activities without any count 0."""
    asked = select(LEDGER.c.activity, func.sum(LEDGER.c.gpu_us)).group_by(LEDGER.c.activity)
    if hold_id is not None:
        asked = asked.where(LEDGER.c.hold_id == hold_id)
    if job_id is not None:
        asked = asked.where(LEDGER.c.job_id == job_id)
    found = {activity: int(total) for activity, total in session.execute(asked)}
    return {activity: found.get(activity, 0) for activity in Activity}


def between(
    session: Session, hold_ids: Iterable[str], *, since_us: int, until_us: int
) -> list[LedgerRow]:
    """Stretches that touch a window, by WPG and time. Called for the timeline."""
    asked = (
        select(LedgerRow)
        .where(
            LedgerRow.hold_id.in_(list(hold_ids)),
            LedgerRow.stop_us > since_us,
            LedgerRow.start_us < until_us,
        )
        .order_by(LedgerRow.wpg, LedgerRow.start_us, LedgerRow.id)
    )
    return list(session.scalars(asked))


def gaps(session: Session, hold_id: str) -> list[Flaw]:
    """Audit a hold: every WPG's stretches must tile its stays, with the right amounts.

    An open stay is audited up to its last stretch. No flaw means held = busy + switch + kept
    + idle + down, to the microsecond.
    """
    stays = select(WpgRow).where(WpgRow.hold_id == hold_id).order_by(WpgRow.name, WpgRow.held_us)
    flaws: list[Flaw] = []
    for name, group in groupby(session.scalars(stays), key=lambda row: row.name):
        flaws += _audit(WpgId(name), list(group), _stretches(session, hold_id, name))
    return flaws


#: ``(start, stop, gpu_us)``: rows of co-resident deployments share a stretch and are added up.
_Stretch = tuple[int, int, int]


def _stretches(session: Session, hold_id: str, wpg: str) -> Iterator[_Stretch]:
    asked = (
        select(LEDGER.c.start_us, LEDGER.c.stop_us, func.sum(LEDGER.c.gpu_us))
        .where(LEDGER.c.hold_id == hold_id, LEDGER.c.wpg == wpg)
        .group_by(LEDGER.c.start_us, LEDGER.c.stop_us)
        .order_by(LEDGER.c.start_us, LEDGER.c.stop_us)
    )
    for start, stop, total in session.execute(asked):
        yield int(start), int(stop), int(total)


def _audit(wpg: WpgId, stays: list[WpgRow], stretches: Iterator[_Stretch]) -> Iterator[Flaw]:
    def flaw(kind: FlawKind, start: int, stop: int, gpu_us: int) -> Flaw:
        return Flaw(wpg=wpg, kind=kind, start_us=start, stop_us=stop, gpu_us=gpu_us)

    def missing(until: int) -> Iterator[Flaw]:
        if booked < until and stay.gpus:  # else its time is booked on the WPG that it shares with
            yield flaw(FlawKind.GAP, booked, until, (booked - until) * stay.gpus)

    stay, *later = stays
    booked = stay.held_us
    for start, stop, total in stretches:
        # A stretch that begins after the end of a stay belongs to the next one.
        while later and stay.released_us is not None and start >= stay.released_us:
            yield from missing(stay.released_us)
            stay, *later = later
            booked = stay.held_us
        yield from missing(start)
        if (before := min(booked, stop)) > start:
            yield flaw(FlawKind.OVERLAP, start, before, (before - start) * stay.gpus)
        end = stop if stay.released_us is None else stay.released_us
        if (after := max(end, start)) < stop:
            yield flaw(FlawKind.OVERLAP, after, stop, (stop - after) * stay.gpus)
        if total != (due := (stop - start) * stay.gpus):
            yield flaw(FlawKind.AMOUNT, start, stop, total - due)
        booked = max(booked, stop)
    while True:
        if stay.released_us is not None:
            yield from missing(stay.released_us)
        if not later:
            return
        stay, *later = later
        booked = stay.held_us

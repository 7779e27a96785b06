"""What is written down of holds; each is a change for the daemon's writer."""

from collections.abc import Mapping, Sequence

from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.daemons.held_wpgs import LiveHold
from plexrl_slurm.db import holds as rows
from plexrl_slurm.db.engine import Session
from plexrl_slurm.settings import Settings


def submitted(session: Session, hold: LiveHold, settings: Settings, epoch: str) -> None:
    """Slurm has its job."""
    rows.open_hold(
        session,
        hold_id=hold.id,
        partition=settings.partition,
        backend=settings.backend,
        slurm_id=hold.slurm_id,
        epoch=epoch,
        now_us=hold.submitted_us,
        replaces=hold.replaces,
    )


def started(
    session: Session, hold: str, since_us: int, batch_node: str, stays: Sequence[rows.Stay]
) -> None:
    """Slurm gave it its nodes."""
    rows.hold_runs(session, hold, since_us=since_us, batch_node=batch_node)
    rows.hold_wpgs(session, hold, stays)


def requeue(session: Session, hold: str, reason: str, at_us: int) -> None:
    """Slurm took its nodes back."""
    rows.hold_waits(session, hold, reason=reason, now_us=at_us)


def end(session: Session, hold: str, at_us: int) -> None:
    """It is over."""
    rows.end_hold(session, hold, now_us=at_us)


def draining(session: Session, hold: str, on: bool, reason: str) -> None:
    """It is being given back, or it is wanted after all."""
    rows.set_draining(session, hold, on=on, reason=reason)


def close(session: Session, hold: str, booked: Mapping[str, int]) -> None:
    """WPGs that are no longer configured end where their books end."""
    for wpg, at_us in booked.items():
        rows.release_wpg(session, hold, WpgId(wpg), now_us=at_us)

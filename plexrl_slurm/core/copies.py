"""Durable copies of images: when one is due, and when a WPG that drains needs no other."""

from plexrl_slurm.core.books import Books
from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.lane import Lane
from plexrl_slurm.core.messages import AnyInstruction, Drained, Persist


def copy(books: Books, lane: Lane, cause: CauseId, out: list[AnyInstruction]) -> None:
    """Have images copied to the durable tier where that is due."""
    every = books.durable_every
    for tenant in list(lane.copies.values()):
        program = tenant.program
        if tenant.retry_us > lane.now_us:
            continue
        del lane.copies[tenant.key]
        if program is None or program.image is None or tenant.copying:
            continue
        if program.wants_copy and (
            lane.draining
            or program.durable is None
            or (every is not None and program.steps_at_risk() >= every)
        ):
            tenant.copying = True
            out.append(
                Persist(deployment=tenant.name, wpg=lane.id, progress=program.image, cause=cause)
            )


def say_drained(lane: Lane, cause: CauseId, out: list[AnyInstruction]) -> None:
    """Once everything of a WPG that drains is safe."""
    if not lane.draining or lane.drained or lane.running or lane.move is not None:
        return
    programs = [t.program for t in lane.tenants.values() if t.program is not None]
    if all(program.safe for program in programs) and not any(
        tenant.copying for tenant in lane.tenants.values()
    ):
        lane.drained = True
        out.append(Drained(wpg=lane.id, cause=cause))

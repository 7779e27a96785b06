"""Facts about homes that change: a WPG is given back, images become durable, deployments move."""

import heapq
from typing import Final

from plexrl_slurm.core.books import Books
from plexrl_slurm.core.errors import InvalidTransition
from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.lane import Lane, Tenant
from plexrl_slurm.core.messages import (
    AnyInstruction,
    DeploymentMoved,
    Drained,
    DurableLost,
    Event,
    ImagesLeft,
    Persisted,
    WpgDraining,
    WpgReleased,
)
from plexrl_slurm.core.ordering import START, Position
from plexrl_slurm.core.residency import Residency, Whereabouts

#: After a copy to the durable tier that failed the next one is tried.
RETRY_US: Final = 5_000_000


# -- WPGs ---------------------------------------------------------------------------------


def draining(lane: Lane, event: WpgDraining, out: list[AnyInstruction]) -> None:
    """Nothing new begins on ``lane``."""
    if lane.wpg is None:
        out.append(Drained(wpg=event.wpg, cause=event.cause))
    elif not lane.draining:
        lane.draining, lane.drained, lane.relief = True, False, event.relief
        lane.owed = lane.kept_until_us = None
        look_at_copies(lane)


def resumed(lane: Lane) -> None:
    """The drain is off."""
    lane.draining = lane.drained = False
    lane.relief = ""


def released(lane: Lane, event: WpgReleased, out: list[AnyInstruction]) -> None:
    """``lane`` has nothing any more, and drains nothing."""
    if lane.draining and not lane.drained:
        out.append(Drained(wpg=lane.id, cause=event.cause))
    resumed(lane)
    lane.gone = event.reason or "released"
    lane.copies = {}
    for tenant in lane.tenants.values():
        tenant.copying = False


def look_at_copies(lane: Lane) -> None:
    """See of every deployment whether it needs a durable copy."""
    lane.copies.update({t.key: t for t in lane.tenants.values() if t.program is not None})


# -- images -------------------------------------------------------------------------------


def persisted(
    books: Books, lane: Lane, tenant: Tenant, event: Persisted, out: list[AnyInstruction]
) -> None:
    """A copy to the durable tier has ended."""
    tenant.copying = False
    if tenant.program is None:
        return
    if event.ok:
        lane.granted(tenant)
        durable(books, tenant, event.progress, event, out)
    else:
        # The end of a load tells itself what is left.
        loads = lane.move is not None and lane.move.incoming is tenant
        if not loads and _lost(books, lane, tenant, event, out):
            lane.granted(tenant)
        else:
            lane.refused(tenant, RETRY_US)


def _lost(
    books: Books, lane: Lane, tenant: Tenant, event: Persisted, out: list[AnyInstruction]
) -> bool:
    """Whether an image was lost that nobody was loading."""
    program = tenant.program
    # What is on its way out is still on the device, until a newer image is complete.
    leaves = lane.move is not None and lane.move.outgoing is tenant
    alive = leaves or lane.resident is tenant
    if not fell_back(tenant, event.left, "", event.cause, alive=alive) or program is None:
        return False
    if alive:
        program.dirty = program.position > (program.image or START)
    else:
        tenant.lose(event.cause)
        program.applied = program.position
    books.settle(lane, tenant, event.cause, out)
    return True


def fell_back(
    tenant: Tenant, left: ImagesLeft | None, why: str, cause: CauseId, *, alive: bool = False
) -> bool:
    """Whether its newest image is another one than was believed; it is believed now. ``alive``:
    the device has its state."""
    program = tenant.program
    if program is None or left is None or left.image == program.image:
        return False
    believed = program.image
    program.fell_back(left.image, left.durable, alive=alive)
    instead = f"{left.image}" if left.image is not None else "none: it is created anew"
    line = f"image {believed} is damaged or gone ({why}); what is left is {instead}"
    tenant.where = tenant.where.note(line.replace(" ()", ""), cause=cause)
    return True


def durable_lost(lane: Lane, tenant: Tenant, event: DurableLost) -> None:
    """A durable image is damaged; the next copy is due earlier then."""
    if tenant.program is None:
        return
    tenant.program.lost_durable(event.durable, event.spare)
    left = f"{event.durable}" if event.durable is not None else "none"
    line = f"a durable image is damaged; the newest of those left is {left}"
    tenant.where = tenant.where.note(line, cause=event.cause)
    lane.granted(tenant)


def durable(
    books: Books,
    tenant: Tenant,
    progress: Position,
    event: Event,
    out: list[AnyInstruction],
) -> None:
    """A durable image with ``progress`` exists."""
    if tenant.program is not None:
        floor = tenant.program.floor
        over = tenant.program.persisted(progress)
        books.forget(tenant, over, floor, event.cause, out)


# -- moves --------------------------------------------------------------------------------


def moved(books: Books, old: Lane, event: DeploymentMoved, out: list[AnyInstruction]) -> None:
    """A deployment lives on another WPG from now on."""
    deployment = event.deployment
    tenant = books.homes[deployment.id][1]
    obstacle = why_not_move(old, tenant)
    if obstacle:
        story = (f"[{event.cause}] {obstacle}", *tenant.where.story)
        raise InvalidTransition(f"deployment {deployment.id}", old.id, deployment.wpg, story)
    new = books.lane(deployment.wpg)
    new.clamp(old.now_us)
    if new.wpg is None:
        new.gone = ""  # it is about to come, maybe again
    if tenant.program is not None:
        _move_program(books, old, new, tenant, event, out)
    else:
        tenant = _move_samples(books, old, new, tenant, event)
    tenant.moves += 1
    had = f"image {event.image}" if event.image is not None else "no image"
    with_what = had if tenant.program is not None else "its weights"
    line = f"moved from {old.id} to {new.id} with {with_what} (move {tenant.moves})"
    tenant.where = tenant.where.note(line, cause=event.cause)
    books.homes[deployment.id] = (new, tenant)
    books.settle(new, tenant, event.cause, out)
    old.forget_phases()
    books.tidy(old)
    out.extend(new.account(event.cause))
    books.touch(new)


def why_not_move(lane: Lane, tenant: Tenant) -> str:
    """Why ``tenant`` cannot leave now; "" if it can."""
    if not lane.up:
        return ""
    if any(run.tenant is tenant for run in lane.running.values()):
        return f"a call of it runs on {lane.id}"
    if lane.running:
        return f"{lane.id} still runs calls: it must be drained, down or released"
    if lane.move is not None:
        return f"{lane.id} still moves state: it must be drained, down or released"
    if tenant.dirty:
        return f"{lane.id} has changes of it that are in no image: it must be drained first"
    return ""


def _move_program(
    books: Books,
    old: Lane,
    new: Lane,
    tenant: Tenant,
    event: DeploymentMoved,
    out: list[AnyInstruction],
) -> None:
    program = tenant.program
    if program is None:
        return
    waits = _take_away(old, tenant)
    tenant.members[event.deployment.id] = event.deployment
    new.tenants[tenant.key] = tenant
    if waits:
        new.waiting[tenant.key] = tenant
    for key in [key for key in old.phases if key[0] == tenant.key]:
        new.phases[key] = old.phases.pop(key)
    floor = program.floor
    program.moved(event.image)
    for entry in program.unanswered():  # the image has it, and its end was not heard of
        books.finish(entry, ok=True, reason="", cause=event.cause, out=out)
    books.forget(tenant, program.trim(), floor, event.cause, out)
    tenant.lose(event.cause)
    tenant.copying = False
    tenant.failures = tenant.refusals = tenant.retry_us = 0
    for phase in (phase for key, phase in new.phases.items() if key[0] == tenant.key):
        phase.open_step = program.open_step


def _move_samples(
    books: Books, old: Lane, new: Lane, tenant: Tenant, event: DeploymentMoved
) -> Tenant:
    """Of a content, one snapshot moves: with its waiting samples, and their waiting times."""
    deployment = event.deployment
    if new is old:
        tenant.members[deployment.id] = deployment
        return tenant
    mine = [e for e in tenant.samples.values() if e.call.deployment == deployment.id]
    for entry in mine:
        del tenant.samples[entry.call.id]
    if not tenant.samples:
        old.waiting.pop(tenant.key, None)
    del tenant.members[deployment.id]
    if not tenant.members:
        _take_away(old, tenant)
    there = new.tenants.get(tenant.key)
    if there is None:
        there = new.tenants[tenant.key] = Tenant(
            key=tenant.key,
            program=None,
            where=Whereabouts(tenant.key, Residency.HOST, tenant.where.story),
            last_job=deployment.job,
            turn=tenant.turn,
            moves=tenant.moves,
        )
    there.members[deployment.id] = deployment
    there.image_bytes = max(there.image_bytes, deployment.image_bytes)
    both = heapq.merge(there.samples.values(), mine, key=lambda entry: entry.ready_us)
    there.samples = {entry.call.id: entry for entry in both}
    if there.samples:
        new.waiting[there.key] = there
    phase = old.phase(tenant, deployment.job)
    new.phase(there, deployment.job).carry(phase, len(mine))
    return there


def _take_away(lane: Lane, tenant: Tenant) -> bool:
    """``tenant`` is not on ``lane`` any more; whether a call of it waited there."""
    del lane.tenants[tenant.key]
    lane.copies.pop(tenant.key, None)
    if lane.resident is tenant:
        lane.resident = lane.kept_until_us = None
    if lane.beside is tenant:
        lane.beside = None
    if lane.owed is tenant:
        lane.owed = None
    return lane.waiting.pop(tenant.key, None) is not None

"""Reads events: each is one function that writes a fact into the books."""

from typing import assert_never

from plexrl_slurm.core import beside, handover, pausing, shared
from plexrl_slurm.core.books import Books
from plexrl_slurm.core.ids import CauseId
from plexrl_slurm.core.lane import Lane, Running, Tenant
from plexrl_slurm.core.ledger import SHARED_ROW_US, Meter
from plexrl_slurm.core.messages import (
    AnyEvent,
    AnyInstruction,
    CallArrived,
    CallCancelled,
    DeploymentDropped,
    DeploymentMoved,
    DeploymentPlaced,
    Drained,
    DurableLost,
    Finish,
    Granted,
    Paused,
    Persisted,
    Pool,
    Room,
    RunEnded,
    SaveImage,
    SwitchEnded,
    Tick,
    WpgDown,
    WpgDraining,
    WpgHeld,
    WpgReleased,
    WpgResumed,
    WpgUp,
)
from plexrl_slurm.core.ordering import START, Entry, Position, Program
from plexrl_slurm.core.residency import Residency, Whereabouts


def book(books: Books, event: AnyEvent) -> list[AnyInstruction]:
    """Write one fact down; what follows from it without any choice."""
    out: list[AnyInstruction] = []
    if isinstance(event, Tick):
        _tick(books, event, out)
        return out
    lane = _lane_of(books, event)
    if lane is None:
        if isinstance(event, CallArrived) and not event.done:
            reason = f"deployment {event.call.deployment} is not here: its job has ended"
            out.append(Finish(call=event.call.id, ok=False, reason=reason, cause=event.cause))
        elif isinstance(event, WpgDraining):
            out.append(Drained(wpg=event.wpg, cause=event.cause))
        return out
    lane.clamp(event.at_us)
    match event:
        case CallArrived():  # most events are of these two kinds
            _arrived(books, lane, event, out)
        case RunEnded():
            _run_ended(books, lane, event, out)
        case WpgHeld():
            _held(books, lane, event)
        case WpgUp():
            _up(books, lane, event, out)
        case WpgDown():
            _down(books, lane, event, out)
        case WpgReleased():
            _released(books, lane, event, out)
        case DeploymentPlaced():
            _placed(books, lane, event, out)
        case DeploymentDropped():
            _dropped(books, lane, event, out)
        case CallCancelled():
            _cancelled(books, lane, event, out)
        case Paused():
            _paused(books, lane, event, out)
        case SwitchEnded():
            _switch_ended(books, lane, event, out)
        case Granted():
            shared.granted(lane, event)
        case WpgDraining():
            handover.draining(lane, event, out)
        case WpgResumed():
            handover.resumed(lane)
        case DeploymentMoved():
            handover.moved(books, lane, event, out)
        case Persisted():
            handover.persisted(books, lane, books.homes[event.deployment][1], event, out)
        case DurableLost():
            handover.durable_lost(lane, books.homes[event.deployment][1], event)
        case _:
            assert_never(event)
    out.extend(lane.account(event.cause))
    books.touch(lane)
    return out


def _lane_of(books: Books, event: AnyEvent) -> Lane | None:
    """The lane that an event is about; ``None`` if it is about nothing that is known."""
    match event:
        case RunEnded():
            return books.lanes.get(event.wpg)
        case CallArrived(call=call):
            home = books.homes.get(call.deployment)
            return None if home is None else home[0]
        case WpgHeld(wpg=wpg):
            return books.lane(wpg.id)
        case DeploymentPlaced(deployment=deployment):
            known = books.homes.get(deployment.id)
            return known[0] if known is not None else books.lane(deployment.wpg)
        case (
            WpgUp()
            | WpgDown()
            | WpgReleased()
            | WpgDraining()
            | WpgResumed()
            | Paused()
            | SwitchEnded()
            | Granted()
        ):
            return books.lanes.get(event.wpg)
        case DeploymentDropped() | Persisted() | DurableLost():
            home = books.homes.get(event.deployment)
            return None if home is None else home[0]
        case DeploymentMoved(deployment=deployment):
            return books.homes[deployment.id][0] if deployment.id in books.homes else None
        case CallCancelled(call=call_id):
            entry = books.entries.get(call_id)
            return None if entry is None else books.homes[entry.call.deployment][0]
        case Tick():
            return None
        case _:
            assert_never(event)


# -- WPGs ---------------------------------------------------------------------------------


def _held(books: Books, lane: Lane, event: WpgHeld) -> None:
    if lane.wpg is None:
        lane.wpg, lane.meter = event.wpg, Meter(event.wpg, lane.now_us)
        lane.up, lane.reason, lane.gone = False, "its ranks start", ""
        handover.look_at_copies(lane)
        shared.joined(books, lane)


def _up(books: Books, lane: Lane, event: WpgUp, out: list[AnyInstruction]) -> None:
    if lane.wpg is None or lane.up:
        return
    lane.up, lane.reason, lane.expected = True, "", None
    if lane.group is not None:
        shared.came_up(lane.group, lane, awake=event.awake)
    resident = None
    has = lane.group is None or lane.group.turn is lane
    if has and event.resident in books.homes and books.homes[event.resident][0] is lane:
        resident = books.homes[event.resident][1]
    heard = [books.entries[call] for call, _ in event.running if call in books.entries]
    beside.found(books, lane, event, resident)
    for entry in heard:
        home = books.homes[entry.call.deployment][1]
        resident = resident or (None if home is lane.beside else home)
    if resident is not None:
        lane.resident = resident
        resident.step(Residency.RESIDENT, event.cause)
        if resident.program is not None and not heard:
            # A resident never lacks what its image has; that it passed a failed call counts.
            program = resident.program
            known = program.applied if event.progress is None else event.progress
            for entry in program.adopt(max(known, program.image or START)):
                books.finish(entry, ok=True, reason="", cause=event.cause, out=out)
    for call, part in event.running:
        run = Running(call=call, part=part, start_us=lane.now_us)
        lane.running[call] = run
        _recognise(books, lane, run, event.cause)
    if resident is not None:
        if resident.program is not None:
            lane.phase(resident, resident.last_job).open_step = resident.program.open_step
        books.settle(lane, resident, event.cause, out)


def _recognise(books: Books, lane: Lane, run: Running, cause: CauseId) -> None:
    """Connect a run that the WPG reported with its call, if that has been heard of."""
    entry = books.entries.get(run.call)
    if entry is None:
        return
    tenant = books.homes[entry.call.deployment][1]
    beside.recognised(lane, tenant, cause)
    if tenant.program is not None:
        tenant.program.adopt((entry.call.seq, run.part))
    books.begin(lane, tenant, run, entry)


def _down(books: Books, lane: Lane, event: WpgDown, out: list[AnyInstruction]) -> None:
    if lane.up:
        lane.up = False
        books.lose(lane, event.cause, out, blame=event.blame)
        if lane.group is not None:
            shared.went_down(lane.group, lane, event.reason)
    lane.reason = event.reason


def _released(books: Books, lane: Lane, event: WpgReleased, out: list[AnyInstruction]) -> None:
    if lane.up:
        lane.up = False
        books.lose(lane, event.cause, out, blame=False)
        if lane.group is not None:
            shared.went_down(lane.group, lane, event.reason)
    if lane.meter is not None:
        out.extend(lane.meter.cut(lane.now_us, (), event.cause))
    handover.released(lane, event, out)
    sharing = [] if lane.group is None else shared.left(lane.group, lane)
    lane.wpg = lane.meter = None
    for other in sharing:
        out.extend(other.account(event.cause))
        books.touch(other)
    books.tidy(lane)


# -- deployments --------------------------------------------------------------------------


def _placed(books: Books, lane: Lane, event: DeploymentPlaced, out: list[AnyInstruction]) -> None:
    deployment = event.deployment
    known = books.homes.get(deployment.id)
    if known is not None:
        if deployment.wpg == lane.id:  # only a move changes its home
            known[1].members[deployment.id] = deployment
            known[1].weighed = None
            _image_found(books, lane, known[1], event, out)
        return
    trains, tiered = deployment.pool is Pool.TRAIN, books.durable_every is not None
    image = _newest(event.image, event.durable if tiered else None)
    key = f"train {deployment.id}" if trains else f"sample {deployment.content}"
    tenant = lane.tenants.get(key)
    if tenant is None:
        program = None
        if trains:
            program = Program(
                image=image,
                applied=event.applied,
                tiered=tiered,
                durable=event.durable,
                spares=books.spare_images,
                spare=event.spare,
            )
        at = Residency.ABSENT if trains and image is None else Residency.HOST
        tenant = lane.tenants[key] = Tenant(
            key=key,
            program=program,
            where=Whereabouts(deployment.id if trains else key, at),
            last_job=deployment.job,
            turn=books.turn,  # a newcomer is not before those that wait for their turn
        )
    tenant.members[deployment.id] = deployment
    tenant.image_bytes = max(tenant.image_bytes, deployment.image_bytes)
    if tiered and trains:
        lane.granted(tenant)
    books.homes[deployment.id] = (lane, tenant)
    books.count(deployment, 1)
    if event.expected is not None:
        books.estimates.expect(deployment.job, event.expected)


def _image_found(
    books: Books, lane: Lane, tenant: Tenant, event: DeploymentPlaced, out: list[AnyInstruction]
) -> None:
    """An agent that was started again has another image than was believed."""
    program = tenant.program
    if program is None:
        return
    if event.durable is not None:
        handover.durable(books, tenant, event.durable, event, out)
        lane.granted(tenant)
    image = _newest(event.image, program.durable)
    if lane.up or image == program.image:
        return
    if image is not None and image > (program.image or START):
        # It was complete, and only its report was lost.
        books.saved(tenant, image, event.cause, out)
    else:
        program.lost_image(image)
    tenant.lose(event.cause)
    books.settle(lane, tenant, event.cause, out)


def _newest(image: Position | None, durable: Position | None) -> Position | None:
    """What a home loads: the newer of what is in both tiers."""
    return max((at for at in (image, durable) if at is not None), default=None)


def _dropped(books: Books, lane: Lane, event: DeploymentDropped, out: list[AnyInstruction]) -> None:
    _, tenant = books.homes.pop(event.deployment)
    if tenant.program is not None:
        mine = list(tenant.program.calls.values())
        if tenant.ready_us is not None:
            books.stop_waiting(lane, tenant)
    else:
        waiting = [e for e in tenant.samples.values() if e.call.deployment == event.deployment]
        for entry in waiting:
            books.drop_sample(lane, tenant, entry)
        running = [run.entry for run in lane.running.values() if run.entry is not None]
        mine = waiting + [e for e in running if e.call.deployment == event.deployment]
    for entry in mine:
        books.finish(entry, ok=False, reason="the job has ended", cause=event.cause, out=out)
        books.entries.pop(entry.call.id, None)
    books.count(tenant.members[event.deployment], -1)
    if len(tenant.members) > 1:
        del tenant.members[event.deployment]
    else:
        tenant.gone = True
        del lane.tenants[tenant.key]
        lane.copies.pop(tenant.key, None)
    books.bury(lane, tenant)
    lane.forget_phases()
    books.tidy(lane)


# -- calls --------------------------------------------------------------------------------


def _arrived(books: Books, lane: Lane, event: CallArrived, out: list[AnyInstruction]) -> None:
    call = event.call
    tenant = books.homes[call.deployment][1]
    if call.id in books.entries or (tenant.program is None and event.done):
        return
    entry = Entry.of(call, at_us=lane.now_us, done=event.done)
    if tenant.program is None:
        if entry.doom:
            books.finish(entry, ok=False, reason=entry.doom, cause=event.cause, out=out)
            return
        books.entries[call.id] = entry
        if call.id not in lane.running and call.id not in lane.early:
            books.enqueue_sample(lane, tenant, entry)
    else:
        if not tenant.program.add(entry):
            other = tenant.program.calls.get(call.seq)
            if other is not None and not event.done:
                reason = f"seq {call.seq} is already taken by call {other.call.id}"
                books.finish(entry, ok=False, reason=reason, cause=event.cause, out=out)
            return
        books.entries[call.id] = entry
        if (call.seq + 1, 0) <= tenant.program.frontier:
            # It took effect before a restart, and only its end was not written down.
            books.finish(entry, ok=True, reason="", cause=event.cause, out=out)
    run = lane.running.get(call.id)
    if run is not None and run.entry is None:
        _recognise(books, lane, run, event.cause)
    elif call.id in lane.early:
        part, ok = lane.early.pop(call.id)
        run = Running(call=call.id, part=part, start_us=lane.now_us)
        _recognise(books, lane, run, event.cause)
        del lane.running[call.id]
        books.end(lane, run, ok=ok, cause=event.cause, out=out)
    books.settle(lane, tenant, event.cause, out)


def _cancelled(books: Books, lane: Lane, event: CallCancelled, out: list[AnyInstruction]) -> None:
    entry = books.entries[event.call]
    if event.call in lane.running:
        entry.cancelled = True
        return
    tenant = books.homes[entry.call.deployment][1]
    if tenant.program is None:
        books.drop_sample(lane, tenant, entry)
        books.finish(entry, ok=False, reason="cancelled", cause=event.cause, out=out)
    elif tenant.program.cancel(entry):
        books.settle(lane, tenant, event.cause, out)


# -- answers ------------------------------------------------------------------------------


def _run_ended(books: Books, lane: Lane, event: RunEnded, out: list[AnyInstruction]) -> None:
    run = lane.running.get(event.call)
    if run is None or run.part != event.part:
        return  # it was lost with its WPG before this was heard
    del lane.running[event.call]
    tokens, took_us = event.prefilled
    books.prefills.learn(lane.id, tokens=tokens, took_us=took_us)
    if run.entry is None:
        lane.early[event.call] = (event.part, event.ok)
        return
    books.end(lane, run, ok=event.ok, cause=event.cause, out=out, why=event.error)


def _paused(books: Books, lane: Lane, event: Paused, out: list[AnyInstruction]) -> None:
    run = lane.running.get(event.call)
    if run is not None and run.part == event.part:
        del lane.running[event.call]
        pausing.paused(books, lane, run, event, out)


def _switch_ended(books: Books, lane: Lane, event: SwitchEnded, out: list[AnyInstruction]) -> None:
    move = lane.move
    if move is None:
        return
    lane.move = None
    outgoing, incoming, cause = move.outgoing, move.incoming, event.cause
    waits = event.room is not Room.ENOUGH and lane.no_room(event.error, handover.RETRY_US)
    if event.ok:
        lane.room_waits = 0
        books.costs.learn(
            lane.id, moved_bytes=event.moved_bytes, duration_us=lane.now_us - move.start_us
        )
    if isinstance(move.order, SaveImage):
        if outgoing is not None:
            _image_ended(books, lane, event, outgoing, move.order, out, waits=waits)
    elif event.ok:
        if outgoing is not None:
            books.saved(outgoing, move.order.outgoing_progress, cause, out)
            outgoing.step(Residency.HOST, cause)
        if incoming is not None:
            lane.resident, incoming.failures = incoming, 0
            beside.came(lane, incoming, cause)
            if incoming.program is not None:
                if handover.fell_back(incoming, event.left, event.error, cause):
                    incoming.program.rewind()
                    incoming.program.applied = incoming.program.position
                    books.settle(lane, incoming, cause, out)
                incoming.program.loaded()
                phase = lane.phase(incoming, incoming.last_job)
                phase.open_step = incoming.program.open_step
    elif waits and event.room is Room.SHORT:
        # What was to leave stays until there is room for its image.
        lane.resident, lane.owed = outgoing, None
        if outgoing is not None:
            outgoing.step(Residency.RESIDENT, cause)
        if incoming is not None:
            incoming.lose(cause)
            books.settle(lane, incoming, cause, out)
    else:
        # Nobody knows what the device holds now; images and calls are all there.
        lane.resident = lane.owed = None
        other = incoming is not None and handover.fell_back(
            incoming, event.left, event.error, cause
        )
        for tenant in (outgoing, incoming):
            if tenant is not None and tenant is not lane.beside:
                tenant.lose(cause)
                books.settle(lane, tenant, cause, out)
        if incoming is not None and not other and event.room is Room.ENOUGH:
            incoming.failures += 1
            if incoming.failures >= books.max_attempts:
                reason = f"its state could not be brought in {incoming.failures} times"
                reason += f" ({event.error})" if event.error else ""
                incoming.failures = 0
                books.break_off(lane, incoming, reason, cause, out)
    for tenant in (outgoing, incoming):
        if tenant is not None:
            books.bury(lane, tenant)


def _image_ended(
    books: Books,
    lane: Lane,
    event: SwitchEnded,
    tenant: Tenant,
    order: SaveImage,
    out: list[AnyInstruction],
    *,
    waits: bool,
) -> None:
    """``waits``: there was no room for it, and there may be soon."""
    if event.ok:
        books.saved(tenant, order.progress, event.cause, out)
        tenant.step(Residency.RESIDENT, event.cause)
    elif waits and lane.owed is not None:
        lane.owed = None
        tenant.step(Residency.RESIDENT, event.cause)
    elif lane.owed is not None:
        # Its place is wanted and it cannot be saved: give it up, its calls rebuild it.
        lane.resident = None
        tenant.lose(event.cause)
        books.settle(lane, tenant, event.cause, out)
    else:
        tenant.step(Residency.RESIDENT, event.cause)
        if tenant.program is not None:
            tenant.program.steps = 0
        if lane.draining and not tenant.gone:
            lane.refused(tenant, handover.RETRY_US)


def _tick(books: Books, event: Tick, out: list[AnyInstruction]) -> None:
    """Write long stretches down; wake the lanes that wanted to be woken."""
    at_us = event.at_us
    if event.flush or at_us >= books.due_us:
        due_us = at_us + SHARED_ROW_US
        for lane in books.lanes.values():
            if lane.meter is not None:
                if event.flush or lane.meter.due(at_us):
                    out.extend(lane.meter.cut(lane.clamp(at_us), lane.charged(), event.cause))
                due_us = min(due_us, lane.meter.due_us())
        books.due_us, books.beat_us = due_us, max(books.beat_us, at_us)
    woken = {wpg for wpg, alarm_us in books.alarms_us.items() if at_us >= alarm_us}
    for wpg in woken if len(woken) < 2 else (wpg for wpg in books.lanes if wpg in woken):
        if (woken_lane := books.lanes.get(wpg)) is not None:
            books.touch(woken_lane)

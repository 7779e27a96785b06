"""The partition's holds: submits, follows, renews, drains and releases them.

What to do is decided by ``core.holding``; this module brings it the facts, which are Slurm's,
and carries its actions out. A Slurm that does not answer is a pause, never a lost hold.
"""

import asyncio
import logging
from typing import Any

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import DatabaseUnavailable, SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.holding import (
    Demand,
    Drain,
    Extend,
    Fault,
    HoldAction,
    HoldPhase,
    HoldView,
    Release,
    Submit,
    Undrain,
)
from plexrl_slurm.core.ids import CauseId, SlurmId, WpgId
from plexrl_slurm.core.messages import (
    WpgDraining,
    WpgResumed,
)
from plexrl_slurm.daemons import hold_writes
from plexrl_slurm.daemons.added_wpgs import why_lacking
from plexrl_slurm.daemons.agents import AgentHub
from plexrl_slurm.daemons.held_wpgs import HeldWpgs, LiveHold, stays_of
from plexrl_slurm.daemons.hold_book import HoldBook
from plexrl_slurm.daemons.hold_hygiene import Hygiene
from plexrl_slurm.daemons.hold_job import submit_hold
from plexrl_slurm.daemons.hold_views import excluded_views, view_of
from plexrl_slurm.daemons.layout import (
    LOCALHOST,
    Found,
    find_again,
    in_order,
    lay_out,
)
from plexrl_slurm.daemons.moves import Mover
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.db import holds as rows
from plexrl_slurm.db import ledger
from plexrl_slurm.db.models import HoldRow
from plexrl_slurm.logs import say
from plexrl_slurm.slurm.port import ENDED, ClusterPort, JobStatus, SlurmState

log = logging.getLogger(__name__)

#: A given-back hold whose agents have not ended by then is cancelled.
RELEASE_US = 10_000_000
#: A job that nobody knows in so many answers in a row is gone.
UNKNOWN_LOOKS = 5


class HoldKeeper:
    """One a daemon."""

    def __init__(self, parts: Parts, hub: AgentHub, mover: Mover, *, endpoint: str) -> None:
        self.live: dict[str, LiveHold] = {}
        #: Why no hold could be submitted the last time; "" if it could.
        self.trouble = ""
        self._parts, self._hub, self._mover, self._endpoint = parts, hub, mover, endpoint
        self._settings = parts.settings
        self.book = HoldBook(parts.settings.hold)
        self._wpgs = HeldWpgs(parts, hub, mover)
        self._hygiene = Hygiene(parts, hub)
        self._failed_us: list[int] = []
        #: The partition is taken down: nothing new is submitted.
        self._closing = False
        #: One look at a time.
        self._looking = asyncio.Lock()
        #: Every hold of the database is known: what has no WPG now has lost it.
        self._adopted = False

    # -- start -------------------------------------------------------------------------------
    async def adopt(self) -> None:
        """Find the holds of earlier daemons again."""
        store, settings = self._parts.store, self._settings
        since_us = now_us() - settings.hold.exclude_us
        for fault in await store.run(
            rows.node_faults, partition=settings.partition, since_us=since_us
        ):
            self._wpgs.faults.append(Fault(node=fault.node, at_us=fault.at_us, reason=fault.reason))
        await self._parts.watch.look()
        for row in await store.run(rows.live_holds, settings.partition):
            hold = LiveHold(
                id=row.id,
                slurm_id=SlurmId(row.slurm_id),
                submitted_us=row.started_us,
                replaces=row.replaces,
                running_us=row.running_us,
                closed_us=await store.run(rows.last_release, row.id),
            )
            self.live[hold.id] = hold
            self._hub.await_hold(hold.id)
            await store.run(rows.set_hold_epoch, row.id, str(self._parts.epoch))
            hold.lacks = tuple(slot.name for slot in self._wpgs.slots)
            if row.running_us is not None:
                await self._take_over(hold, row)
            say(log, "hold_found", hold=hold.id, slurm_id=hold.slurm_id, wpgs=sorted(hold.wpgs))
            if row.draining and hold.wpgs:
                self._drain(hold, row.reason)
        self._adopted = True
        for wpg in self._mover.inhabited() - self._parts.placer.wpgs.keys():
            self._mover.gone(wpg)

    async def _take_over(self, hold: LiveHold, row: HoldRow) -> None:
        found = [
            Found(name=each.name, slot=each.slot, component=each.component, node=each.node)
            for each in await self._parts.store.run(rows.held_wpgs, hold.id)
        ]
        booked = await self._parts.store.run(ledger.last_stop, hold.id)
        status = self._parts.watch.jobs.get(hold.slurm_id) or await self._ask(hold)
        rooms = {
            (each.component, node): self._wpgs.room(hold, each.component, node)
            for each in found
            for node in each.nodes
        }
        layout = find_again(
            self._wpgs.slots, found, {key: room for key, room in rooms.items() if room}
        )
        changed = {each.name for each in found} - {held.id for held in layout}
        if changed:
            # The settings have another set of WPGs now.
            say(log, "hold_changed", hold=hold.id, gone=sorted(changed))
            await self._parts.store.run(
                hold_writes.close, hold.id, {w: booked[WpgId(w)] for w in changed}
            )
        ever = await self._parts.store.run(rows.slots_of, hold.id)
        hold.places = {place for held in layout for place in held.places}
        hold.batch_node = row.batch_node or LOCALHOST
        self._wpgs.add(hold, layout, {held.id: booked[held.id] for held in layout})
        layout += self._wpgs.add_new(hold, layout, ever)
        self._hub.expect(hold.id, layout, hold.places)
        if status is not None and status.state in ENDED:
            # In the turn in which its books go on, or they would go on to this instant.
            self._ended(hold, status.end_us or now_us(), "it ended while no daemon was there")

    # -- for ever ----------------------------------------------------------------------------
    async def run(self) -> None:
        """Follow Slurm's answers."""
        while True:
            await self._parts.watch.news(timeout_s=10.0)
            await self.look()

    async def look(self) -> None:
        """Take the last answer in, then decide."""
        async with self._looking:
            await self._look()

    async def _look(self) -> None:
        watch = self._parts.watch
        if watch.at_us == 0:
            return
        for hold in list(self.live.values()):
            if hold.submitted_us < watch.at_us and not watch.trouble:
                await self._follow(hold, watch.jobs.get(hold.slurm_id))
        if self._settings.backend == "slurm":
            self._lose_useless()
            await self._hygiene.cancel_strays({hold.slurm_id for hold in self.live.values()})
        if self._mover.homeless():
            self._mover.resettle()
        self._say_why()
        if self._closing:
            return
        now = now_us()
        views = [self._view(hold, now) for hold in self.live.values()]
        for action in self.book.decide(now, views, self._demand(), self._failed_us):
            await self._do(action)

    def _demand(self) -> Demand:
        return Demand(
            waiting_since_us=self._parts.state.waiting_since_us,
            homeless=bool(self._mover.homeless()),
        )

    def _view(self, hold: LiveHold, now: int) -> HoldView:
        state = self._parts.state
        in_use = any(
            home in hold.wpgs for job in state.jobs.values() for home in job.homes.values()
        )
        here = [self._hub.wpgs[wpg] for wpg in hold.wpgs if wpg in self._hub.wpgs]
        up = all(wpg.state == "up" for wpg in here)
        ready = self._wpgs.is_whole(hold) and up
        outdated = bool(hold.missing) and self._settings.backend == "slurm"
        if (ready or (hold.missing and up)) and not hold.came_up:
            hold.came_up, self._failed_us = True, []
        if in_use or not hold.came_up:
            hold.idle_since_us = None
        elif hold.idle_since_us is None:
            hold.idle_since_us = now
        pools = {held.slot.pool for held in hold.wpgs.values()}
        running = hold.running_us is not None
        hold.see_extension(self._parts.watch.at_us)
        return HoldView(
            id=hold.id,
            phase=hold.phase,
            submitted_us=hold.submitted_us,
            started_us=hold.running_us,
            limit_end_us=hold.limit_end_us if running else None,
            ready=running and ready,
            in_use=in_use,
            idle_since_us=hold.idle_since_us,
            vacant_since_us=hold.vacant_since_us if in_use else None,
            draining=hold.draining,
            drained=hold.draining and all(wpg in self._mover.drained for wpg in hold.wpgs),
            replaces=hold.replaces,
            batch_lost=hold.batch_lost,
            lost_nodes=hold.lost_nodes,
            whole=not running or self._wpgs.is_whole(hold),
            useless=running and pools != {slot.pool for slot in self._wpgs.slots},
            outdated=outdated,
            extending=hold.extending_from_us is not None,
            extend_refused=hold.extend_refused,
            pending_reason=hold.reason,
        )

    def _say_why(self) -> None:
        """What a job that finds no WPG is told."""
        waiting = [hold for hold in self.live.values() if hold.phase is HoldPhase.PENDING]
        words = [
            f"hold {hold.id} (Slurm job {hold.slurm_id}) waits in Slurm"
            + (f" ({hold.reason})" if hold.reason else "")
            for hold in waiting
        ]
        local = self._settings.backend == "local"
        whys = [why_lacking(hold.id, hold.missing, local=local) for hold in self.live.values()]
        words += [why for why in whys if why]
        if self.trouble:
            words.append(f"a new hold could not be submitted: {self.trouble}")
        if self._parts.watch.trouble:
            words.append(f"Slurm does not answer: {self._parts.watch.trouble}")
        self._parts.placer.why_no_more = "; ".join(words)

    # -- facts of Slurm ----------------------------------------------------------------------
    async def _follow(self, hold: LiveHold, status: JobStatus | None) -> None:
        if status is None:
            status = await self._ask(hold)
        if status is None:
            hold.unknown += 1
            if hold.unknown >= UNKNOWN_LOOKS:
                self._ended(hold, 0, "Slurm does not know its job any more")
            return
        hold.unknown = 0
        if status.state in ENDED:
            word = status.word or str(status.state)
            self._ended(hold, status.end_us or now_us(), f"Slurm says {word}")
        elif status.state is SlurmState.PENDING:
            hold.reason = status.reason
            if status.restarts > hold.restarts:
                say(log, "hold_requeued", hold=hold.id, reason=status.reason)
                hold.restarts = status.restarts
            if hold.running_us is not None:
                for place, why in await self._hygiene.broken(hold.places):
                    self._wpgs.note_fault(place.node, why)
                self._left(hold, now_us(), f"Slurm put hold {hold.id} back into its queue")
            if hold.is_torn(status, self._parts.watch.jobs):
                await self._cancel(hold)
                self._ended(
                    hold, now_us(), "Slurm requeued some of its components and ended others"
                )
                return
            # Asked too early, Slurm starts some components of a requeued job and not the others.
            waits = [status, *(self._parts.watch.jobs.get(c, status) for c in status.components)]
            if "BeginTime" in {c.reason for c in waits} and status.restarts and not hold.cancelled:
                await self._slurm(lambda: self._cluster().start_now(hold.slurm_id))
        elif status.state is SlurmState.COMPLETING:
            if hold.running_us is not None:
                self._left(hold, status.end_us or now_us(), f"Slurm ends hold {hold.id}")
        elif status.state is SlurmState.RUNNING:
            if hold.running_us is not None and (status.start_us or 0) > hold.running_us:
                # Nobody has seen it wait, and nobody knows since when.
                self._left(hold, 0, f"Slurm has started hold {hold.id} again")
            hold.limit_end_us = status.end_us if self._settings.backend == "slurm" else None
            if hold.running_us is not None:
                self._compare_nodes(hold, status)
            elif hold.releasing_us is not None:
                await self._cancel(hold)
            else:
                self._started(hold, status)
        if hold.releasing_us is not None and now_us() - hold.releasing_us > RELEASE_US:
            await self._cancel(hold)

    async def _ask(self, hold: LiveHold) -> JobStatus | None:
        """A job that is not in the answer: accounting may know it."""
        try:
            found = await asyncio.to_thread(self._parts.port.states, [hold.slurm_id])
        except (SlurmUnavailable, SlurmRejected) as problem:
            return JobStatus(state=SlurmState.UNSURE, reason=str(problem))
        return found.get(hold.slurm_id)

    def _started(self, hold: LiveHold, status: JobStatus) -> None:
        places = self._wpgs.places_of(hold, status)
        wanted = {index for index, _ in enumerate(self._settings.hold.components)} or {0}
        if places is None or {place.component for place in places} != wanted:
            return
        rooms = [self._wpgs.room(hold, each.component, each.node) for each in in_order(places)]
        layout = lay_out(
            self._wpgs.slots, [room for room in rooms if room], taken=self._parts.placer.wpgs
        )
        began_us = max(status.start_us or now_us(), hold.closed_us)
        hold.running_us, hold.places, hold.reason = began_us, places, ""
        hold.batch_node = status.batch_node or LOCALHOST
        hold.lost_nodes, hold.came_up, hold.extend_refused = 0, False, False
        laid = {held.slot.name for held in layout}
        hold.lacks = tuple(name for name in hold.lacks if name not in laid)
        clock = self._parts.shell.core.clock_us
        held_us = {held.id: max(began_us, clock(held.id)) for held in layout}
        say(log, "hold_runs", hold=hold.id, nodes=sorted(place.node for place in places))
        stays = stays_of(layout, held_us)
        self._parts.writer.add(hold_writes.started, hold.id, began_us, hold.batch_node, stays)
        self._wpgs.add(hold, layout, held_us)
        self._hub.expect(hold.id, layout, places, restarts=status.restarts)
        self._mover.resettle(f"hold {hold.id} has its nodes")
        self._parts.wake_intake.set()

    def _compare_nodes(self, hold: LiveHold, status: JobStatus) -> None:
        places = self._wpgs.places_of(hold, status)
        if places is None or not status.nodes:
            return
        for place in sorted(hold.places - places, key=lambda place: place.node):
            self._wpgs.lose_place(hold, place, f"Slurm lost node {place.node}")

    def _lose_useless(self) -> None:
        for place, reason in self._hygiene.useless_places():
            hold = self.live.get(place.hold)
            if hold is not None and place in hold.places:
                self._wpgs.lose_place(hold, place, reason)

    def _left(self, hold: LiveHold, at_us: int, reason: str) -> None:
        """Slurm counts it no more, however long its processes take to end; it may be requeued."""
        say(log, "hold_left_its_nodes", hold=hold.id, reason=reason)
        self._wpgs.drop_all(hold, min(at_us, now_us()), reason)
        hold.running_us, hold.limit_end_us, hold.draining = None, None, False
        hold.reason = reason
        self._hub.await_hold(hold.id)
        self._parts.writer.add(hold_writes.requeue, hold.id, reason, now_us())
        self._mover.resettle(reason)

    def _ended(self, hold: LiveHold, at_us: int, reason: str) -> None:
        say(log, "hold_ended", hold=hold.id, slurm_id=hold.slurm_id, reason=reason)
        at_us = min(at_us, now_us())
        self._wpgs.drop_all(hold, at_us, f"hold {hold.id} has ended ({reason})")
        self._hub.forget_hold(hold.id, reason)
        del self.live[hold.id]
        if hold.releasing_us is None and not hold.came_up:
            self._failed_us.append(now_us())
        self._parts.writer.add(hold_writes.end, hold.id, max(at_us, hold.submitted_us))
        if self._adopted:
            self._mover.resettle(reason)

    # -- actions -----------------------------------------------------------------------------
    async def _do(self, action: HoldAction) -> None:
        hold = self.live.get(action.hold) if not isinstance(action, Submit) else None
        kind = type(action).__name__.lower()
        say(log, f"hold_{kind}", hold=hold.id if hold else "", reason=action.reason)
        match action:
            case Submit():
                await self._submit(action)
            case Extend() if hold is not None:
                await self._extend(hold, action.limit_us)
            case Drain() if hold is not None:
                self._drain(hold, action.reason)
            case Undrain() if hold is not None:
                self._undrain(hold)
            case Release() if hold is not None:
                await self.release(hold)
            case _:
                pass

    async def _submit(self, action: Submit) -> None:
        settings, parts = self._settings, self._parts
        out = self.book.left_out(now_us(), self._wpgs.faults)
        try:
            name = await parts.store.run(rows.next_hold_id)
            if name in self.live:
                return  # the row of the last one is still to be written
            self._hub.await_hold(name)
            slurm_id = await asyncio.to_thread(
                submit_hold,
                parts.port,
                settings,
                name,
                endpoint=self._endpoint,
                exclude=out,
            )
        except DatabaseUnavailable as problem:
            self.trouble = str(problem)
            return
        except (SlurmRejected, SlurmUnavailable, OSError) as problem:
            self.trouble = str(problem)
            self._failed_us.append(now_us())
            say(log, "hold_refused", reason=problem)
            return
        self.trouble = ""
        hold = LiveHold(id=name, slurm_id=slurm_id, submitted_us=now_us(), replaces=action.replaces)
        self.live[name] = hold
        parts.writer.add(hold_writes.submitted, hold, settings, str(parts.epoch))
        say(log, "hold_submitted", hold=name, slurm_id=slurm_id)

    async def _extend(self, hold: LiveHold, limit_us: int) -> None:
        try:
            await asyncio.to_thread(
                self._cluster().set_time_limit, hold.slurm_id, limit_us=limit_us
            )
        except SlurmRejected as problem:
            hold.extend_refused = True
            say(log, "extend_refused", hold=hold.id, reason=problem)
        except SlurmUnavailable as problem:
            say(log, "extend_failed", hold=hold.id, reason=problem)
        else:
            hold.extending_from_us, hold.extended_us = hold.limit_end_us, now_us()

    def _drain(self, hold: LiveHold, reason: str) -> None:
        hold.draining, hold.reason = True, reason
        self._parts.writer.add(hold_writes.draining, hold.id, True, reason)
        for wpg in hold.wpgs:
            self._parts.placer.draining.add(wpg)
            self._parts.shell.feed(WpgDraining(at_us=now_us(), cause=CauseId(reason), wpg=wpg))

    def _undrain(self, hold: LiveHold) -> None:
        hold.draining, hold.reason = False, ""
        self._parts.writer.add(hold_writes.draining, hold.id, False, "")
        for wpg in hold.wpgs:
            self._parts.placer.draining.discard(wpg)
            self._mover.drained.discard(wpg)
            self._parts.shell.feed(
                WpgResumed(at_us=now_us(), cause=CauseId("it is wanted again"), wpg=wpg)
            )

    async def release(self, hold: LiveHold) -> None:
        """Give it back: its agents end, or its job is cancelled after a moment."""
        if hold.releasing_us is None:
            hold.releasing_us = now_us()
            self._hub.stop_hold(hold.id)
        if hold.running_us is None:
            await self._cancel(hold)

    async def _cancel(self, hold: LiveHold) -> None:
        if not hold.cancelled:
            hold.cancelled = await self._slurm(lambda: self._parts.port.cancel(hold.slurm_id))

    async def release_all(self, patience_s: float) -> None:
        """The partition is taken down."""
        self._closing = True
        async with self._looking:  # one that is being submitted is there after that
            for hold in list(self.live.values()):
                await self.release(hold)
        deadline = now_us() + round(patience_s * 1e6)
        while self.live and now_us() < deadline:
            await self._parts.watch.look()
            await self.look()
            await asyncio.sleep(0.2)
        async with self._looking:
            for hold in list(self.live.values()):
                await self._cancel(hold)
                self._ended(hold, now_us(), "it was cancelled with the partition")
        await self._parts.writer.drain()

    async def _slurm(self, ask: Any) -> bool:
        """Whether Slurm did it; if not, it is asked again at the next look."""
        try:
            await asyncio.to_thread(ask)
        except (SlurmRejected, SlurmUnavailable) as problem:
            say(log, "slurm_refused", reason=problem)
            return False
        return True

    def _cluster(self) -> ClusterPort:
        return self._parts.port  # type: ignore[return-value]

    # -- views -------------------------------------------------------------------------------
    def views(self) -> list[dict[str, Any]]:
        """For ``plexrl sinfo``."""
        for hold in self.live.values():
            self._view(hold, now_us())  # which notes whether it has come up
        return [
            view_of(hold, self._settings.backend, len(self._wpgs.slots))
            for hold in self.live.values()
        ]

    def excluded(self) -> list[dict[str, Any]]:
        """Nodes that are left out for a while."""
        return excluded_views(self._wpgs.faults, self._settings.hold)

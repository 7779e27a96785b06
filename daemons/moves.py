"""Moves deployments and snapshots off WPGs that are given back, or gone, to others with room."""

import logging
from dataclasses import replace
from typing import Any

from plexrl_slurm.core.ids import CauseId, DeploymentId, JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.daemons import shared_tier
from plexrl_slurm.daemons.recovery import Recovery
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_jobs import PartitionService
from plexrl_slurm.daemons.service_training import training_deployment
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import deployments, queue, snapshots
from plexrl_slurm.logs import say
from plexrl_slurm.memory.fence import token_of

log = logging.getLogger(__name__)


class Mover:
    """One a daemon."""

    def __init__(self, parts: Parts, service: PartitionService, recovery: Recovery) -> None:
        self._parts, self._service, self._recovery = parts, service, recovery
        #: Drained WPGs that are still held: what lives there may go.
        self.drained: set[WpgId] = set()

    def wpg_drained(self, wpg: WpgId) -> None:
        """The core says that nothing is under way there."""
        if wpg in self._parts.placer.draining:
            say(log, "wpg_drained", wpg=wpg)
            self.drained.add(wpg)
            self.resettle(f"WPG {wpg} is given back")

    def gone(self, wpg: WpgId) -> None:
        """It is no longer held; an agent that has not spoken for it will not."""
        self.drained.discard(wpg)
        self._recovery.place_lost(wpg)

    def homeless(self) -> list[JobId]:
        """Jobs with something on a WPG that is gone, or that is given back."""
        return [
            job
            for job, homes in self._homes().items()
            if any(self._must_leave(wpg) for _, wpg in homes)
        ]

    def _homes(self) -> dict[JobId, dict[tuple[Pool, WpgId], None]]:
        """The homes of every job, and where anything of it lives: it may have been made while its
        home changed."""
        state = self._parts.state
        found = {job.id: dict.fromkeys(job.homes.items()) for job in state.jobs.values()}
        for live in state.deployments.values():
            if not live.dropped and live.job in found:
                found[live.job][Pool.TRAIN, live.wpg] = None
        for snapshot in state.snapshots.values():
            if not snapshot.dropped and snapshot.job in found:
                found[snapshot.job][Pool.ROLLOUT, snapshot.wpg] = None
        return found

    def inhabited(self) -> set[WpgId]:
        """WPGs that are a home, or that something lives on."""
        return {wpg for homes in self._homes().values() for _, wpg in homes}

    def _may_leave(self, job: LiveJob, wpg: WpgId) -> bool:
        """Whether nothing of the job is under way there."""
        core, state = self._parts.shell.core, self._parts.state
        here = [live.id for live in state.deployments.values() if live.wpg == wpg]
        here += [snapshot.id for snapshot in state.snapshots.values() if snapshot.wpg == wpg]
        mine = [each for each in here if self._parts.shell.deployments.get(each) is not None]
        return not any(
            core.why_not_move(each)
            for each in mine
            if self._parts.shell.deployments[each].job == job.id
        )

    def _must_leave(self, wpg: WpgId) -> bool:
        return wpg not in self._parts.placer.wpgs or wpg in self.drained

    def resettle(self, reason: str = "") -> None:
        """Move whatever may move and finds room elsewhere; ``reason``: "" tells of its WPG."""
        for job_id, homes in self._homes().items():
            job = self._parts.state.jobs[job_id]
            for pool, home in homes:
                if self._must_leave(home) and self._may_leave(job, home):
                    self._move_job(job, pool, home, reason or self._why_leave(home))

    def _why_leave(self, wpg: WpgId) -> str:
        return f"WPG {wpg} is given back" if wpg in self.drained else f"WPG {wpg} is held no more"

    def _move_job(self, job: LiveJob, pool: Pool, old: WpgId, reason: str) -> None:
        new = job.homes.get(pool)
        if new is None or self._must_leave(new):
            new = self._parts.placer.rehome(job, pool)
        if new is None:
            if not self._lives(job, pool) and not any(each[0] is pool for each in job.declared):
                # Nothing was made there yet: the next call finds a home.
                job.homes.pop(pool, None)
                self._write_homes(job)
            return
        self._take(job, pool, old, new, reason)

    def move(self, job: LiveJob, pool: Pool, new: WpgId, reason: str) -> bool:
        """Move all that a job has in ``pool`` to ``new``; false if something of it is under way
        where it is."""
        old = job.homes.get(pool)
        if old is None or old == new or not self._may_leave(job, old):
            return False
        self._take(job, pool, old, new, reason)
        return True

    def _take(self, job: LiveJob, pool: Pool, old: WpgId, new: WpgId, reason: str) -> None:
        job.homes[pool] = new
        cause = CauseId(f"{reason}: {old} -> {new}")
        say(log, "job_moves", job=job.slurm_id, pool=pool, old=old, new=new, reason=reason)
        if pool is Pool.TRAIN:
            self._move_deployments(job, old, new, cause)
        else:
            self._move_snapshots(job, old, new, cause)
        self._write_homes(job)
        self._parts.writer.add(_note_move, job.id, f"{cause}", self._service.now_us(), lazy=True)

    def _lives(self, job: LiveJob, pool: Pool) -> bool:
        state = self._parts.state
        found = state.deployments if pool is Pool.TRAIN else state.snapshots
        return any(each.job == job.id and not each.dropped for each in found.values())

    def _move_deployments(self, job: LiveJob, old: WpgId, new: WpgId, cause: CauseId) -> None:
        parts = self._parts
        for live in list(parts.state.deployments.values()):
            if live.job != job.id or live.dropped or live.wpg != old:
                continue
            live.wpg = new
            if parts.hub is not None:
                order = token_of(parts.epoch, parts.hub.order_id())
                shared_tier.take_over(
                    parts.settings, live.id, order, parts.shell.durable_progress(live.id)
                )
            if live.id in parts.shell.deployments:
                parts.shell.move(
                    training_deployment(live, job, parts.settings.models[live.model]),
                    image=parts.shell.durable_progress(live.id),
                    cause=cause,
                )
            else:
                self._recovery.place_alone(live)
            parts.writer.add(_deployment_moved, live.id, new, self._service.now_us())
            if parts.hub is not None:
                parts.hub.drop_at(old, deployments=[live.id])

    def _move_snapshots(self, job: LiveJob, old: WpgId, new: WpgId, cause: CauseId) -> None:
        parts = self._parts
        for snapshot in list(parts.state.snapshots.values()):
            if snapshot.job != job.id or snapshot.dropped or snapshot.wpg != old:
                continue
            snapshot.wpg = new
            if snapshot.id in parts.shell.deployments:
                known = parts.shell.deployments[snapshot.id]
                parts.shell.move(replace(known, wpg=new), image=None, cause=cause)
            else:
                self._recovery.place_snapshot(snapshot)
            parts.writer.add(_snapshot_moved, snapshot.id, new)

    def _write_homes(self, job: LiveJob) -> None:
        homes = {str(pool): str(wpg) for pool, wpg in job.homes.items()}
        self._parts.writer.add(queue.set_homes, job.id, homes)


def _deployment_moved(session: Any, deployment: DeploymentId, wpg: WpgId, now_us: int) -> None:
    deployments.moved(session, deployment, wpg=wpg, now_us=now_us)


def _snapshot_moved(session: Any, snapshot: DeploymentId, wpg: WpgId) -> None:
    snapshots.moved(session, snapshot, wpg=wpg)


def _note_move(session: Any, job: JobId, text: str, now_us: int) -> None:
    queue.note(session, job, at_us=now_us, kind="moved", text=text)

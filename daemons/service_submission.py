"""Jobs come in: queued, bound to Slurm's job, given their credentials, or adopted from Slurm."""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from plexrl_slurm.api.service import JobSubmission, Principal
from plexrl_slurm.core.errors import (
    BadInput,
    NotAdmitted,
    NotFound,
    SlurmUnavailable,
    UnknownModel,
)
from plexrl_slurm.core.ids import JobId, SlurmId
from plexrl_slurm.core.limits import NORMAL
from plexrl_slurm.core.states import ENDED, JobState
from plexrl_slurm.daemons.capacity import refuse_impossible
from plexrl_slurm.daemons.job_views import PROMISE, RELEASED, RESTARTS
from plexrl_slurm.daemons.service_sampling import SamplingCalls
from plexrl_slurm.daemons.standings import QOS, Standings
from plexrl_slurm.daemons.state import LiveJob
from plexrl_slurm.db import queue
from plexrl_slurm.db.engine import Session
from plexrl_slurm.db.models import JobRow
from plexrl_slurm.slurm.directives import parse_max_slowdown
from plexrl_slurm.slurm.native import read_mark
from plexrl_slurm.slurm.port import ClusterPort, JobStatus
from plexrl_slurm.transport.tokens import job_token, token_key

#: How long a call of a job that has no place yet waits for one; then its SDK calls again.
TURN_US = 20_000_000
#: Between two looks.
_LOOK_S = 0.5

#: Options of a row that only the daemon writes.
_OURS = frozenset({RELEASED, RESTARTS})


def hashed(token: str) -> str:
    """What is stored of an API key."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a new row says."""

    name: str
    uid: int
    user: str
    account: str
    script: str
    models: Sequence[str]
    priority: int
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)


class SubmissionCalls(SamplingCalls):
    """See :class:`plexrl_slurm.api.service.Service`."""

    def __init__(self, parts: Any) -> None:
        super().__init__(parts)
        self._token_key = token_key(parts.settings.state_dir)
        self.standings = Standings(parts.settings)

    async def submit_job(self, who: Principal, job: JobSubmission) -> dict[str, Any]:
        if job.partition != self.settings.partition:
            raise BadInput(
                f"this daemon serves partition {self.settings.partition!r}, not {job.partition!r}"
            )
        if self.state.draining:
            raise BadInput(
                f"partition {self.settings.partition!r} is draining and takes no new job: "
                f"wait for `plexrl partition resume`"
            )
        for name in job.models:
            if self.model_named(name) is None:
                raise UnknownModel(name, tuple(sorted(self.models)))
        known = [self.model_named(name) for name in job.models]
        refuse_impossible(self.settings, [model for model in known if model is not None])
        if job.account:  # else Slurm chooses one
            self.standings.check_qos(who.user, job.account, job.options)
        _check_promise(job.options)
        wish = Wish(
            name=job.name,
            uid=who.uid,
            user=who.user,
            account=job.account,
            script=job.script,
            models=job.models,
            priority=job.priority,
            seed=job.seed,
            options={name: said for name, said in job.options.items() if name not in _OURS},
        )
        job_id = await self.store.run(self._queue_checked, wish, self.now_us())
        return self._answer(job_id)

    def _queue_checked(self, session: Session, wish: Wish, now_us: int) -> JobId:
        self.standings.check_submission(
            session,
            user=wish.user,
            account=wish.account,
            qos=str(wish.options.get(QOS) or NORMAL),
            models=wish.models,
        )
        return self._queue(session, wish, now_us)

    def _queue(self, session: Session, wish: Wish, now_us: int) -> JobId:
        job_id = queue.submit(
            session,
            partition=self.settings.partition,
            name=wish.name,
            uid=wish.uid,
            user=wish.user,
            account=wish.account,
            script=wish.script,
            models=wish.models,
            priority=wish.priority,
            seed=wish.seed,
            options=dict(wish.options),
            token_sha256=None,
            now_us=now_us,
        )
        queue.set_token(session, job_id, token_sha256=hashed(self._token(job_id)))
        return job_id

    def _token(self, job_id: JobId) -> str:
        return job_token(self._token_key, self.settings.partition, job_id)

    def _answer(self, job_id: JobId) -> dict[str, Any]:
        token, url = self._token(job_id), self._parts.url
        env = {
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": token,
            "OPENAI_BASE_URL": f"{url}/oai/v1",
            "OPENAI_API_KEY": token,
            "PLEXRL_JOB_ID": str(job_id),
            "PLEXRL_PARTITION": self.settings.partition,
            "TINKER_TELEMETRY": "0",
            "HF_HUB_OFFLINE": "1",
        }
        if self.settings.tls_ca is not None:
            env["SSL_CERT_FILE"] = str(self.settings.tls_ca)
        return {"job_id": job_id, "token": token, "env": env}

    # -- Slurm's job -------------------------------------------------------------------------
    async def bind_job(self, who: Principal, job_id: JobId, *, slurm_id: str) -> dict[str, Any]:
        row = await self.owned(who, job_id)
        found = await self._find(SlurmId(slurm_id))
        uids = {status.uid for status in found.values()}
        if None in uids:  # it may become anybody's
            raise SlurmUnavailable(
                f"Slurm cannot say now whose job {slurm_id} is: see `squeue -j {slurm_id}`, "
                f"and try again in a moment"
            )
        if uids != {row.uid}:
            raise NotFound("Slurm job", slurm_id)
        self._parts.watch.young.update(found)
        await self.store.run(self._bind, row, found, self.now_us())
        self._parts.wake_intake.set()
        return {"job_id": job_id, "slurm_id": slurm_id, "tasks": len(found)}

    async def _row_of(self, slurm_id: SlurmId) -> JobRow | None:
        return await self.store.run(
            queue.by_slurm_id, partition=self.settings.partition, slurm_id=slurm_id
        )

    async def _find(self, slurm_id: SlurmId) -> Mapping[SlurmId, JobStatus]:
        """The job, or every task of the array."""
        if self.settings.slurm is None:
            return await asyncio.to_thread(self.port.states, [slurm_id])
        found = await asyncio.to_thread(cast(ClusterPort, self.port).queued, slurm_id)
        # The quick answer leaves out heterogeneous jobs.
        return found or await asyncio.to_thread(self.port.states, [slurm_id])

    def _bind(
        self, session: Session, row: JobRow, found: Mapping[SlurmId, JobStatus], now_us: int
    ) -> None:
        """The first task takes the row, every other one gets a row like it."""
        tasks = sorted(found.items(), key=lambda each: (each[1].array_task or 0, each[0]))
        self._check_bound(session, row, tasks[0][1])
        for index, (slurm_id, status) in enumerate(tasks):
            job_id = JobId(row.id)
            other = queue.by_slurm_id(session, partition=row.partition, slurm_id=slurm_id)
            taken = other is not None and other.state not in ENDED and other.id != row.id
            if index > 0:
                if taken:
                    continue  # by this submission: it is bound again
                job_id = self._queue_checked(session, _like(row), now_us)
            elif taken:  # of two rows of one job, only one would be followed
                raise BadInput(f"Slurm job {slurm_id} is in the queue already: use that row")
            queue.bind(session, job_id, slurm_id=slurm_id, now_us=now_us)
            queue.describe(
                session,
                job_id,
                user=status.user or row.user,
                account=status.account or row.account,
                name=status.name or row.name,
            )

    def _check_bound(self, session: Session, row: JobRow, status: JobStatus) -> None:
        """Slurm has chosen the account only now."""
        user, account = status.user or row.user, status.account or row.account
        self.standings.check_qos(user, account, row.options)
        if (user, account) != (row.user, row.account) and row.slurm_id is None:
            self.standings.check_submission(
                session,
                user=user,
                account=account,
                qos=str(row.options.get(QOS) or NORMAL),
                models=row.models,
                but=JobId(row.id),
            )

    async def adopt(self, slurm_id: SlurmId, status: JobStatus, wish: Wish) -> bool:
        """A job that was submitted with plain sbatch gets its row; false if it has had one."""

        def record(session: Session, now_us: int) -> bool:
            row = queue.by_slurm_id(session, partition=self.settings.partition, slurm_id=slurm_id)
            # Slurm begins again with its numbers after some years.
            if row is not None and (row.ended_us or now_us) >= (status.submit_us or 0):
                return False
            job_id = self._queue(session, wish, now_us)
            queue.bind(session, job_id, slurm_id=slurm_id, now_us=now_us)
            return True

        return await self.store.run(record, self.now_us())

    # -- before its turn ---------------------------------------------------------------------
    async def credentials(self, who: Principal, slurm_id: SlurmId) -> dict[str, Any]:
        row = await self._row_of(slurm_id)
        if row is None and await self._will_be_adopted(who, slurm_id):
            raise NotAdmitted(slurm_id, "its partition has not taken it in yet")
        if row is None or row.uid != who.uid or row.state in ENDED:
            raise NotFound("job", slurm_id)
        if JobId(row.id) not in self.state.jobs:
            raise self._not_admitted(row)
        return self._answer(JobId(row.id))

    async def _will_be_adopted(self, who: Principal, slurm_id: SlurmId) -> bool:
        """Whether it is a native submission of the caller's that intake has not seen yet."""
        if self.settings.slurm is None:
            return False
        found = self._parts.watch.jobs
        if slurm_id not in found:
            found = await asyncio.to_thread(self.port.states, [slurm_id])
        status = found.get(slurm_id)
        if status is None or status.uid != who.uid:
            return False
        try:
            mark = read_mark(status.admin_comment)
        except BadInput:
            return False
        return mark is not None and mark.partition == self.settings.partition

    async def waiting_job(self, token: str) -> LiveJob | None:
        """The job of this key as soon as it has its place; ``None`` if no job waits with it.

        Raises ``NotAdmitted`` when that takes too long: the SDK asks again then, for minutes.
        """
        sha256, until = hashed(token), self.now_us() + TURN_US
        while True:
            if (job := self.state.jobs.get(self.state.tokens.get(sha256, JobId(-1)))) is not None:
                return job
            row = await self.store.read(queue.by_token, sha256)
            if row is None or row.state in ENDED or row.partition != self.settings.partition:
                return None
            if self.now_us() > until:
                raise self._not_admitted(row)
            await asyncio.sleep(_LOOK_S)

    def _not_admitted(self, row: JobRow) -> NotAdmitted:
        name = row.slurm_id or str(row.id)
        return NotAdmitted(name, "; ".join(self.why_not_admitted(row)) or row.reason)

    def why_not_admitted(self, row: JobRow) -> list[str]:
        """Everything that is in the way of a job in the queue."""
        if row.state != JobState.PENDING:
            return []
        found = self.state.obstacles.get(JobId(row.id))
        now_us = self.now_us()
        told = [each.told(now_us) for each in found] if found else list(row.obstacles)
        if not self.state.draining:
            return told
        drained = (
            f"partition {self.settings.partition} is draining and admits no job: "
            f"wait for `plexrl partition resume`"
        )
        return [drained, *told]

    async def owned(self, who: Principal, job_id: JobId) -> JobRow:
        """The row of a job of the caller's; an admin may see all."""
        row = await self.store.read(queue.get, job_id)  # no write has to end first
        if row.partition != self.settings.partition or not (who.admin or row.uid == who.uid):
            raise NotFound("job", row.slurm_id or str(job_id))
        return row


def _check_promise(options: Mapping[str, Any]) -> None:
    """Clients check it where it is written; others may send anything."""
    if PROMISE in options:
        try:
            parse_max_slowdown(str(options[PROMISE]))
        except ValueError as error:
            raise BadInput(str(error)) from None


def _like(row: JobRow) -> Wish:
    return Wish(
        name=row.name,
        uid=row.uid,
        user=row.user,
        account=row.account,
        script=row.script,
        models=row.models,
        priority=row.priority,
        seed=row.seed,
        options=row.options,
    )

"""The hold of a partition: submitted once, found again by later daemons, released at the end.

Knows Slurm only through its port. With the local adapter the hold's batch script is a detached
process; it keeps the agent running whatever happens to the daemon.
"""

import asyncio
import json
import logging
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import SlurmRejected
from plexrl_slurm.core.ids import CauseId, SlurmId, WpgId
from plexrl_slurm.core.messages import Activity, Charge, Wpg
from plexrl_slurm.daemons.agent_config import AgentConfig
from plexrl_slurm.db import holds, ledger
from plexrl_slurm.db.models import HoldRow, HoldState
from plexrl_slurm.db.store import Store
from plexrl_slurm.logs import say
from plexrl_slurm.settings import Settings
from plexrl_slurm.slurm.port import ENDED, BatchJob, SlurmPort
from plexrl_slurm.slurm.templates import render

log = logging.getLogger(__name__)


#: Between two looks at the hold's Slurm job.
WATCH_S = 2.0


class Holds:
    """One hold on one node, for now; more are the next issue's work."""

    def __init__(self, settings: Settings, store: Store, port: SlurmPort, *, endpoint: str) -> None:
        self._settings, self._store, self._port = settings, store, port
        self._endpoint = endpoint

    async def ensure(
        self, wpgs: dict[WpgId, Wpg], *, epoch: int
    ) -> tuple[HoldRow, dict[WpgId, int]]:
        """The live hold, or a new one; and up to when each of its WPGs is booked."""
        for row in await self._store.run(holds.live_holds, self._settings.partition):
            status = self._port.states([SlurmId(row.slurm_id)]).get(SlurmId(row.slurm_id))
            if status is not None and status.state not in ENDED:
                booked = await self._store.run(ledger.last_stop, row.id)
                if set(booked) == set(wpgs):
                    await self._store.run(holds.set_hold_epoch, row.id, str(epoch))
                    say(log, "hold_found", hold=row.id, slurm_id=row.slurm_id)
                    return row, booked
                say(log, "hold_changed", hold=row.id, had=sorted(booked), wants=sorted(wpgs))
                self._port.cancel(SlurmId(row.slurm_id))
            await self._end(row)
        return await self._submit(wpgs, epoch=epoch)

    async def _end(self, row: HoldRow) -> None:
        """Close the books of a hold that is gone: what nobody has booked was down time."""
        booked = await self._store.run(ledger.last_stop, row.id)
        end = max(booked.values(), default=now_us())
        await self._store.run(_close, row.id, booked, end)

    async def _submit(
        self, wpgs: dict[WpgId, Wpg], *, epoch: int
    ) -> tuple[HoldRow, dict[WpgId, int]]:
        settings, now = self._settings, now_us()
        hold_id = f"h{now}"
        folder = settings.state_dir / "holds"
        folder.mkdir(parents=True, exist_ok=True)
        config = AgentConfig(
            agent=f"{hold_id}.node0",
            hold=hold_id,
            node="localhost",
            endpoint=self._endpoint,
            state_dir=str(settings.state_dir),
            host_dir=str(settings.host_dir / settings.partition),
        )
        path = folder / f"{hold_id}.json"
        path.write_text(json.dumps(asdict(config)), encoding="utf-8")
        script = render(
            "agent.sh.j2",
            hold=hold_id,
            partition=settings.partition,
            python=sys.executable,
            config=str(path),
        )
        slurm_id = self._port.submit(
            BatchJob(
                name=f"plexrl-{settings.partition}",
                script=script,
                workdir=settings.state_dir,
                environment=agent_environment(),
                output=str(folder / f"{hold_id}.log"),
            ),
            hold=False,
        )
        await self._store.run(_open, settings, hold_id, slurm_id, epoch, wpgs, now)
        say(log, "hold_submitted", hold=hold_id, slurm_id=slurm_id)
        (row,) = [
            row
            for row in await self._store.run(holds.live_holds, settings.partition)
            if row.id == hold_id
        ]
        return row, dict.fromkeys(wpgs, now)

    async def watch(self, hold_id: str, slurm_id: str) -> None:
        """Raises when Slurm has ended the hold: nothing can run, and the next daemon makes one."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not await asyncio.to_thread(self.alive, slurm_id):
                raise SlurmRejected(
                    (f"hold {hold_id}",),
                    f"its Slurm job {slurm_id} has ended: start the daemon again, which gets a "
                    f"new hold and goes on with the jobs",
                )

    async def ended(self, hold_id: str, *, at_us: int) -> None:
        """The hold was given back."""
        await self._store.run(holds.end_hold, hold_id, now_us=at_us)

    def wait_for_end(self, slurm_id: str, patience_s: float) -> bool:
        """Whether the hold ended within ``patience_s``. Blocks; for a thread."""
        deadline = time.monotonic() + patience_s
        while self.alive(slurm_id):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def alive(self, slurm_id: str) -> bool:
        """Whether Slurm still has it. No answer is not an end."""
        status = self._port.states([SlurmId(slurm_id)]).get(SlurmId(slurm_id))
        return status is None or status.state not in ENDED


def agent_environment() -> dict[str, str]:
    """What an agent and its ranks need of the daemon's environment."""
    keep = ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV", "TMPDIR", "LD_LIBRARY_PATH")
    chosen = {name: os.environ[name] for name in keep if name in os.environ}
    for name, value in os.environ.items():
        if name.startswith(("VLLM_", "DS_", "DEEPSPEED_", "TORCH_", "CUDA_", "NCCL_", "OPENBLAS_")):
            chosen[name] = value
    chosen["PATH"] = f"{Path(sys.executable).parent}:{chosen.get('PATH', '/usr/bin:/bin')}"
    return chosen


def _open(
    session: Any,
    settings: Settings,
    hold_id: str,
    slurm_id: SlurmId,
    epoch: int,
    wpgs: dict[WpgId, Wpg],
    now: int,
) -> None:
    holds.open_hold(
        session,
        hold_id=hold_id,
        partition=settings.partition,
        backend=settings.backend,
        slurm_id=slurm_id,
        epoch=str(epoch),
        now_us=now,
    )
    stays = [holds.Stay(wpg=wpg, held_us=now) for wpg in wpgs.values()]
    holds.hold_wpgs(session, hold_id, stays)
    holds.set_hold_state(session, hold_id, HoldState.UP)


def _close(session: Any, hold_id: str, booked: dict[WpgId, int], end: int) -> None:
    gpus = {row.name: row.gpus for row in holds.held_wpgs(session, hold_id)}
    charges = [
        Charge(
            wpg=wpg,
            activity=Activity.DOWN,
            job=None,
            call=None,
            start_us=stop,
            stop_us=end,
            gpu_us=(end - stop) * gpus[wpg],
            cause=CauseId("the hold was gone"),
        )
        for wpg, stop in booked.items()
        if stop < end
    ]
    ledger.append(session, charges, holds=dict.fromkeys(booked, hold_id))
    holds.end_hold(session, hold_id, now_us=end)

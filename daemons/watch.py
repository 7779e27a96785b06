"""Asks Slurm one question every so often; everybody in the daemon reads the last answer."""

import asyncio
import logging
from collections.abc import Mapping

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import PlexError, SlurmRejected, SlurmUnavailable
from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.logs import say
from plexrl_slurm.slurm.port import JobStatus, SlurmPort

log = logging.getLogger(__name__)


class SlurmWatch:
    """What Slurm said last. No answer is a pause: the last one stays, with its age."""

    def __init__(self, port: SlurmPort, *, period_us: int) -> None:
        self._port, self._period_s = port, period_us / 1e6
        self.jobs: Mapping[SlurmId, JobStatus] = {}
        #: Jobs that were bound since, as far as they are known.
        self.young: dict[SlurmId, JobStatus] = {}
        #: Jobs that were cancelled here, and when.
        self.cancelled: dict[SlurmId, int] = {}
        #: When the last answer was asked for; 0: there is none yet.
        self.at_us = 0
        #: Why there is no newer one; "" if all is well.
        self.trouble = ""
        self._news = asyncio.Condition()

    async def run(self) -> None:
        """Ask for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._period_s)

    async def look(self) -> None:
        """Ask now."""
        asked_us, young = now_us(), set(self.young)
        try:
            jobs = await asyncio.to_thread(self._port.poll)
        except (SlurmUnavailable, SlurmRejected) as problem:
            self._troubled(problem)
        else:
            if self.trouble:
                say(log, "slurm_answers_again", after=self.trouble)
            if asked_us >= self.at_us:  # of two questions at once the later one counts
                self.jobs, self.at_us = jobs, asked_us
                self.young = {job: it for job, it in self.young.items() if job not in young}
            self.trouble = ""
        async with self._news:
            self._news.notify_all()

    def _troubled(self, problem: PlexError) -> None:
        if str(problem) != self.trouble:
            say(log, "slurm_does_not_answer", reason=problem)
        self.trouble = str(problem)

    async def news(self, timeout_s: float) -> None:
        """Wait for the next answer (or failure), at most so long."""
        async with self._news:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()
            except TimeoutError:
                pass

"""Where a job's deployments live: knows what is placed, and asks ``core.admission``."""

import os
from collections.abc import Mapping, Sequence

from plexrl_slurm.core.admission import Obstacle, Placement, Site, Tenancy, Wanted, place
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, UnknownModel
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.settings import Settings


class Placer:
    """Home WPGs of jobs. A job has one home in each pool, fixed when it is first needed."""

    def __init__(self, wpgs: Mapping[WpgId, Wpg], state: State, settings: Settings) -> None:
        self.wpgs, self._state, self._models = wpgs, state, settings.models
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        options = {table.pool: table.options for table in settings.wpgs}
        self._sites = [
            Site(
                wpg=wpg,
                device_bytes=int(options.get(wpg.pool, {}).get("device_bytes", memory)),
                host_bytes=settings.host_bytes,
            )
            for wpg in wpgs.values()
        ]

    def admit(self, job: LiveJob, models: Sequence[str]) -> tuple[str, ...]:
        """Fix the homes of a job that declares ``models``; or say every obstacle, and fix none.

        Raises ``ModelTooLarge`` if it can never be placed, and ``UnknownModel`` if the catalogue
        has lost a model since.
        """
        wanted = [Wanted(model=self._model(name), pool=pool) for name in models for pool in Pool]
        found = place(wanted, sites=self._sites, tenancies=self._tenancies())
        if not isinstance(found, Placement):
            return tuple(obstacle.sentence for obstacle in found)
        for want, home in zip(wanted, found.homes, strict=True):
            job.homes.setdefault(want.pool, home)
            job.declared.append((home, want.image_bytes))
        return ()

    def home(self, job: LiveJob, pool: Pool, model: ModelSpec) -> WpgId:
        """The job's WPG in ``pool``. Raises ``BadInput`` where there is none with room, and
        ``ModelTooLarge`` where there never will be."""
        if pool not in job.homes:
            wanted = [Wanted(model=model, pool=pool)]
            found = place(wanted, sites=self._sites, tenancies=self._tenancies())
            if not isinstance(found, Placement):
                raise BadInput(_all(found))
            job.homes[pool] = found.homes[0]
        return job.homes[pool]

    def _model(self, name: str) -> ModelSpec:
        model = self._models.get(name) or self._models.get(name.partition(":")[0])
        if model is None:
            raise UnknownModel(name, tuple(sorted(self._models)))
        return model

    def _tenancies(self) -> list[Tenancy]:
        """What lives now, and what admitted jobs have declared and not created yet."""
        tenancies = []
        for job in self._state.jobs.values():
            live = [
                (d.wpg, self._models[d.model].train_bytes)
                for d in self._state.deployments.values()
                if d.job == job.id and not d.dropped
            ]
            taken = live if len(live) > len(job.declared) else job.declared
            tenancies += [Tenancy(wpg=wpg, image_bytes=size) for wpg, size in taken]
        return tenancies


def _all(obstacles: Sequence[Obstacle]) -> str:
    return "; ".join(obstacle.sentence for obstacle in obstacles)

"""Where a job's deployments live: knows what is placed, and asks ``core.admission``."""

import os
from collections.abc import Mapping, Sequence

from plexrl_slurm.core.admission import (
    Obstacle,
    ObstacleKind,
    Placement,
    Site,
    Tenancy,
    Wanted,
    host_need,
    place,
)
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, ModelTooLarge, UnknownModel
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.daemons.layout import HeldWpg
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.settings import Settings, WpgSettings


class Placer:
    """Home WPGs of jobs. A job has one home in each pool, fixed when it is first needed; it
    changes only when the home is given back or lost."""

    def __init__(self, state: State, settings: Settings) -> None:
        #: Every WPG that is held now.
        self.wpgs: dict[WpgId, HeldWpg] = {}
        #: Those of them that are being given back.
        self.draining: set[WpgId] = set()
        #: Why there are not more of them; for whoever finds no place.
        self.why_no_more = ""
        self._state, self._models = state, settings.models
        self._host_bytes, self._tables = settings.host_bytes, settings.wpgs
        self._nvme_bytes = settings.nvme_bytes if settings.nvme_dir is not None else 0
        self._memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def restore(self, job: LiveJob, homes: Mapping[str, str], models: Sequence[str]) -> None:
        """What an earlier daemon decided for ``job``."""
        job.homes |= {Pool(pool): WpgId(wpg) for pool, wpg in homes.items()}
        known = [model for name in models if (model := self._find(name)) is not None]
        for model in known:
            for pool in Pool:
                size = Wanted(model=model, pool=pool).image_bytes
                if pool in job.homes:
                    job.declared.append((pool, size))

    def admit(self, job: LiveJob, models: Sequence[str]) -> tuple[str, ...]:
        """Fix the homes of a job that declares ``models``; or say every obstacle, and fix none.

        Raises ``ModelTooLarge`` if it can never be placed, and ``UnknownModel`` if the catalogue
        has lost a model since.
        """
        wanted = [Wanted(model=self._model(name), pool=pool) for name in models for pool in Pool]
        found = self._place(wanted, self._tenancies())
        if not isinstance(found, Placement):
            sentences = [obstacle.sentence for obstacle in found]
            return (*sentences, self.why_no_more) if self.why_no_more else tuple(sentences)
        for want, home in zip(wanted, found.homes, strict=True):
            job.homes.setdefault(want.pool, home)
            job.declared.append((want.pool, want.image_bytes))
        return ()

    def home(self, job: LiveJob, pool: Pool, model: ModelSpec) -> WpgId:
        """The job's WPG in ``pool``. Raises ``BadInput`` where there is none with room, and
        ``ModelTooLarge`` where there never will be."""
        if pool not in job.homes:
            wanted = [Wanted(model=model, pool=pool)]
            found = self._place(wanted, self._tenancies())
            if not isinstance(found, Placement):
                raise BadInput(_all(found))
            job.homes[pool] = found.homes[0]
        return job.homes[pool]

    def rehome(self, job: LiveJob, pool: Pool) -> WpgId | None:
        """Another home for everything that ``job`` has in ``pool``; ``None``: there is no room."""
        models = {
            live.model
            for live in (
                self._state.deployments if pool is Pool.TRAIN else self._state.snapshots
            ).values()
            if live.job == job.id and not live.dropped
        }
        wanted = [Wanted(model=self._models[name], pool=pool) for name in sorted(models)]
        if not wanted:  # then what it said it would create
            all_models = (Wanted(model=model, pool=pool) for model in self._models.values())
            wanted = [each for each in all_models if (pool, each.image_bytes) in job.declared]
        if not wanted:
            return None
        largest = max(wanted, key=lambda want: want.image_bytes)
        found = self._place([largest], self._tenancies(but=job))
        return found.homes[0] if isinstance(found, Placement) else None

    def _place(
        self, wanted: Sequence[Wanted], tenancies: Sequence[Tenancy]
    ) -> Placement | tuple[Obstacle, ...]:
        try:
            return place(wanted, sites=self._sites(), tenancies=tenancies)
        except ModelTooLarge:
            if not all(self._may_fit(want) for want in wanted):
                raise
        return tuple(
            Obstacle(
                kind=ObstacleKind.NO_WPG,
                model=want.model.name,
                pool=want.pool,
                wpg=None,
                needed_bytes=want.image_bytes,
                free_bytes=0,
                sentence=f"model {want.model.name} needs a larger {want.pool} WPG than is held",
            )
            for want in wanted
        )

    def _may_fit(self, want: Wanted) -> bool:
        """Whether a WPG of the configuration is large enough; it need not be held now."""
        need, host = want.image_bytes, host_need([want.image_bytes])
        tables = [table for table in self._tables if table.pool == want.pool]
        if not tables:
            return host <= self._host_bytes
        return any(
            need <= self._device_bytes(table) and host <= self._host_bytes * table.nodes
            for table in tables
        )

    def _device_bytes(self, table: WpgSettings) -> int:
        return int(table.options.get("device_bytes", self._memory))

    def _sites(self) -> list[Site]:
        return [
            Site(
                wpg=held.wpg,
                device_bytes=self._device_bytes(held.slot.table),
                # Each of its nodes has an equal share of every image.
                host_bytes=self._host_bytes * held.slot.table.nodes,
                nvme_bytes=(
                    self._nvme_bytes * held.slot.table.nodes if held.wpg.pool is Pool.TRAIN else 0
                ),
            )
            for wpg, held in self.wpgs.items()
            if wpg not in self.draining
        ]

    def _find(self, name: str) -> ModelSpec | None:
        return self._models.get(name) or self._models.get(name.partition(":")[0])

    def _model(self, name: str) -> ModelSpec:
        model = self._find(name)
        if model is None:
            raise UnknownModel(name, tuple(sorted(self._models)))
        return model

    def _tenancies(self, but: LiveJob | None = None) -> list[Tenancy]:
        """What lives now, and what admitted jobs have declared and not created yet."""
        tenancies = []
        for job in self._state.jobs.values():
            if job is but:
                continue
            live = [
                (d.wpg, self._models[d.model].train_bytes)
                for d in self._state.deployments.values()
                if d.job == job.id and not d.dropped
            ]
            declared = [(job.homes[pool], size) for pool, size in job.declared]
            taken = live if len(live) > len(declared) else declared
            tenancies += [Tenancy(wpg=wpg, image_bytes=size) for wpg, size in taken]
        return tenancies


def _all(obstacles: Sequence[Obstacle]) -> str:
    return "; ".join(obstacle.sentence for obstacle in obstacles)

"""Where a job's deployments live: knows what is placed, and asks ``core.admission``."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from plexrl_slurm.core.admission import Asked, Placement
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, ModelTooLarge, UnknownModel
from plexrl_slurm.core.grouping import Placement as Way
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.profiles import Habits
from plexrl_slurm.core.reservation import open_to_all
from plexrl_slurm.core.sites import Applicant, Partition, Settled, Site, host_need
from plexrl_slurm.daemons.layout import HeldWpg
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.settings import Settings, WpgSettings

#: What a job is like on WPGs of so many GPUs, when it uses a model.
HabitsOf = Callable[[LiveJob, str, int], Habits]


Answer = Placement | tuple[Obstacle, ...]
#: Models by job: of its training deployments, and of its snapshots.
Lives = tuple[dict[JobId, list[str]], dict[JobId, dict[str, None]]]
_KEPT_FREE = Obstacle(
    kind=ObstacleKind.RESERVATION,
    sentence="what is free is kept for jobs of a reserved qos: wait, or ask for such a qos",
)


class Placer:
    """Home WPGs of jobs. A job has one home in each pool, fixed when it is first needed; it
    changes only when the home is given back or lost, or when promises would break."""

    def __init__(self, state: State, settings: Settings) -> None:
        #: Every WPG that is held now.
        self.wpgs: dict[WpgId, HeldWpg] = {}
        #: Those of them that are being given back.
        self.draining: set[WpgId] = set()
        #: Why there are not more of them; for whoever finds no place.
        self.why_no_more = ""
        guessed = settings.sharing.guess.habits()
        #: What is known of jobs; a guess until somebody knows more.
        self.habits_of: HabitsOf = lambda _job, _model, _gpus: guessed
        #: When a job is expected to end.
        self.ends_of: Callable[[LiveJob], int | None] = lambda _job: None
        #: Told of every placement that was decided, and on what.
        self.journal: Callable[[Asked, Answer], None] = lambda _asked, _found: None
        self._asked: Asked | None = None
        self.rules = settings.sharing.rules
        self._reservation = settings.queue.reservation
        self._promise = settings.sharing.max_slowdown
        self._state, self._models = state, settings.models
        self._host_bytes, self._tables = settings.host_bytes, settings.wpgs
        self._nvme_bytes = settings.nvme_bytes if settings.nvme_dir is not None else 0
        self._memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    # -- what the daemon asks ----------------------------------------------------------------
    def restore(self, job: LiveJob, homes: Mapping[str, str], models: Sequence[str]) -> None:
        """What an earlier daemon decided for ``job``."""
        job.homes |= {Pool(pool): WpgId(wpg) for pool, wpg in homes.items()}
        known = [model for name in models if (model := self._find(name)) is not None]
        job.models = tuple(model.name for model in known)
        for model in known:
            job.declared += [(pool, _size(model, pool)) for pool in Pool if pool in job.homes]

    def admit(self, job: LiveJob, models: Sequence[str]) -> tuple[Obstacle, ...]:
        """Fix the homes of a job that declares ``models``; or say every obstacle, and fix none.

        Raises ``ModelTooLarge`` if it can never be placed, and ``UnknownModel`` if the catalogue
        has lost a model since.
        """
        found = self.would_place(job, models)
        before = [each.kind for each in self._state.obstacles.get(job.id, ())]
        if isinstance(found, Placement) or [each.kind for each in found] != before:
            self._note(found)
        if not isinstance(found, Placement):
            more = Obstacle(kind=ObstacleKind.NO_WPG, sentence=self.why_no_more)
            return (*found, more) if self.why_no_more else found
        for pool, home in found.homes.items():
            job.homes.setdefault(pool, home)
        specs = [self._model(name) for name in models]
        job.models = tuple(spec.name for spec in specs)
        job.declared += [(pool, _size(spec, pool)) for spec in specs for pool in Pool]
        return ()

    def would_place(
        self, job: LiveJob, models: Sequence[str], *, ended: Collection[JobId] = ()
    ) -> Placement | tuple[Obstacle, ...]:
        """The homes that ``job`` would get now, if the jobs ``ended`` were gone; changes nothing.

        Raises as :meth:`admit` does.
        """
        self._asked = None
        specs = [self._model(name) for name in models]
        if not specs:
            return Placement(homes={})
        who, whole = self._applicant(job, specs), self.partition(without=ended, but=job)
        seen = self._seen_by(job, whole)
        found = self._place(who, seen, self.rules)
        if isinstance(found, Placement) or seen is whole:
            return found
        found = self._place(who, whole, self.rules)
        if not isinstance(found, Placement):
            return found
        self._asked = None  # no placement: nothing to decide again
        return (_KEPT_FREE,)

    def home(self, job: LiveJob, pool: Pool, model: ModelSpec) -> WpgId:
        """The job's WPG in ``pool``. Raises ``BadInput`` where there is none with room, and
        ``ModelTooLarge`` where there never will be.

        A job that has not said what it will use is promised nothing, and goes where it disturbs
        least: its call cannot wait.
        """
        if pool not in job.homes:
            who = self._applicant(job, [model])
            found = self._where_least(who, self._seen_by(job, self.partition()), pool)
            if not isinstance(found, Placement):
                raise BadInput("; ".join(obstacle.sentence for obstacle in found))
            self._note(found)
            job.homes[pool] = found.homes[pool]
            if model.name not in job.models:
                job.models = (*job.models, model.name)
        return job.homes[pool]

    def rehome(self, job: LiveJob, pool: Pool) -> WpgId | None:
        """Another home for everything that ``job`` has in ``pool``; ``None``: there is no room.

        It has lost the one it had: rather than wait it goes where it disturbs least.
        """
        who = self._resident(job)
        if not who.images(pool):
            return None
        found = self._where_least(who, self.partition(but=job, pool=pool), pool)
        if not isinstance(found, Placement):
            return None
        self._note(found)
        return found.homes[pool]

    def partition(
        self,
        *,
        without: Collection[JobId] = (),
        but: LiveJob | None = None,
        pool: Pool | None = None,
    ) -> Partition:
        """What is held and who lives there; ``but`` has no home, or none in ``pool``."""
        settled, lives = [], self._lives()
        for job in self._state.jobs.values():
            if job.id in without:
                continue
            homes = dict(job.homes)
            if job is but:
                homes = {each: wpg for each, wpg in homes.items() if pool not in (None, each)}
            settled.append(Settled(who=self._resident(job, lives), homes=homes))
        return Partition(sites=self._sites(), settled=settled)

    def open_partition(self) -> Partition:
        """As whoever sees it that may not have what is kept free."""
        whole = self.partition()
        return self._opened(whole) if self._reservation.any else whole

    def applicant(self, job: LiveJob, models: Sequence[str]) -> Applicant:
        """A job that declares ``models``. Raises ``UnknownModel``."""
        return self._applicant(job, [self._model(name) for name in models])

    def promise(self, job: LiveJob) -> float:
        """How much slower than alone it may become."""
        return job.max_slowdown if job.max_slowdown is not None else self._promise

    def _seen_by(self, job: LiveJob, partition: Partition) -> Partition:
        """Without what is kept free for others."""
        if job.reserved or not self._reservation.any:
            return partition
        return self._opened(partition)

    def _opened(self, partition: Partition) -> Partition:
        reserved = {each.id for each in self._state.jobs.values() if each.reserved}
        return open_to_all(partition, self._reservation, reserved)

    # -- asking the core ---------------------------------------------------------------------
    def _where_least(
        self, who: Applicant, partition: Partition, pool: Pool
    ) -> Placement | tuple[Obstacle, ...]:
        found = self._place(who, partition, self.rules, pools=(pool,))
        if isinstance(found, Placement) or self.rules.placement is not Way.FIT:
            return found
        rules = replace(self.rules, placement=Way.SPREAD, most=max(1, len(self._state.jobs)) + 1)
        return self._place(who, partition, rules, pools=(pool,))

    def _place(
        self,
        who: Applicant,
        partition: Partition,
        rules: Rules,
        *,
        pools: Sequence[Pool] = tuple(Pool),
    ) -> Placement | tuple[Obstacle, ...]:
        asked = self._asked = Asked(
            who=who,
            sites=tuple(partition.sites),
            settled=tuple(partition.settled),
            rules=rules,
            pools=tuple(pools),
        )
        try:
            return asked.answer()
        except ModelTooLarge:
            self._asked = None  # what follows is not the core's
            if not all(self._may_fit(image, pool) for pool in pools for image in who.images(pool)):
                raise
        return tuple(
            Obstacle(
                kind=ObstacleKind.NO_WPG,
                pool=pool,
                sentence=f"model {name} needs a larger {pool} WPG than is held",
            )
            for pool in pools
            for name in who.models
        )

    def _note(self, found: Answer) -> None:
        """The last answer of the core's has been acted upon."""
        asked, self._asked = self._asked, None
        if asked is not None:
            self.journal(asked, found)

    def _applicant(self, job: LiveJob, models: Sequence[ModelSpec]) -> Applicant:
        main = models[0].name if models else ""
        sizes = {held.wpg.gpus for held in self.wpgs.values()} or {1}
        return Applicant(
            job=job.id,
            label=f"job {job.slurm_id} ({job.user})",
            models=tuple(model.name for model in models),
            train_images=tuple(model.train_bytes for model in models),
            rollout_images=tuple(model.weights_bytes for model in models),
            habits={gpus: self.habits_of(job, main, gpus) for gpus in sorted(sizes)},
            max_slowdown=self.promise(job),
            ends_us=self.ends_of(job),
        )

    def _resident(self, job: LiveJob, lives: Lives | None = None) -> Applicant:
        """A job with what lives of it now, or what it has declared and not created yet."""
        trains, samples = self._lives() if lives is None else lives
        mine, weights = trains.get(job.id, []), samples.get(job.id, {})
        names = job.models or tuple(dict.fromkeys(mine))
        specs = [self._models[name] for name in names if name in self._models]
        told = {pool: [size for where, size in job.declared if where is pool] for pool in Pool}
        live = [self._models[name].train_bytes for name in mine]
        sampled = [self._models[name].weights_bytes for name in weights]
        trained, rolled = told[Pool.TRAIN], told[Pool.ROLLOUT]
        return replace(
            self._applicant(job, specs),
            train_images=tuple(live if len(live) > len(trained) else trained),
            rollout_images=tuple(sampled if len(sampled) > len(rolled) else rolled),
        )

    def _lives(self) -> Lives:
        """Models of what lives now, by job: what is trained, and what is sampled."""
        trains: dict[JobId, list[str]] = {}
        for live in self._state.deployments.values():
            if not live.dropped:
                trains.setdefault(live.job, []).append(live.model)
        samples: dict[JobId, dict[str, None]] = {}
        for snapshot in self._state.snapshots.values():
            if not snapshot.dropped:
                samples.setdefault(snapshot.job, {})[snapshot.model] = None
        return trains, samples

    def _may_fit(self, image: int, pool: Pool) -> bool:
        """Whether a WPG of the configuration is large enough; it need not be held now."""
        tables = [table for table in self._tables if table.pool == pool]
        if not tables:
            return host_need([image]) <= self._host_bytes
        return any(
            host_need([-(-image // table.nodes)]) <= self._host_bytes
            and image <= self._device_bytes(table)
            for table in tables
        )

    def _device_bytes(self, table: WpgSettings) -> int:
        return int(table.options.get("device_bytes", self._memory))

    def _sites(self) -> list[Site]:
        return [
            Site(
                wpg=held.wpg,
                device_bytes=self._device_bytes(held.slot.table),
                host_bytes=self._host_bytes,
                nvme_bytes=self._nvme_bytes if held.wpg.pool is Pool.TRAIN else 0,
                nodes=tuple(f"{at.hold}.{at.component}.{at.node}" for at in held.places),
                draining=wpg in self.draining,
            )
            for wpg, held in self.wpgs.items()
        ]

    def _find(self, name: str) -> ModelSpec | None:
        return self._models.get(name) or self._models.get(name.partition(":")[0])

    def _model(self, name: str) -> ModelSpec:
        model = self._find(name)
        if model is None:
            raise UnknownModel(name, tuple(sorted(self._models)))
        return model


def _size(model: ModelSpec, pool: Pool) -> int:
    return model.train_bytes if pool is Pool.TRAIN else model.weights_bytes

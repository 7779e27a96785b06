"""Where a job's deployments live: knows what is placed, and asks ``core.admission``."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from plexrl_slurm.core.admission import Placement
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import BadInput, ModelTooLarge, UnknownModel
from plexrl_slurm.core.ground import Answer, Ground, News, Wish
from plexrl_slurm.core.grouping import Placement as Way
from plexrl_slurm.core.grouping import Rules
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.obstacles import Obstacle, ObstacleKind
from plexrl_slurm.core.profiles import Habits
from plexrl_slurm.core.sites import Applicant, Partition, Site, host_need
from plexrl_slurm.daemons.capacity import device_bytes, refuse_impossible
from plexrl_slurm.daemons.layout import HeldWpg
from plexrl_slurm.daemons.residents import Residents
from plexrl_slurm.daemons.state import LiveJob, State
from plexrl_slurm.settings import Settings

#: What a job is like on WPGs of so many GPUs, when it uses a model.
HabitsOf = Callable[[LiveJob, str, int], Habits]


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
        #: Changes when anything does that is known of a job; ``None``: it has to be asked for.
        self.version_of: Callable[[LiveJob], Hashable] | None = None
        #: When a job is expected to end.
        self.ends_of: Callable[[LiveJob], int | None] = lambda _job: None
        #: What its promise leaves after what it has lost; 0: as promised.
        self.allowed_of: Callable[[LiveJob], float] = lambda _job: 0.0
        #: Told of every placement that was decided, and on what.
        self.journal: Callable[[News, Wish, Answer], None] = lambda _news, _wish, _found: None
        self._asked: Wish | None = None
        #: What is in the way of whom there is no room for, but that it has to have a place.
        self._in_vain: dict[tuple[JobId, Pool], tuple[ObstacleKind, ...]] = {}
        self.rules = settings.sharing.rules
        self._promise = settings.sharing.max_slowdown
        self._state, self._models, self._settings = state, settings.models, settings
        self._host_bytes, self._tables = settings.host_bytes, settings.wpgs
        self._nvme_bytes = settings.nvme_bytes if settings.nvme_dir is not None else 0
        self.residents = Residents(
            self, state, models=settings.models, reservation=settings.queue.reservation,
            site_of=self._site,
        )  # fmt: skip

    # -- what the daemon asks ----------------------------------------------------------------
    def restore(self, job: LiveJob, homes: Mapping[str, str], models: Sequence[str]) -> None:
        """What an earlier daemon decided for ``job``."""
        job.homes |= {Pool(pool): WpgId(wpg) for pool, wpg in homes.items()}
        known = [model for name in models if (model := self._find(name)) is not None]
        job.models = tuple(model.name for model in known)
        for model in known:
            job.declared += [(pool, _size(model, pool)) for pool in Pool if pool in job.homes]

    def admit(
        self, job: LiveJob, models: Sequence[str], *, steady: bool = False
    ) -> tuple[Obstacle, ...]:
        """Fix the homes of a job that declares ``models``; or say every obstacle, and fix none.

        ``steady``: nobody else has had a turn since the last one was asked for. Raises
        ``ModelTooLarge`` if it can never be placed, and ``UnknownModel`` if the catalogue has lost
        a model since.
        """
        if not steady:
            self.residents.look()
        found = self._decide(job, models)
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
    ) -> Answer:
        """The homes that ``job`` would get now, if the jobs ``ended`` were gone; changes nothing.

        Raises as :meth:`admit` does.
        """
        self.residents.look()
        ground = self.residents.ground.without(ended) if ended else None
        return self._decide(job, models, ground)

    def _decide(self, job: LiveJob, models: Sequence[str], ground: Ground | None = None) -> Answer:
        self._asked = None
        specs = [self._model(name) for name in models]
        if not specs:
            return Placement(homes={})
        refuse_impossible(self._settings, specs)
        who = self.residents.applicant(job, specs)
        return self._place(who, self.rules, tuple(Pool), reserved=job.reserved, ground=ground)

    def home(self, job: LiveJob, pool: Pool, model: ModelSpec) -> WpgId:
        """The job's WPG in ``pool``. Raises ``BadInput`` where there is none with room, and
        ``ModelTooLarge`` where there never will be.

        A job that has not said what it will use is promised nothing, and goes where it disturbs
        least: its call cannot wait.
        """
        if pool not in job.homes:
            self.residents.look()
            who = self.residents.applicant(job, [model])
            found = self._where_least(who, pool, reserved=job.reserved)
            self._note_change(job, pool, found)
            if not isinstance(found, Placement):
                raise BadInput("; ".join(obstacle.sentence for obstacle in found))
            job.homes[pool] = found.homes[pool]
            if model.name not in job.models:
                job.models = (*job.models, model.name)
        return job.homes[pool]

    def rehome(self, job: LiveJob, pool: Pool) -> WpgId | None:
        """Another home for everything that ``job`` has in ``pool``; ``None``: there is no room.

        It has lost the one it had: rather than wait it goes where it disturbs least.
        """
        self.residents.look()
        who = self.residents.resident(job)
        if not who.images(pool):
            return None
        found = self._where_least(who, pool, reserved=True)
        self._note_change(job, pool, found)
        return found.homes[pool] if isinstance(found, Placement) else None

    def partition(self) -> Partition:
        """What is held and who lives there, now; not to be changed."""
        self.residents.look()
        return self.residents.ground.whole

    def open_partition(self) -> Partition:
        """As whoever sees it that may not have what is kept free."""
        self.residents.look()
        return self.residents.ground.open

    def applicant(self, job: LiveJob, models: Sequence[str]) -> Applicant:
        """A job that declares ``models``. Raises ``UnknownModel``."""
        return self.residents.applicant(job, [self._model(name) for name in models])

    def promise(self, job: LiveJob) -> float:
        """How much slower than alone it may become."""
        return job.max_slowdown if job.max_slowdown is not None else self._promise

    # -- asking the core ---------------------------------------------------------------------
    def _where_least(self, who: Applicant, pool: Pool, *, reserved: bool) -> Answer:
        found = self._place(who, self.rules, (pool,), reserved=reserved)
        if isinstance(found, Placement) or self.rules.placement is not Way.FIT:
            return found
        rules = replace(self.rules, placement=Way.SPREAD, most=max(1, len(self._state.jobs)) + 1)
        return self._place(who, rules, (pool,), reserved=reserved)

    def _place(
        self,
        who: Applicant,
        rules: Rules,
        pools: tuple[Pool, ...],
        *,
        reserved: bool,
        ground: Ground | None = None,
    ) -> Answer:
        wish = Wish(who=who, rules=rules, pools=pools, reserved=reserved)
        self._asked = wish if ground is None else None
        try:
            return (ground or self.residents.ground).answer(wish)
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
        wish, self._asked = self._asked, None
        if wish is not None:
            self.journal(self.residents.news(), wish, found)

    def _note_change(self, job: LiveJob, pool: Pool, found: Answer) -> None:
        """Likewise; who finds no room asks again and again, and is noted when it is for another
        reason."""
        kinds = () if isinstance(found, Placement) else tuple(each.kind for each in found)
        if not kinds or self._in_vain.get((job.id, pool)) != kinds:
            self._note(found)
        self._in_vain = {
            key: said for key, said in self._in_vain.items() if key[0] in self._state.jobs
        }
        if kinds:
            self._in_vain[job.id, pool] = kinds
        else:
            self._in_vain.pop((job.id, pool), None)

    def _may_fit(self, image: int, pool: Pool) -> bool:
        """Whether a WPG of the configuration is large enough; it need not be held now."""
        tables = [table for table in self._tables if table.pool == pool]
        if not tables:
            return host_need([image]) <= self._host_bytes
        return any(
            host_need([-(-image // table.nodes)]) <= self._host_bytes
            and image <= device_bytes(table)
            for table in tables
        )

    def _site(self, held: HeldWpg) -> Site:
        return Site(
            wpg=held.wpg,
            device_bytes=device_bytes(held.slot.table),
            host_bytes=self._host_bytes,
            nvme_bytes=self._nvme_bytes if held.wpg.pool is Pool.TRAIN else 0,
            nodes=tuple(f"{at.hold}.{at.component}.{at.node}" for at in held.places),
            draining=held.id in self.draining,
        )

    def _find(self, name: str) -> ModelSpec | None:
        return self._models.get(name) or self._models.get(name.partition(":")[0])

    def _model(self, name: str) -> ModelSpec:
        model = self._find(name)
        if model is None:
            raise UnknownModel(name, tuple(sorted(self._models)))
        return model


def _size(model: ModelSpec, pool: Pool) -> int:
    return model.train_bytes if pool is Pool.TRAIN else model.weights_bytes

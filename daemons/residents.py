"""Who lives where, as placement sees it: brought up to date by what has changed.

Asked again for every decision, thousands of jobs would make each slow; so each is looked at, and
only what differs is worked out anew.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeAlias

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.ground import Ground, News
from plexrl_slurm.core.ids import JobId, WpgId
from plexrl_slurm.core.messages import Pool
from plexrl_slurm.core.reservation import Reservation
from plexrl_slurm.core.sites import Applicant, Settled, Site
from plexrl_slurm.daemons.layout import HeldWpg
from plexrl_slurm.daemons.state import LiveJob, State

if TYPE_CHECKING:
    from plexrl_slurm.daemons.placement import Placer

#: Jobs whose expected end is asked for again at each look; it moves slowly.
ENDS: Final = 64
#: What it may move by without being news.
_STILL_US: Final = 60_000_000

#: Models by job: of its training deployments, and of its snapshots.
Lives: TypeAlias = tuple[dict[JobId, list[str]], dict[JobId, dict[str, None]]]

#: When jobs are expected to end.
Ends: TypeAlias = dict[JobId, int | None]


class Residents:
    """Part of the placer."""

    def __init__(
        self,
        placer: "Placer",
        state: State,
        *,
        models: Mapping[str, ModelSpec],
        reservation: Reservation,
        site_of: Callable[[HeldWpg], Site],
    ) -> None:
        self.ground = Ground(reservation)
        self._placer, self._state, self._models = placer, state, models
        self._site_of = site_of
        self._sizes: tuple[int, ...] = (1,)
        self._asked_of: tuple[object, ...] = ()
        self._sites: dict[WpgId, tuple[HeldWpg, bool, Site]] = {}
        #: By job, with what it was worked out of.
        self._known: dict[JobId, tuple[Hashable, Settled]] = {}
        self._turn: list[JobId] = []
        #: What no journal has yet; ``None``: it is gone.
        self._new_sites: dict[WpgId, Site | None] = {}
        self._new_settled: dict[JobId, Settled | None] = {}
        self._new_ends: Ends = {}

    def look(self) -> None:
        """Hear what has changed."""
        sites, gone = self._look_at_sites()
        settled, left, ends = self._look_at_jobs()
        news = News(sites=sites, gone=gone, settled=settled, left=left, ends=ends)
        if news:
            self.ground.hear(news)
            self._new_sites.update((site.wpg.id, site) for site in sites)
            self._new_sites.update(dict.fromkeys(gone))
            self._new_settled.update((each.who.job, each) for each in settled)
            self._new_settled.update(dict.fromkeys(left))
            self._new_ends.update(ends)

    def news(self) -> News:
        """What has changed since this was asked the last time."""
        sites, settled, ends = self._new_sites, self._new_settled, self._new_ends
        self._new_sites, self._new_settled, self._new_ends = {}, {}, {}
        # Of whom more is new, that is what is told last.
        settled |= {job: self._known[job][1] for job in ends if settled.get(job) is not None}
        return News(
            sites=tuple(site for site in sites.values() if site is not None),
            gone=tuple(wpg for wpg, site in sites.items() if site is None),
            settled=tuple(each for each in settled.values() if each is not None),
            left=tuple(job for job, each in settled.items() if each is None),
            ends=tuple((job, at_us) for job, at_us in ends.items() if job not in settled),
        )

    def applicant(self, job: LiveJob, models: Sequence[ModelSpec]) -> Applicant:
        """A job that declares ``models``."""
        placer = self._placer
        main, weight = models[0].name if models else "", max(1, job.priority)
        return Applicant(
            job=job.id,
            label=f"job {job.slurm_id} ({job.user})",
            models=tuple(model.name for model in models),
            train_images=tuple(model.train_bytes for model in models),
            rollout_images=tuple(model.weights_bytes for model in models),
            habits={
                gpus: placer.habits_of(job, main, gpus).weighing(weight) for gpus in self._sizes
            },
            max_slowdown=placer.promise(job),
            ends_us=placer.ends_of(job),
            allowed=placer.allowed_of(job),
        )

    def resident(self, job: LiveJob, lives: Lives | None = None) -> Applicant:
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
            self.applicant(job, specs),
            train_images=tuple(live if len(live) > len(trained) else trained),
            rollout_images=tuple(sampled if len(sampled) > len(rolled) else rolled),
        )

    # -- what has changed ------------------------------------------------------------------
    def _look_at_sites(self) -> tuple[tuple[Site, ...], tuple[WpgId, ...]]:
        held_now, draining = self._placer.wpgs, self._placer.draining
        changed = []
        for wpg, held in held_now.items():
            leaves, known = wpg in draining, self._sites.get(wpg)
            if known is None or known[0] is not held or known[1] != leaves:
                site = self._site_of(held)
                self._sites[wpg] = (held, leaves, site)
                changed.append(site)
        gone: tuple[WpgId, ...] = ()
        if len(self._sites) != len(held_now):
            gone = tuple(wpg for wpg in self._sites if wpg not in held_now)
            for wpg in gone:
                del self._sites[wpg]
        if changed or gone:
            sizes = {held.wpg.gpus for held in held_now.values()} or {1}
            self._sizes = tuple(sorted(sizes))
        return tuple(changed), gone

    def _look_at_jobs(
        self,
    ) -> tuple[tuple[Settled, ...], tuple[JobId, ...], tuple[tuple[JobId, int | None], ...]]:
        placer, jobs = self._placer, self._state.jobs
        asked_of = (placer.habits_of, placer.version_of, placer.ends_of, self._sizes)
        all_anew = asked_of != self._asked_of
        self._asked_of = asked_of
        version_of, lives = placer.version_of, self._lives()
        trains, samples = lives
        late, changed = self._late(), []
        ends: Ends = {}
        living = 0
        for job in jobs.values():
            if not job.homes:
                continue
            living += 1
            mark = (
                *job.homes.items(), job.models, tuple(job.declared), job.max_slowdown, job.reserved,
                tuple(trains.get(job.id, ())), tuple(samples.get(job.id, ())),
                None if version_of is None else version_of(job),
            )  # fmt: skip
            known = self._known.get(job.id)
            same = known is not None and version_of is not None and not all_anew
            if same and known is not None and known[0] == mark:
                ends_us = known[1].who.ends_us
                if not (job.id in late and self._moved(ends_us, job)):
                    continue
            each = Settled(
                who=self.resident(job, lives), homes=dict(job.homes), reserved=job.reserved
            )
            self._known[job.id] = (mark, each)
            if known is None:
                changed.append(each)
            elif known[1] != each:
                if _as_expected(known[1], each.who.ends_us) == each:
                    ends[job.id] = each.who.ends_us
                else:
                    changed.append(each)
        left: tuple[JobId, ...] = ()
        if living != len(self._known):
            left = tuple(gone for gone in self._known if gone not in jobs or not jobs[gone].homes)
            for gone in left:
                del self._known[gone]
        return tuple(changed), left, tuple(ends.items())

    def _late(self) -> set[JobId]:
        """Whose turn it is to say when they end."""
        if not self._turn:
            self._turn = list(self._known)
        now, self._turn = self._turn[:ENDS], self._turn[ENDS:]
        return set(now)

    def _moved(self, before: int | None, job: LiveJob) -> bool:
        now = self._placer.ends_of(job)
        if before is None or now is None:
            return before is not now
        return abs(now - before) > _STILL_US

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


def _as_expected(each: Settled, ends_us: int | None) -> Settled:
    return replace(each, who=replace(each.who, ends_us=ends_us))

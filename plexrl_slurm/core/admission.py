"""Where a job's deployments may live: a home WPG for each, or every obstacle."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import ModelTooLarge
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.sizes import in_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A WPG as a place to live."""

    wpg: Wpg
    #: Bytes that a resident may take on its devices, all GPUs together.
    device_bytes: int
    #: Bytes that images of its deployments may take in the host tiers of all its nodes together.
    host_bytes: int
    #: Bytes that more of them may take below it; those that a switch moves are above.
    nvme_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """A deployment that already has its home."""

    wpg: WpgId
    image_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A deployment that looks for a home."""

    model: ModelSpec
    pool: Pool

    @property
    def image_bytes(self) -> int:
        """What it takes on the device, and its image on the host."""
        trains = self.pool is Pool.TRAIN
        return self.model.train_bytes if trains else self.model.weights_bytes


class ObstacleKind(StrEnum):
    """What stands in the way."""

    #: The partition holds no WPG of the pool (now).
    NO_WPG = "no_wpg"
    DEVICE_MEMORY = "device_memory"
    HOST_MEMORY = "host_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One reason why one WPG cannot be the home of one model."""

    kind: ObstacleKind
    model: str
    pool: Pool
    wpg: WpgId | None
    needed_bytes: int
    free_bytes: int
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A home for every wanted deployment, in their order."""

    homes: tuple[WpgId, ...]


def place(
    wanted: Sequence[Wanted], *, sites: Sequence[Site], tenancies: Sequence[Tenancy]
) -> Placement | tuple[Obstacle, ...]:
    """Homes for all of ``wanted``, or for none of them and every obstacle.

    Each goes to the WPG of its pool with the fewest deployments that has room (ties: lowest id);
    a later one of the same job sees the earlier ones as settled. Raises ``ModelTooLarge`` if no
    WPG would have room even if it were empty.
    """
    settled = list(tenancies)
    homes: list[WpgId] = []
    obstacles: list[Obstacle] = []
    for want in wanted:
        pool = [site for site in sites if site.wpg.pool is want.pool]
        _refuse_too_large(want, pool)
        found = list(_obstacles(want, pool, settled))
        blocked = {obstacle.wpg for obstacle in found}
        free = [site.wpg.id for site in pool if site.wpg.id not in blocked]
        if not free:
            obstacles += found
            continue
        count = dict.fromkeys(free, 0)
        for tenancy in settled:
            if tenancy.wpg in count:
                count[tenancy.wpg] += 1
        home = min(free, key=lambda wpg: (count[wpg], wpg))
        homes.append(home)
        settled.append(Tenancy(wpg=home, image_bytes=want.image_bytes))
    return tuple(obstacles) if obstacles else Placement(homes=tuple(homes))


def host_need(image_bytes: Sequence[int]) -> int:
    """Host bytes of some images: all of them, and a spare slab for the one that is leaving."""
    return sum(image_bytes) + max(image_bytes, default=0)


def images_room(site: Site, largest: int) -> int:
    """Bytes for images on both tiers: an image lies on one of them as a whole."""
    if not site.nvme_bytes:
        return site.host_bytes
    return sum(size // largest * largest for size in (site.host_bytes, site.nvme_bytes))


def _refuse_too_large(want: Wanted, pool: Sequence[Site]) -> None:
    need = want.image_bytes
    if any(need <= s.device_bytes and host_need([need]) <= s.host_bytes for s in pool) or not pool:
        return
    largest = max(min(s.device_bytes, s.host_bytes // 2) for s in pool)
    raise ModelTooLarge(want.model.name, need, largest, want.pool)


def _obstacles(
    want: Wanted, pool: Sequence[Site], settled: Sequence[Tenancy]
) -> Iterator[Obstacle]:
    """Every reason, not the first one; a WPG without a reason is a possible home."""
    name, need = want.model.name, want.image_bytes
    if not pool:
        yield Obstacle(
            kind=ObstacleKind.NO_WPG,
            model=name,
            pool=want.pool,
            wpg=None,
            needed_bytes=need,
            free_bytes=0,
            sentence=f"model {name} needs a {want.pool} WPG, and the partition holds none",
        )
    for site in pool:
        here = [t.image_bytes for t in settled if t.wpg == site.wpg.id]
        host = host_need([*here, need])
        for kind, needed, free, where in (
            (ObstacleKind.DEVICE_MEMORY, need, site.device_bytes, "device"),
            (ObstacleKind.HOST_MEMORY, host, images_room(site, max([*here, need])), "host"),
        ):
            if needed > free:
                beside = f" beside {len(here)} others" if here and where == "host" else ""
                yield Obstacle(
                    kind=kind,
                    model=name,
                    pool=want.pool,
                    wpg=site.wpg.id,
                    needed_bytes=needed,
                    free_bytes=free,
                    sentence=(
                        f"model {name} needs {in_words(needed)} of {where} memory on "
                        f"{site.wpg.id}{beside}, which has {in_words(free)}"
                    ),
                )

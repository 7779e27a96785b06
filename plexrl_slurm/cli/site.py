"""Find the partition's settings file: ``--config``, ``PLEXRL_CONFIG``, then the usual places."""

from collections.abc import Iterator
from pathlib import Path

from plexrl_slurm.core.errors import BadConfig, BadInput
from plexrl_slurm.whereabouts import Site, read_site


def places() -> Iterator[Path]:
    """Every settings file in the usual places, in the order in which they are looked at."""
    if (here := Path("plexrl.toml")).exists():
        yield here
    yield from sorted((Path.home() / ".config" / "plexrl").glob("*.toml"))
    yield from sorted(Path("/etc/plexrl").glob("*.toml"))


def find_site(config: Path | None, partition: str | None) -> Site:
    """The partition to talk to; raises ``BadConfig`` or, for an unknown name, ``BadInput``."""
    files = [config] if config is not None else list(places())
    if not files:
        raise BadConfig(
            "plexrl.toml",
            (
                "there is no settings file here, in ~/.config/plexrl or in /etc/plexrl: give "
                "--config FILE, set PLEXRL_CONFIG, or start from examples/partition.toml",
            ),
        )
    if partition is None:
        return read_site(files[0])
    known: list[str] = []
    broken: BadConfig | None = None
    for file in files:
        try:
            site = read_site(file)
        except BadConfig as error:  # another partition's file must not be in the way
            broken = broken or error
            continue
        if site.partition == partition:
            return site
        known.append(site.partition)
    if broken is not None:
        raise broken
    raise BadInput(
        f"unknown partition {partition!r}; known here: {', '.join(known)} "
        f"(give --config FILE for another one)"
    )

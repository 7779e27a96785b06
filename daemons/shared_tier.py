"""What all agents of a partition write to the shared file system: the daemon deletes it."""

import asyncio
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from plexrl_slurm.logs import say
from plexrl_slurm.memory import contents, durable
from plexrl_slurm.settings import Settings

log = logging.getLogger(__name__)


def sweep(settings: Settings, *, deployments: Iterable[str], snapshots: Iterable[str]) -> None:
    """At start: delete what belongs to none of these; an earlier daemon died before it could."""
    homes = {durable.home_of(settings.durable_dir, name) for name in deployments}
    for folder in _within(settings.durable_dir):
        if folder not in homes:
            say(log, "left_over", folder=folder)
            shutil.rmtree(folder, ignore_errors=True)
    wanted = set(snapshots)
    for path in _within(settings.snapshots_dir):
        # ``NAME.safetensors``, or ``.NAME.safetensors.WRITER.part`` while it is written.
        name = path.name.partition(".safetensors")[0].removeprefix(".")
        if path.is_file() and name not in wanted:
            path.unlink(missing_ok=True)
    contents.forget(settings.snapshots_dir)


def drop_snapshot(settings: Settings, snapshot: str) -> None:
    """Nobody samples from it any more; an agent that is just writing it deletes it then."""
    path = settings.snapshots_dir / f"{snapshot}.safetensors"

    def delete() -> None:
        path.unlink(missing_ok=True)
        contents.forget(path.parent)

    asyncio.get_running_loop().run_in_executor(None, delete)


def take_over(
    settings: Settings, deployment: str, order: tuple[int, int], known: tuple[int, int] | None
) -> None:
    """It has another home: agents of the one before add no durable image any more."""
    if settings.durable:
        root = settings.durable_dir
        asyncio.get_running_loop().run_in_executor(
            None, durable.take_over, root, deployment, order, known
        )


def drop_images(settings: Settings, deployment: str) -> None:
    """It is gone; an agent may be copying it, and then this is called again."""
    root = settings.durable_dir
    asyncio.get_running_loop().run_in_executor(None, durable.drop_images, root, deployment)


def _within(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []

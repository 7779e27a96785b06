"""What the partition could hold if it were empty: a job that needs more never finds a place."""

import os
from collections.abc import Sequence

from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.errors import ModelTooLarge
from plexrl_slurm.core.ids import WpgId
from plexrl_slurm.core.messages import Pool, Wpg
from plexrl_slurm.core.sites import Site, most_for, needed_by
from plexrl_slurm.settings import Settings, WpgSettings


def device_bytes(table: WpgSettings) -> int:
    """What a WPG's devices hold; without GPUs, this machine's memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(table.options.get("device_bytes", memory))


def refuse_impossible(settings: Settings, models: Sequence[ModelSpec]) -> None:
    """Raise ``ModelTooLarge`` if no WPG of the configuration, held or not, could hold all of a
    job's ``models`` though nobody else were there."""
    for pool in Pool:
        sites = [_empty(settings, table) for table in settings.wpgs if table.pool == pool]
        images = [_image(model, pool) for model in models]
        if not images or not sites:
            continue
        for model, image in zip(models, images, strict=True):
            if not any(image <= most_for(site, [image]) for site in sites):
                largest = max(most_for(site, [image]) for site in sites)
                raise ModelTooLarge(model.name, image, largest, pool)
        if len(images) < 2:
            continue
        if not any(needed_by(site, images) <= most_for(site, images) for site in sites):
            site = max(sites, key=lambda each: most_for(each, images))
            names = " with ".join(model.name for model in models)
            raise ModelTooLarge(names, needed_by(site, images), most_for(site, images), pool)


def _image(model: ModelSpec, pool: Pool) -> int:
    return model.train_bytes if pool is Pool.TRAIN else model.weights_bytes


def _empty(settings: Settings, table: WpgSettings) -> Site:
    disks = settings.nvme_bytes if settings.nvme_dir is not None and table.pool == "train" else 0
    return Site(
        wpg=Wpg(id=WpgId(table.pool), pool=Pool(table.pool), gpus=table.gpus),
        device_bytes=device_bytes(table),
        host_bytes=settings.host_bytes,
        nvme_bytes=disks,
        nodes=tuple(str(number) for number in range(table.nodes)),
    )

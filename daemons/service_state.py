"""State as users see it: which image is where, what jobs saved, and whether that is whole."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from plexrl_slurm.api.service import Principal
from plexrl_slurm.core.errors import BadImage, NotFound
from plexrl_slurm.core.ids import DeploymentId, JobId
from plexrl_slurm.daemons import shared_tier
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.daemons.service_base import Parts
from plexrl_slurm.daemons.service_submission import SubmissionCalls
from plexrl_slurm.daemons.state import LiveDeployment, LiveSnapshot
from plexrl_slurm.db import deployments, state_views
from plexrl_slurm.db.models import CheckpointKind, CheckpointRow, ImageRow
from plexrl_slurm.memory import durable, saved
from plexrl_slurm.transport import messages as tm

#: Only these are the daemon's to tell of; copies in other tiers are rows of images.
_DEVICE, _HOST, _NVME, _DURABLE = "device", "host", "nvme", "durable"


class StateCalls(SubmissionCalls):
    """See :class:`plexrl_slurm.api.service.Service`."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        # One at a time: whoever verifies much must not take the daemon's threads.
        self._verifying = asyncio.Lock()
        #: Damaged durable images that were set aside, as :meth:`_faults` shows them.
        self.durable_faults: list[dict[str, Any]] = []

    async def partition_state(self, who: Principal) -> dict[str, Any]:
        images = await self._images(None)
        return {
            "partition": self.settings.partition,
            "images": images,
            "tiers": self._tiers(images),
            "faults": self._faults(images),
        }

    async def job_state(self, who: Principal, job_id: JobId) -> dict[str, Any]:
        row = await self.owned(who, job_id)
        made = await self.store.read(deployments.deployments_of, job_id)
        rows = await self.store.read(state_views.checkpoints_of, job_id)
        images = await self._images(job_id)
        return {
            "job_id": job_id,
            "slurm_id": row.slurm_id,
            "name": row.name,
            "state": str(row.state),
            "deployments": [
                {"id": each.id, "model": each.base_model, "state": str(each.state)} for each in made
            ],
            "images": images,
            "faults": self._faults(images),
            "checkpoints": await asyncio.to_thread(_checkpoints, rows),
        }

    async def verify_state(self, who: Principal, job_id: JobId, *, uri: str) -> dict[str, Any]:
        row = await self._saved(who, job_id, uri)
        async with self._verifying:
            found = await asyncio.to_thread(saved.verify, Path(row.path), uri)
        return {
            "uri": uri,
            "kind": str(row.kind),
            "name": row.name,
            "fine": all(each.state == "fine" for each in found),
            "files": [
                {
                    "file": each.file,
                    "state": each.state,
                    "bytes": each.bytes,
                    "reason": each.reason,
                }
                for each in found
            ],
        }

    async def state_files(self, who: Principal, job_id: JobId, *, uri: str) -> dict[str, Any]:
        files = await self._model_files(who, job_id, uri)
        return {
            "uri": uri,
            "piece_bytes": saved.LONGEST_PIECE,
            "files": [
                {
                    "name": each.name,
                    "bytes": each.bytes,
                    "version": each.version,
                    "sha256": each.sha256,
                }
                for each in files
            ],
        }

    async def state_piece(
        self,
        who: Principal,
        job_id: JobId,
        *,
        uri: str,
        name: str,
        version: str,
        offset: int,
        length: int,
    ) -> bytes:
        files = await self._model_files(who, job_id, uri)
        file = next((each for each in files if each.name == name), None)
        if file is None:
            raise NotFound("file", name)
        return await asyncio.to_thread(
            saved.read_piece, file, version=version, offset=offset, length=length
        )

    async def _model_files(
        self, who: Principal, job_id: JobId, uri: str
    ) -> Sequence[saved.ModelFile]:
        row = await self._saved(who, job_id, uri)
        if row.kind is not CheckpointKind.SAMPLER_WEIGHTS:
            raise NotFound("sampler weights", uri)
        model = self.model_named(row.base_model)
        catalogue = Path(model.path) if model is not None else None
        return await asyncio.to_thread(saved.model_files, Path(row.path), catalogue, uri)

    async def _saved(self, who: Principal, job_id: JobId, uri: str) -> CheckpointRow:
        """What a job that the caller may see has saved under this name."""
        await self.owned(who, job_id)
        for row in await self.store.read(state_views.checkpoints_of, job_id):
            if row.uri == uri:
                return row
        raise NotFound("checkpoint", uri)

    def image_story(self, deployment: str) -> list[dict[str, Any]]:
        """Which tiers an image went through."""
        hub = self._parts.hub
        return list(hub.stories.of(deployment)) if hub is not None else []

    def _faults(self, images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Damaged copies of these, as their agents found them."""
        names = {each["id"] for each in images}
        return [
            {
                "id": fault.deployment,
                "node": node,
                "seq": fault.progress[0],
                "part": fault.progress[1],
                "reason": fault.reason,
                "dropped": fault.dropped,
            }
            for node, stock in self._stocks().items()
            for fault in stock.faults
            if fault.deployment in names
        ] + [fault for fault in self.durable_faults if fault["id"] in names]

    def _stocks(self) -> dict[str, tm.Stock]:
        """What each node said of its tiers."""
        hub = self._parts.hub
        agents = hub.agents.values() if hub is not None else ()
        return {
            each.place.node: each.stock
            for each in agents
            if each.stock is not None and not each.refused
        }

    def image_persisted(self, done: tm.Done) -> None:
        """An agent has copied an image to the durable tier."""
        name = DeploymentId(done.deployment)
        live = self.state.deployments.get(name)
        if live is None or live.dropped:
            shared_tier.drop_images(self.settings, name)  # it was copied meanwhile
            return
        known = self.shell.durable_progress(name)
        if known is not None and known >= done.progress:
            return
        folder = durable.folder_of(self.settings.durable_dir, name, done.progress)
        self.shell.durable[name] = Durable(progress=done.progress, path=str(folder), spare=known)
        self.books.persisted(name, done.progress, str(folder))

    def tier_troubles(self) -> list[tuple[str, tm.Stock]]:
        """Nodes whose tiers are not as they are configured."""
        return [(node, stock) for node, stock in self._stocks().items() if stock.trouble]

    # -- images ------------------------------------------------------------------------------
    async def _images(self, job: JobId | None) -> list[dict[str, Any]]:
        """Images of living deployments and snapshots, of one job or of all."""
        trained = [d for d in self.state.deployments.values() if job in (None, d.job)]
        sampled = [s for s in self.state.snapshots.values() if job in (None, s.job)]
        living = [live for live in trained if not live.dropped]
        rows = await self.store.read(state_views.images_among, [live.id for live in living])
        copies: dict[str, list[ImageRow]] = defaultdict(list)
        for row in rows:
            copies[row.deployment_id].append(row)
        sizes = await asyncio.to_thread(self._durable_sizes, [live.id for live in living])
        resident = self._resident()
        return [
            *(self._trained(each, copies[each.id], sizes, resident) for each in living),
            *(self._sampled(each, resident) for each in sampled if each.ready and not each.dropped),
        ]

    def _resident(self) -> set[str]:
        """Contents that are on a device now, by WPG and content."""
        found = set()
        for view in self.shell.core.views():
            for name in (view.resident, view.beside):
                if name is not None and (known := self.shell.deployments.get(name)) is not None:
                    found.add(f"{view.wpg} {known.content}")
        return found

    def _durable_sizes(self, names: Iterable[DeploymentId]) -> dict[str, int]:
        found = {}
        for name in names:
            kept = self.shell.durable.get(name)
            if kept is None:
                continue
            try:
                found[str(name)] = durable.read_manifest(Path(kept.path)).bytes
            except BadImage:  # it is just replaced
                continue
        return found

    def _trained(
        self,
        live: LiveDeployment,
        copies: Sequence[ImageRow],
        durable_sizes: dict[str, int],
        resident: set[str],
    ) -> dict[str, Any]:
        model = self.models.get(live.model)
        tiers: list[dict[str, Any]] = []
        if f"{live.wpg} {live.id}" in resident:
            tiers.append(_tier(_DEVICE, None, model.train_bytes if model is not None else 0))
        held = self.placer.wpgs.get(live.wpg)
        stock = self._stocks().get(held.place.node) if held is not None else None
        if stock is None:
            tiers += [
                _tier(row.tier, (row.seq, row.part), row.bytes)
                for row in copies
                if row.tier != _DURABLE
            ]
        else:
            tiers += [
                _tier(each.tier, each.progress, each.bytes) | {"last_used_us": each.last_use_us}
                for each in stock.images
                if (each.wpg, each.deployment) == (live.wpg, live.id)
            ]
        kept = self.shell.durable.get(live.id)
        if kept is not None:
            tiers.append(_tier(_DURABLE, kept.progress, durable_sizes.get(live.id, 0)))
        return self._image(live, "training", live.last_used_us, tiers, content=live.id)

    def _sampled(self, live: LiveSnapshot, resident: set[str]) -> dict[str, Any]:
        base = live.deployment is None
        version = live.id.rpartition(".v")[2]
        progress = (int(version), 0) if not base and version.isdecimal() else None
        tiers = []
        if f"{live.wpg} {live.content}" in resident:
            tiers.append(_tier(_DEVICE, progress, live.bytes))
        if not base:  # the catalogue's folder is nobody's image
            hub = self._parts.hub
            nodes = hub.snapshots.nodes(live.id) if hub is not None and not live.path else []
            tiers += [_tier(_HOST, progress, live.bytes) | {"node": node} for node in nodes]
            if not nodes:
                tiers.append(_tier(_DURABLE if live.path else _HOST, progress, live.bytes))
        used = [
            sampler.last_used_us
            for name in live.samplers
            if (sampler := self.state.samplers.get(name)) is not None
        ]
        return self._image(live, "weights", max(used, default=0), tiers, content=live.content)

    def _image(
        self,
        live: LiveDeployment | LiveSnapshot,
        kind: str,
        last_used_us: int,
        tiers: list[dict[str, Any]],
        *,
        content: str,
    ) -> dict[str, Any]:
        job = self.state.jobs.get(live.job)
        return {
            "id": live.id,
            "kind": kind,
            "model": live.model,
            "content": content,
            "job_id": live.job,
            "slurm_id": job.slurm_id if job is not None else "",
            "user": job.user if job is not None else "",
            "wpg": live.wpg,
            "last_used_us": last_used_us,
            "tiers": tiers,
        }

    def _tiers(self, images: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """What the images take: of every WPG's devices, every node's host memory, and durably.

        Equal weights are stored once in each place, durably each named file is; so they count.
        """
        held = self.placer.wpgs
        counted: set[tuple[tuple[str, str], str]] = set()
        used: dict[tuple[str, str], int] = {}
        for name, each in held.items():
            used[_DEVICE, str(name)] = used[_HOST, each.place.node] = 0
        used[_DURABLE, ""] = 0
        for image in images:
            for copy in image["tiers"]:
                tier, wpg = copy["tier"], image["wpg"]
                node = copy.get("node") or (held[wpg].place.node if wpg in held else "")
                where = wpg if tier == _DEVICE else node
                key = (tier, "" if tier == _DURABLE else where)
                snapshot = self.state.snapshots.get(image["id"])
                if snapshot is not None:
                    what = (key, snapshot.path if tier == _DURABLE else snapshot.content)
                    if what in counted:
                        continue
                    counted.add(what)
                used[key] = used.get(key, 0) + copy["bytes"]
        limits = {
            (_DEVICE, str(name)): each.slot.table.options.get("device_bytes")
            for name, each in held.items()
        }
        for node, stock in self._stocks().items():
            if stock.nvme_limit is not None:
                used[_NVME, node], limits[_NVME, node] = stock.nvme_used, stock.nvme_limit
        return [
            {
                "tier": tier,
                "where": where,
                "used": total,
                "limit": self.settings.host_bytes if tier == _HOST else limits.get((tier, where)),
                "free": _free(self.settings.state_dir) if tier == _DURABLE else None,
            }
            for (tier, where), total in sorted(used.items(), key=_order)
        ]


def _tier(tier: str, progress: tuple[int, int] | None, size: int) -> dict[str, Any]:
    seq, part = progress if progress is not None else (None, None)
    return {"tier": tier, "seq": seq, "part": part, "bytes": size}


def _order(item: tuple[tuple[str, str], int]) -> tuple[int, str, str]:
    """The nearest tier first."""
    (tier, where), _ = item
    near = (_DEVICE, _HOST)
    rank = near.index(tier) if tier in near else 3 if tier == _DURABLE else 2
    return rank, tier, where


def _free(folder: Path) -> int:
    known = os.statvfs(folder)
    return known.f_bavail * known.f_frsize


def _checkpoints(rows: Sequence[CheckpointRow]) -> list[dict[str, Any]]:
    """What a job saved; its step is in the manifest."""
    found = []
    for row in rows:
        manifest = saved.manifest_of(Path(row.path), row.uri)
        found.append(
            {
                "uri": row.uri,
                "kind": str(row.kind),
                "name": row.name,
                "deployment": row.deployment_id,
                "model": row.base_model,
                "step": manifest.step if manifest is not None else None,
                "bytes": row.bytes,
                "created_us": row.created_us,
            }
        )
    return found

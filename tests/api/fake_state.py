"""The part of the service in memory that changes saved state: it answers with what it was asked."""

from collections.abc import Mapping
from typing import Any

from plexrl_slurm.api.service import Import, Principal
from plexrl_slurm.core.ids import JobId


class FakeState:
    """See :class:`tests.api.fake_service.FakeService`."""

    async def priorities(self, who: Principal) -> dict[str, Any]:
        return {"weights": {}, "jobs": []}

    async def starts(self, who: Principal) -> dict[str, Any]:
        return {"jobs": []}

    async def evict_state(
        self, who: Principal, job_id: JobId, *, deployment: str, to: str
    ) -> dict[str, Any]:
        return {"job_id": job_id, "deployment": deployment, "to": to}

    async def begin_import(self, who: Principal, job_id: JobId, asked: Import) -> dict[str, Any]:
        return {"import_id": asked.name, "model": asked.model}

    async def import_piece(
        self, who: Principal, job_id: JobId, import_id: str, *, name: str, offset: int, data: bytes
    ) -> dict[str, Any]:
        return {"bytes": len(data), "name": name, "offset": offset}

    async def finish_import(
        self, who: Principal, job_id: JobId, import_id: str, *, sha256: Mapping[str, str]
    ) -> dict[str, Any]:
        return {"uri": import_id, "sha256": dict(sha256)}

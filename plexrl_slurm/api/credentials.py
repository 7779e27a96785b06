"""What a user's running Slurm job needs to use the service, asked for from inside the job."""

from typing import Annotated, TypeAlias

from fastapi import APIRouter, Path, Request, Response

from plexrl_slurm.api.auth import User
from plexrl_slurm.api.border import service_of
from plexrl_slurm.api.errors import as_json
from plexrl_slurm.core.ids import SlurmId

router = APIRouter(prefix="/plexrl/v1")

#: A job's number, or that of an array and a task's index.
SlurmNumber: TypeAlias = Annotated[str, Path(pattern=r"^[0-9]{1,18}(_[0-9]{1,18})?$")]


@router.post("/slurm-jobs/{slurm_id}/credentials")
async def credentials(slurm_id: SlurmNumber, request: Request, who: User) -> Response:
    """As ``POST jobs`` answered for that job: 404 for another's, 409 before it is admitted."""
    answer = await service_of(request).credentials(who, SlurmId(slurm_id))
    return as_json(answer)

"""What every route needs: the service behind the app, and promises."""

from collections.abc import Mapping
from pathlib import Path

from fastapi import Request, Response

from plexrl_slurm.api.errors import as_json
from plexrl_slurm.api.service import Service
from plexrl_slurm.core.catalogue import ModelSpec
from plexrl_slurm.core.ids import CallId


def service_of(request: Request) -> Service:
    """The daemon behind this app."""
    service: Service = request.app.state.service
    return service


def future(call: CallId, **more: object) -> Response:
    """The promise that every submission answers with."""
    return as_json({"request_id": call, **more})


def catalogue_name(models: Mapping[str, ModelSpec], asked: str) -> str:
    """A model's catalogue name; ``asked`` may carry a ``:suffix`` or be the model's folder."""
    if asked in models:
        return asked
    if "/" in asked:
        for name, model in models.items():
            if Path(model.path) == Path(asked):
                return name
    return asked.partition(":")[0]

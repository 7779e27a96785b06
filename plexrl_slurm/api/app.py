"""The HTTP application: all routes, and what they share."""

from fastapi import FastAPI

from plexrl_slurm.api import (
    checkpoints,
    credentials,
    errors,
    jobs,
    sampling,
    sessions,
    state,
    tinker,
)
from plexrl_slurm.api.auth import AuthenticateSocket, principal_of_peer
from plexrl_slurm.api.futures import LongPolls
from plexrl_slurm.api.munge import Munge
from plexrl_slurm.api.service import Service


def make_app(
    service: Service,
    *,
    authenticate_socket: AuthenticateSocket = principal_of_peer,
    munge: Munge | None = None,
) -> FastAPI:
    """The border of ``service``; ``authenticate_socket`` says who a unix socket's peer is.

    Without ``munge`` it takes no MUNGE credentials.
    """
    app = FastAPI(title="plexrl-slurm", openapi_url=None)
    app.state.service = service
    app.state.authenticate_socket = authenticate_socket
    app.state.munge = munge
    app.state.polls = LongPolls()
    errors.install(app)
    for part in (sessions, tinker, sampling, checkpoints, jobs, state, credentials):
        app.include_router(part.router)
    return app

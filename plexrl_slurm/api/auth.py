"""Who asks: a job by its token, or a user by the peer uid of the unix socket."""

import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, TypeAlias

from fastapi import Depends, Request

from plexrl_slurm.api.service import Principal, Service
from plexrl_slurm.core.errors import Denied, Unauthenticated


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixPeer:
    """The process at the other end of a unix socket, as the kernel vouches for it."""

    pid: int
    uid: int
    gid: int


#: What turns a peer into somebody; may raise ``Unauthenticated``.
AuthenticateSocket: TypeAlias = Callable[[UnixPeer], Principal]


@lru_cache(maxsize=1024)
def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def principal_of_peer(peer: UnixPeer) -> Principal:
    """The user behind a unix socket; root and the service's own user are admins."""
    return Principal(uid=peer.uid, user=_user_name(peer.uid), admin=peer.uid in {0, os.getuid()})


def _token(request: Request) -> str:
    """The API key of ``X-API-Key`` or ``Authorization: Bearer``; "" if there is none."""
    key = request.headers.get("x-api-key", "")
    if key:
        return key
    scheme, _, rest = request.headers.get("authorization", "").partition(" ")
    return rest.strip() if scheme.lower() == "bearer" else ""


async def caller(request: Request) -> Principal:
    """Who sent this request; raises ``Unauthenticated``."""
    service: Service = request.app.state.service
    token = _token(request)
    if token:
        who = await service.principal_of_token(token)
        if who is None:
            raise Unauthenticated(
                "this API key belongs to no live job here: use the TINKER_API_KEY that "
                "`plexrl sbatch` put into the job's environment, while that job lives"
            )
        return who
    peer: UnixPeer | None = getattr(request.state, "unix_peer", None)
    if peer is None:
        raise Unauthenticated(
            "no API key: send the job's TINKER_API_KEY as X-API-Key, "
            "or ask over the service's unix socket"
        )
    authenticate: AuthenticateSocket = request.app.state.authenticate_socket
    return authenticate(peer)


async def admin(who: Annotated[Principal, Depends(caller)]) -> Principal:
    """The caller, if root or the service user; raises ``Denied``."""
    if not who.admin:
        raise Denied("only root and the service's own user may do that")
    return who


Who: TypeAlias = Annotated[Principal, Depends(caller)]
Admin: TypeAlias = Annotated[Principal, Depends(admin)]

"""Who asks: a job by its token, or a user by the unix socket's peer or a MUNGE credential."""

import asyncio
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Final, TypeAlias

from fastapi import Depends, Request

from plexrl_slurm.api import signing
from plexrl_slurm.api.munge import Munge
from plexrl_slurm.api.service import Principal, Service
from plexrl_slurm.core.errors import BadInput, Denied, Unauthenticated

#: Of a request with a MUNGE credential; its whole body is read before anything is done.
SIGNED_BODY_LIMIT: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class UnixPeer:
    """The process at the other end of a unix socket, as the kernel vouches for it.

    Or the one that made a MUNGE credential, as munged vouches for it; that one's pid is 0.
    """

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


def _credential(request: Request) -> str:
    """What stands behind ``Authorization: Munge``; "" if there is none."""
    scheme, _, rest = request.headers.get("authorization", "").partition(" ")
    return rest.strip() if scheme.lower() == signing.SCHEME.lower() else ""


async def _of_munge(request: Request, credential: str) -> Principal:
    """The user whose credential it is, if it was made for this very request."""
    munge: Munge | None = request.app.state.munge
    if munge is None:
        raise Unauthenticated(
            "this service takes no MUNGE credentials: use its unix socket or a job's TINKER_API_KEY"
        )
    decoded = await munge.decode(credential)
    body = await _signed_body(request)
    path, query = request.scope["raw_path"], request.scope["query_string"]
    target = (path + b"?" + query if query else path).decode("latin-1")
    if decoded.payload != signing.statement(request.method, target, body).encode("latin-1"):
        raise Unauthenticated(
            "this MUNGE credential was made for another request: make a new one for every request, "
            "over its method, path and body"
        )
    if await asyncio.to_thread(_has_no_name, decoded.uid):
        raise Unauthenticated(
            f"uid {decoded.uid} of this MUNGE credential has no name on the service node: "
            f"ask your admin to make the user known there"
        )
    authenticate: AuthenticateSocket = request.app.state.authenticate_socket
    return authenticate(UnixPeer(pid=0, uid=decoded.uid, gid=decoded.gid))


async def _signed_body(request: Request) -> bytes:
    """The body; the handlers find it again, because Starlette keeps it."""
    length = request.headers.get("content-length", "0")
    chunked = "transfer-encoding" in request.headers
    if chunked or not length.isdecimal() or int(length) > SIGNED_BODY_LIMIT:
        async for _ in request.stream():  # a client that is cut off sees no answer
            pass
        raise BadInput(
            f"a request with a MUNGE credential needs a Content-Length of at most "
            f"{SIGNED_BODY_LIMIT}: send less at once, or use the unix socket"
        )
    return await request.body()


def _has_no_name(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return True
    return False


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
    if credential := _credential(request):
        return await _of_munge(request, credential)
    peer: UnixPeer | None = getattr(request.state, "unix_peer", None)
    if peer is None:
        raise Unauthenticated(
            "no API key: send the job's TINKER_API_KEY as X-API-Key, "
            "or ask over the service's unix socket or with a MUNGE credential"
        )
    authenticate: AuthenticateSocket = request.app.state.authenticate_socket
    return authenticate(peer)


async def admin(who: Annotated[Principal, Depends(caller)]) -> Principal:
    """The caller, if root or the service user; raises ``Denied``."""
    if not who.admin:
        raise Denied("only root and the service's own user may do that")
    return who


async def user(who: Annotated[Principal, Depends(caller)]) -> Principal:
    """The caller, if no job's token speaks for it; raises ``Denied``."""
    if who.job is not None:
        raise Denied("a job's key cannot do that: ask as the user, without TINKER_API_KEY")
    return who


Who: TypeAlias = Annotated[Principal, Depends(caller)]
Admin: TypeAlias = Annotated[Principal, Depends(admin)]
User: TypeAlias = Annotated[Principal, Depends(user)]

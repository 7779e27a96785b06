"""Our errors as HTTP answers: a status that the SDK treats rightly, and one sentence.

The SDK retries 408, 409, 429 and 5xx for minutes and takes every other 4xx as final, so 409
is only for a job that waits for its turn, and 5xx only for what may pass by itself.
"""

import logging
from typing import Any, Final

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from plexrl_slurm.core.errors import (
    BadInput,
    Denied,
    NotAdmitted,
    NotFound,
    PlexError,
    Unauthenticated,
    UnknownModel,
)
from plexrl_slurm.logs import say

log = logging.getLogger(__name__)

#: The first that fits decides; a retryable error is 503 before that.
_STATUS: Final[tuple[tuple[type[BaseException], int], ...]] = (
    (Unauthenticated, 401),
    (Denied, 403),
    (NotFound, 404),
    (UnknownModel, 404),
    (NotAdmitted, 409),
    (ValueError, 400),
    (PlexError, 500),
)


def status_of(error: PlexError) -> int:
    """The HTTP status of one of our errors."""
    if error.retryable:
        return 503
    return next(status for kind, status in _STATUS if isinstance(error, kind))


def as_json(value: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def refusal(status: int, sentence: str, *, exit_code: int = 1) -> Response:
    """An answer that says why not; ``exit_code`` is what the CLI ends with."""
    category = "server" if status >= 500 else "user"
    return as_json({"error": sentence, "category": category, "exit_code": exit_code}, status)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, PlexError)
    if error.retryable:  # the client tries again in silence, so this is where an admin reads it
        say(log, "refused_for_now", request=f"{request.method} {request.url.path}", reason=error)
    return refusal(status_of(error), str(error), exit_code=error.exit_code)


async def _starlettes(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        sentence = f"this service does not offer {request.method} {request.url.path}"
    return refusal(error.status_code, sentence, exit_code=NotFound.exit_code)


async def _fastapis(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = "; ".join(
        f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in error.errors()
    )
    return refusal(400, problems, exit_code=BadInput.exit_code)


async def _bug(request: Request, error: Exception) -> Response:
    sentence = (
        f"{request.method} {request.url.path} failed inside the service "
        f"({type(error).__name__}): tell your admin, the daemon's log has the rest"
    )
    return refusal(500, sentence)


def install(app: FastAPI) -> None:
    """Answer every error in our form."""
    app.add_exception_handler(PlexError, _ours)
    app.add_exception_handler(HTTPException, _starlettes)
    app.add_exception_handler(RequestValidationError, _fastapis)
    app.add_exception_handler(Exception, _bug)

"""MUNGE credentials over HTTP: ``unmunge`` says whose a credential is and what it was made for.

The program, not the library: a request takes 3 ms instead of 0.4, but what strangers send is
read in another process, and one that hangs (the library waits 10 s for a stopped munged) can be
ended.
"""

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plexrl_slurm.core.errors import CredentialsUnavailable, PlexError, Unauthenticated

#: A credential with a statement of ours takes some 400 characters.
_LONGEST: Final = 8192
_FORM: Final = re.compile(rb"MUNGE:[A-Za-z0-9+/=]+:")
#: ``unmunge`` takes milliseconds, or munged is stuck.
_TIMEOUT_S: Final = 5.0
#: Programs at once, and requests that wait for one.
_AT_ONCE: Final = 8
_WAITING: Final = 256
#: ``unmunge`` ends with munge's own error numbers.
_DAMAGED: Final = frozenset(range(8, 14))
_REFUSALS: Final[Mapping[int, str]] = {
    14: "it was made with another key than the service node's: "
    "ask your admin to put the same munge.key on both nodes",
    15: "it has expired: send it at once, and if you did, ask your admin to set the clocks of both "
    "nodes right",
    16: "it comes from the future: ask your admin to set the clocks of both nodes right",
    17: "it was used before: make a new one for every request",
    18: "it was made for another user to read: make it without a restriction",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """A credential that munged vouches for."""

    uid: int
    gid: int
    payload: bytes


class Munge:
    """Reads credentials with this machine's munged. Belongs to one event loop."""

    def __init__(self, socket: Path | None = None, *, timeout_s: float = _TIMEOUT_S) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self._asked = 0

    async def decode(self, credential: str) -> Decoded:
        """Whose it is; raises ``Unauthenticated`` or ``CredentialsUnavailable``."""
        raw = credential.encode("utf-8", "replace")
        if len(raw) > _LONGEST or not _FORM.fullmatch(raw):
            raise _refused("it is not what the program munge prints")
        if self._asked >= _AT_ONCE + _WAITING:
            raise CredentialsUnavailable(
                f"the service is checking {self._asked} credentials already: try again in a moment"
            )
        self._asked += 1
        try:
            async with self._turn:
                code, said, trouble = await self._unmunge(raw)
        finally:
            self._asked -= 1
        if code == 0:
            return _decoded(said)
        raise self._why_not(code, trouble)

    async def _unmunge(self, credential: bytes) -> tuple[int, bytes, bytes]:
        options = ["--numeric", "--keys=UID,GID"]
        if self._socket is not None:
            options.append(f"--socket={self._socket}")
        pipe = asyncio.subprocess.PIPE
        try:
            program = await asyncio.create_subprocess_exec(
                "unmunge", *options, stdin=pipe, stdout=pipe, stderr=pipe
            )
        except OSError as error:
            raise CredentialsUnavailable(
                f"the service cannot check credentials now: it cannot run unmunge "
                f"({error.strerror}); ask your admin to install munge on the service node"
            ) from error
        try:
            async with asyncio.timeout(self._timeout_s):
                said, trouble = await program.communicate(credential)
        except TimeoutError as error:
            raise self._unavailable(f"no answer within {self._timeout_s:g} s") from error
        finally:
            if program.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    program.kill()
                await program.wait()
        return program.returncode or 0, said, trouble

    def _why_not(self, code: int, trouble: bytes) -> PlexError:
        words = trouble.decode(errors="replace").strip().removeprefix("unmunge: Error: ")
        if code in _REFUSALS:
            return _refused(_REFUSALS[code])
        if code in _DAMAGED:
            return _refused(f"it is damaged ({words[:200]}): make a new one")
        return self._unavailable(words[:200] or f"unmunge ended with {code}")

    def _unavailable(self, words: str) -> CredentialsUnavailable:
        where = self._socket or "its usual socket"
        return CredentialsUnavailable(
            f"the service cannot check credentials now: munged does not answer at {where} "
            f"({words}); ask your admin to start munge on the service node"
        )


def _refused(why: str) -> Unauthenticated:
    return Unauthenticated(f"this MUNGE credential is refused: {why}")


def _decoded(said: bytes) -> Decoded:
    """Read ``UID: 0``, ``GID: 0``, an empty line, and the payload, which may be anything."""
    head, _, payload = said.partition(b"\n\n")
    pairs = (line.partition(b":") for line in head.splitlines())
    values = {name.strip(): value.strip() for name, _, value in pairs}
    return Decoded(uid=int(values[b"UID"]), gid=int(values[b"GID"]), payload=payload)

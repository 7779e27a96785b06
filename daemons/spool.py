"""Bulky things that the database does not hold: bodies and results of calls.

Files under ``<state_dir>/spool``. A body is complete on disk before the call's row is committed,
and a result before the row says done. Sample calls are lines of one append-only journal per
sampling session instead; after a restart they run again, with the same seeds.
"""

import contextlib
import errno
import os
import shutil
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from plexrl_slurm import wire
from plexrl_slurm.core.errors import StorageFull

#: Ends the name of the part of a journal that was written before the current one.
_OLD = ".old"


class SampleLine(msgspec.Struct, frozen=True, array_like=True):
    """One accepted sample call."""

    call: str
    seq: int
    body: wire.Sample | wire.Doomed


_lines = msgspec.msgpack.Decoder(SampleLine)


class Spool:
    """Owned by the daemon of one partition."""

    #: Journals that are open at the same time.
    OPEN_JOURNALS = 64
    #: A longer journal is begun anew; its calls can be run again until the next one is as long.
    JOURNAL_BYTES = 32 << 20

    def __init__(self, folder: Path) -> None:
        self._bodies = folder / "bodies"
        self._results = folder / "results"
        self._samples = folder / "samples"
        for each in (self._bodies, self._results, self._samples):
            each.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._journals: dict[str, int] = {}

    # -- training calls ----------------------------------------------------------------------
    def write_body(self, call: str, data: bytes) -> None:
        """Raises ``StorageFull``; then nothing is left behind."""
        _write(self._bodies / call, data)

    def read_body(self, call: str) -> bytes | None:
        """``None`` if it was dropped."""
        return _read(self._bodies / call)

    def drop_body(self, call: str) -> None:
        """Delete it; harmless if it is gone."""
        (self._bodies / call).unlink(missing_ok=True)

    def write_result(self, call: str, data: bytes, *, part: int | None = None) -> None:
        """Result of a call, or of one part of it. Raises ``StorageFull``."""
        _write(self._results / (call if part is None else f"{call}+{part}"), data)

    def read_result(self, call: str, *, part: int | None = None) -> bytes | None:
        """``None`` if there is none."""
        return _read(self._results / (call if part is None else f"{call}+{part}"))

    def drop_result(self, call: str, *, parts: int = 0) -> None:
        """Delete it, or with ``parts`` only the results of its parts."""
        if parts == 0:
            (self._results / call).unlink(missing_ok=True)
        for part in range(parts):
            (self._results / f"{call}+{part}").unlink(missing_ok=True)

    # -- sample calls ------------------------------------------------------------------------
    def journal_sample(self, session: str, line: SampleLine) -> None:
        """Append; raises ``StorageFull``, then the torn tail is cut off."""
        data = msgspec.msgpack.encode(line)
        record = len(data).to_bytes(4, "little") + data
        descriptor = self._open_journal(session)
        before = os.fstat(descriptor).st_size
        if before > self.JOURNAL_BYTES:
            self._shut_journal(session)
            (self._samples / session).rename(self._samples / f"{session}{_OLD}")
            descriptor, before = self._open_journal(session), 0
        with _room(self._samples, len(record)):
            if os.write(descriptor, record) != len(record):
                os.ftruncate(descriptor, before)
                raise OSError(errno.ENOSPC, "short write")

    def _open_journal(self, session: str) -> int:
        descriptor = self._journals.pop(session, None)
        if descriptor is None:
            if len(self._journals) >= self.OPEN_JOURNALS:
                self._shut_journal(next(iter(self._journals)))
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            descriptor = os.open(self._samples / session, flags, 0o600)
        self._journals[session] = descriptor  # the last is the one used last
        return descriptor

    def _shut_journal(self, session: str) -> None:
        if (descriptor := self._journals.pop(session, None)) is not None:
            os.close(descriptor)

    def journalled_samples(self, session: str) -> Iterator[SampleLine]:
        """All lines; a torn tail (the daemon died while it wrote) was never acknowledged."""
        data = _read(self._samples / f"{session}{_OLD}") or b""
        data += _read(self._samples / session) or b""
        at = 0
        while at + 4 <= len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            if at + 4 + size > len(data):
                return
            yield _lines.decode(data[at + 4 : at + 4 + size])
            at += 4 + size

    def close_journal(self, session: str) -> None:
        """The sampling session is over: nobody can ask for its samples any more."""
        self._shut_journal(session)
        (self._samples / session).unlink(missing_ok=True)
        (self._samples / f"{session}{_OLD}").unlink(missing_ok=True)

    # -- start -------------------------------------------------------------------------------
    def sweep(self, *, calls: Container[str], sessions: Container[str]) -> int:
        """Delete what belongs to none of these: an earlier daemon died before it could."""
        gone = 0
        for folder, owners in (
            (self._bodies, calls),
            (self._results, calls),
            (self._samples, sessions),
        ):
            for path in folder.iterdir():
                owner = path.name.partition("+")[0].removesuffix(_OLD)
                if owner not in owners:
                    path.unlink(missing_ok=True)
                    gone += 1
        return gone

    def mend_journals(self) -> None:
        """At start: cut torn tails off, so that appending goes on at a line's end."""
        for path in self._samples.iterdir():
            data, at = path.read_bytes(), 0
            while at + 4 <= len(data):
                size = int.from_bytes(data[at : at + 4], "little")
                if at + 4 + size > len(data):
                    break
                at += 4 + size
            if at != len(data):
                os.truncate(path, at)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(path: Path, data: bytes) -> None:
    # No rename: the row that makes the file count is committed after it is whole.
    try:
        with _room(path.parent, len(data)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            try:
                left = memoryview(data)
                while left:
                    left = left[os.write(descriptor, left) :]
            finally:
                os.close(descriptor)
    except StorageFull:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        raise


@contextmanager
def _room(folder: Path, needed_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(folder).free
            raise StorageFull(str(folder), needed_bytes, free) from error
        raise

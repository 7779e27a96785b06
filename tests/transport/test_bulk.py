"""Bulk transfers end with the very bytes of the source, or with a sentence, whatever happens."""

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadImage, Denied, StorageFull
from plexrl_slurm.memory.kept_maps import KeptMaps
from plexrl_slurm.memory.partial import list_of, nobody_has, part_of
from plexrl_slurm.transport import bulk, bulk_client
from plexrl_slurm.transport.bulk_client import BulkFetch, Fetched
from plexrl_slurm.transport.bulk_server import BulkServer, _Chunks
from tests.transport.bulk_proxy import Proxy, cut_after, flip_at

KEY = b"k" * 40
SMALL = 8 << 10


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "CHUNK", SMALL)
    monkeypatch.setattr(bulk, "PIECE", 3 << 10)
    monkeypatch.setattr(bulk_client, "_PAUSE_S", 0.005)


class Source:
    """A server in a thread of its own, which serves the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = self._server = BulkServer(KEY, self._find)
        self.address = ("127.0.0.1", await server.start("127.0.0.1"))
        self._ready.set()
        await self._end.wait()
        await server.close()

    def _find(self, name: str) -> Path | None:
        path = self.folder / name
        return path if path.exists() else None

    def prepare(self, name: str) -> None:
        self._server.prepare(name)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    (tmp_path / "there").mkdir()
    one = Source(tmp_path / "there")
    yield one
    one.close()


@pytest.fixture
def wire(source: Source) -> Iterator[Proxy]:
    with Proxy(source.address) as one:
        yield one


def make(source: Source, size: int, *, seed: int = 0, name: str = "s") -> bytes:
    data = random.Random(seed).randbytes(size)
    path = source.folder / f".{name}"
    path.write_bytes(data)
    path.rename(source.folder / name)
    return data


def fetch(
    target: Path, address: tuple[str, int], *, key: bytes = KEY, size: int | None = None
) -> Fetched:
    spare = target.with_name(".spare")
    return BulkFetch(address, key, "s", target, size=size, spare=spare).run()


@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL, 10 * SMALL + 1234])
def test_a_file_of_any_size_arrives_as_it_is(source: Source, tmp_path: Path, size: int) -> None:
    data = make(source, size)
    got = fetch(tmp_path / "s", source.address, size=size)
    assert (tmp_path / "s").read_bytes() == data
    assert got == Fetched(bytes=size, received=size, connections=1)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
    assert not list_of(tmp_path / "s").exists()
    assert not part_of(tmp_path / "s").exists()


@pytest.mark.parametrize("seed", range(8))
def test_a_connection_that_breaks_anywhere_is_gone_on_with(
    source: Source, wire: Proxy, tmp_path: Path, seed: int
) -> None:
    places = random.Random(seed)
    data = make(source, 40 * SMALL + 17)
    wire.meddles = [cut_after(places.randrange(len(data) // 3)) for _ in range(3)]
    got = fetch(tmp_path / "s", wire.address)
    assert (tmp_path / "s").read_bytes() == data
    assert got.received == len(data), "a chunk that was there was fetched again"
    assert got.connections == 4


def test_whoever_was_killed_goes_on_where_it_was(
    source: Source, wire: Proxy, tmp_path: Path
) -> None:
    data = make(source, 20 * SMALL)
    wire.meddles = [cut_after(11 * SMALL)] + [cut_after(0)] * 10
    with pytest.raises(ConnectionError):
        fetch(tmp_path / "s", wire.address)
    wire.meddles = []
    got = fetch(tmp_path / "s", wire.address)  # as another process would
    assert (tmp_path / "s").read_bytes() == data
    assert 0 < got.received <= 11 * SMALL


def test_a_chunk_that_was_spoiled_while_nobody_looked_is_fetched_again(
    source: Source, wire: Proxy, tmp_path: Path
) -> None:
    data = make(source, 20 * SMALL)
    wire.meddles = [cut_after(11 * SMALL)] + [cut_after(0)] * 10
    with pytest.raises(ConnectionError):
        fetch(tmp_path / "s", wire.address)
    with part_of(tmp_path / "s").open("r+b") as file:
        file.seek(SMALL + 5)
        file.write(b"spoiled")
    wire.meddles = []
    fetch(tmp_path / "s", wire.address)
    assert (tmp_path / "s").read_bytes() == data


@pytest.mark.parametrize("seed", range(4))
def test_a_byte_that_arrives_as_another_is_found_and_asked_for_again(
    source: Source, wire: Proxy, tmp_path: Path, seed: int
) -> None:
    data = make(source, 20 * SMALL)
    wire.meddles = [flip_at(random.Random(seed).randrange(300, len(data)))]
    got = fetch(tmp_path / "s", wire.address)
    assert (tmp_path / "s").read_bytes() == data
    assert got.connections == 2
    assert got.received == len(data)


def test_a_chunk_that_always_arrives_damaged_is_an_error_that_names_the_source(
    source: Source, wire: Proxy, tmp_path: Path
) -> None:
    make(source, 2 * SMALL)
    wire.meddles = [flip_at(1000)] * 20
    with pytest.raises(BadImage, match=f"damaged from 127.0.0.1, port {wire.address[1]}"):
        fetch(tmp_path / "s", wire.address)
    assert not (tmp_path / "s").exists()


def test_a_source_that_is_replaced_meanwhile_gives_the_new_file_whole(
    source: Source, wire: Proxy, tmp_path: Path
) -> None:
    old = make(source, 20 * SMALL)
    wire.meddles = [cut_after(11 * SMALL)] + [cut_after(0)] * 10
    with pytest.raises(ConnectionError):
        fetch(tmp_path / "s", wire.address)
    new = make(source, 20 * SMALL, seed=1)
    wire.meddles = []
    got = fetch(tmp_path / "s", wire.address)
    assert (tmp_path / "s").read_bytes() == new != old
    assert got.received == len(new)


def test_a_file_that_is_renamed_over_while_it_is_sent_arrives_as_one_of_both(
    source: Source, wire: Proxy, tmp_path: Path
) -> None:
    old = make(source, 200 * SMALL)
    wire.hold_at = 50 * SMALL
    got: list[Fetched] = []
    fetching = threading.Thread(target=lambda: got.append(fetch(tmp_path / "s", wire.address)))
    fetching.start()
    assert wire.held.wait(10)
    make(source, 200 * SMALL, seed=1)
    wire.release()
    fetching.join(20)
    assert (tmp_path / "s").read_bytes() == old
    assert got


def test_a_source_that_is_cut_short_is_refused_with_both_sizes(
    source: Source, wire: Proxy, tmp_path: Path
) -> None:
    make(source, 200 * SMALL)
    wire.hold_at = 50 * SMALL
    failures: list[BaseException] = []

    def run() -> None:
        try:
            fetch(tmp_path / "s", wire.address, size=200 * SMALL)
        except BaseException as error:
            failures.append(error)

    fetching = threading.Thread(target=run)
    fetching.start()
    assert wire.held.wait(10)
    os.truncate(source.folder / "s", 60 * SMALL)
    wire.release()
    fetching.join(20)
    assert isinstance(failures[0], BadImage)
    assert f"{60 * SMALL} bytes" in str(failures[0])
    assert f"{200 * SMALL} were written" in str(failures[0])
    assert not (tmp_path / "s").exists()
    make(source, SMALL, name="other")  # and the server lives
    assert BulkFetch(
        source.address, KEY, "other", tmp_path / "o", size=None, spare=tmp_path / ".spare"
    ).run()


def test_a_file_that_is_not_there_is_said_so(source: Source, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no s here"):
        fetch(tmp_path / "s", source.address)


# ---- trust -------------------------------------------------------------------------------------


def test_whoever_has_another_key_gets_nothing(source: Source, tmp_path: Path) -> None:
    make(source, SMALL)
    with pytest.raises(Denied, match="does not have this partition's key"):
        fetch(tmp_path / "s", source.address, key=b"another" * 6)
    assert not part_of(tmp_path / "s").exists()


def test_a_stranger_is_told_nothing_but_a_nonce(source: Source) -> None:
    make(source, SMALL)
    with socket.create_connection(source.address, timeout=10) as link:
        said = bulk.receive(link, len(bulk.GREETING) + bulk.NONCE_BYTES)
        link.sendall(bytes(bulk.NONCE_BYTES) + said[len(bulk.GREETING) :])
        bulk.send_frame(link, bulk.Ask(name="s"))
        with pytest.raises(ConnectionError):
            bulk.receive(link, 1)


def test_a_server_that_gives_the_callers_own_proof_back_is_not_believed(tmp_path: Path) -> None:
    """It knows no key, and asks the caller what the caller asked it."""
    listening = socket.create_server(("127.0.0.1", 0))

    def mirror() -> None:
        link, _ = listening.accept()
        with link:
            link.sendall(bulk.GREETING + bytes(bulk.NONCE_BYTES))
            said = bulk.receive(link, bulk.NONCE_BYTES + bulk.PROOF_BYTES)
            link.sendall(said[bulk.NONCE_BYTES :])

    thread = threading.Thread(target=mirror)
    thread.start()
    with pytest.raises(Denied):
        fetch(tmp_path / "s", listening.getsockname())
    thread.join(10)
    listening.close()


def test_a_stranger_that_says_nothing_is_hung_up_on(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plexrl_slurm.transport.bulk_server._PROOF_S", 0.1)
    with socket.create_connection(source.address, timeout=10) as link:
        bulk.receive(link, len(bulk.GREETING) + bulk.NONCE_BYTES)
        assert link.recv(1) == b""


def test_a_key_is_that_of_the_agents(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    assert bulk.bulk_key(one) == bulk.bulk_key(one) != bulk.bulk_key(other)


# ---- room --------------------------------------------------------------------------------------


def test_a_target_without_room_for_all_of_it_is_refused_before_anything_is_sent(
    source: Source, wire: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(source, 20 * SMALL)
    found = os.statvfs(tmp_path)
    little = os.statvfs_result((*found[:3], *[0] * 2, *found[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: little)
    with pytest.raises(StorageFull):
        fetch(tmp_path / "s", wire.address)
    assert list(tmp_path.iterdir()) == [source.folder]
    assert wire.passed < SMALL


@pytest.mark.parametrize("seed", range(3))
def test_a_target_that_fills_up_meanwhile_is_refused_and_leaves_nothing(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    make(source, 20 * SMALL)
    monkeypatch.setattr(bulk_client, "_TWO_STREAMS", 4 * SMALL)
    real, left = os.pwrite, random.Random(seed).randrange(10)

    def full(descriptor: int, data: bytes | memoryview, at: int) -> int:
        nonlocal left
        if len(data) > 1024:
            left -= 1
            if left < 0:
                raise OSError(28, os.strerror(28))
        return real(descriptor, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StorageFull):
        fetch(tmp_path / "s", source.address)
    assert list(tmp_path.iterdir()) == [source.folder]


@pytest.mark.parametrize("more", [-SMALL, 0, SMALL])
def test_the_mapping_of_memory_that_is_written_again_is_kept_while_its_size_is_the_same(
    source: Source, tmp_path: Path, more: int
) -> None:
    """The third transfer is received through the mapping that the second made."""
    target, spare, maps = tmp_path / "s", tmp_path / ".spare", KeptMaps()
    for number, size in enumerate((5 * SMALL, 5 * SMALL, 5 * SMALL + more)):
        data = make(source, size, seed=number)
        BulkFetch(source.address, KEY, "s", target, size=size, spare=spare, maps=maps).run()
        assert target.read_bytes() == data
        assert maps.count == (number > 0 and size <= 5 * SMALL)
        assert nobody_has(target, maps)
        target.rename(spare)
    maps.close()
    assert nobody_has(spare)


def test_memory_that_nobody_needs_is_taken_over(source: Source, tmp_path: Path) -> None:
    data = make(source, 5 * SMALL)
    spare = tmp_path / ".spare"
    spare.write_bytes(b"x" * 9 * SMALL)
    number = spare.stat().st_ino
    fetch(tmp_path / "s", source.address)
    assert (tmp_path / "s").read_bytes() == data
    assert (tmp_path / "s").stat().st_ino == number
    assert not spare.exists()


# ---- ends --------------------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_fetch_that_is_cancelled_ends_at_once(
    source: Source, wire: Proxy, tmp_path: Path
) -> None:
    make(source, 200 * SMALL)
    wire.hold_at = 50 * SMALL
    one = BulkFetch(wire.address, KEY, "s", tmp_path / "s", size=None, spare=tmp_path / ".spare")
    failures: list[BaseException] = []

    def run() -> None:
        try:
            one.run()
        except BaseException as error:
            failures.append(error)

    fetching = threading.Thread(target=run)
    fetching.start()
    assert wire.held.wait(10)
    one.cancel()
    fetching.join(5)
    assert not fetching.is_alive()
    assert isinstance(failures[0], ConnectionAbortedError)


def test_a_source_that_falls_silent_is_given_up_after_a_while(
    source: Source, wire: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(source, 200 * SMALL)
    wire.hold_at = 50 * SMALL
    monkeypatch.setattr(bulk, "PATIENCE_S", 0.05)
    monkeypatch.setattr(bulk_client, "_TRIES", 1)
    with pytest.raises(TimeoutError, match="said nothing"):
        fetch(tmp_path / "s", wire.address)


def test_nobody_there_is_an_error_after_a_few_tries(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        with pytest.raises(ConnectionRefusedError):
            fetch(tmp_path / "s", taken.getsockname())


def test_several_fetch_at_once(source: Source, tmp_path: Path) -> None:
    data = make(source, 100 * SMALL)
    threads = []
    for number in range(12):
        folder = tmp_path / str(number)
        folder.mkdir()
        threads.append(threading.Thread(target=fetch, args=(folder / "s", source.address)))
        threads[-1].start()
    for thread in threads:
        thread.join(20)
    assert all((tmp_path / str(n) / "s").read_bytes() == data for n in range(12))
    until(lambda: threading.active_count() < 20)


@pytest.mark.parametrize("seed", range(4))
def test_a_large_file_comes_through_two_connections_either_of_which_may_break(
    source: Source,
    wire: Proxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
) -> None:
    monkeypatch.setattr(bulk_client, "_TWO_STREAMS", 10 * SMALL)
    data, places = make(source, 60 * SMALL + 5), random.Random(seed)
    wire.meddles = [cut_after(places.randrange(25 * SMALL)) for _ in range(2)]
    got = fetch(tmp_path / "s", wire.address)
    assert (tmp_path / "s").read_bytes() == data
    assert got.received == len(data)
    assert wire.connections >= 3


def test_a_file_that_was_prepared_is_given_without_being_summed_again(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make(source, 20 * SMALL + 3)
    summed: list[int] = []
    plain = _Chunks._sum

    def counting(chunks: _Chunks, at: int, end: int) -> int:
        summed.append(at)
        return plain(chunks, at, end)

    monkeypatch.setattr(_Chunks, "_sum", counting)
    source.prepare("s")
    until(lambda: len(summed) == 21)
    source.prepare("nothing of this name")
    fetch(tmp_path / "s", source.address)
    assert (tmp_path / "s").read_bytes() == data
    assert len(summed) == 21


def test_a_file_that_changed_since_it_was_prepared_is_summed_anew(
    source: Source, tmp_path: Path
) -> None:
    make(source, 20 * SMALL)
    source.prepare("s")
    data = make(source, 20 * SMALL, seed=1)
    fetch(tmp_path / "s", source.address)
    assert (tmp_path / "s").read_bytes() == data

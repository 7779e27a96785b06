"""Snapshots: where they are, who brings them, when a publish may end."""

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.core.errors import BadImage, StorageFull
from plexrl_slurm.daemons import snapshot_links, snapshot_store
from plexrl_slurm.daemons.snapshot_links import SnapshotLinks
from plexrl_slurm.daemons.snapshot_store import SnapshotStore
from plexrl_slurm.memory.partial import list_of, nobody_has, part_of
from plexrl_slurm.transport import messages as tm

KEY = b"k" * 40
NOWHERE = "tcp://127.0.0.1:9"
NAME = "s1-1.train.0.v3"


class Node:
    """One agent's snapshots."""

    def __init__(self, folder: Path, name: str, *, shared: Path | None, key: bytes = KEY) -> None:
        self.name = name
        self.store = SnapshotStore(folder / name, shared=shared, writer=name)
        self.store.make()
        self.store.own()
        self.came: list[tuple[str, int, str]] = []
        self.room: list[int] = []
        self.links = SnapshotLinks(
            self.store, agent=name, key=key, room=self._make_room, here=self._came
        )

    async def _make_room(self, size: int) -> None:
        self.room.append(size)

    def _came(self, name: str, size: int, origin: str, took_us: int) -> None:
        assert took_us >= 0
        self.came.append((name, size, origin))

    def source(self, *, seen: bool = False) -> tm.SnapshotSource:
        """As told to an agent of another node, unless that is ``seen`` to be the same one."""
        said = self.links.source()
        return tm.SnapshotSource(
            agent=said.agent,
            host=said.host,
            port=said.port,
            folder=said.folder,
            token=said.token if seen else "of another memory",
        )

    def order(self, *sources: tm.SnapshotSource, size: int = 0) -> tm.SwitchOrder:
        return tm.SwitchOrder(
            epoch=1,
            id="1",
            wpg="rollout-0",
            incarnation=1,
            incoming=NAME,
            sources=list(sources),
            snapshot_bytes=size,
        )


def run(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scene, 30))


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_links, "WAIT_S", 0.3)
    monkeypatch.setattr(snapshot_links, "LOOK_S", 0.02)


# ---- who has it --------------------------------------------------------------------------------


def test_on_one_node_the_very_file_is_loaded(tmp_path: Path) -> None:
    train, rollout = (Node(tmp_path, name, shared=None) for name in ("train", "rollout"))
    train.store.path(NAME).write_bytes(b"weights")

    async def scene() -> None:
        found = await rollout.links.ready(rollout.order(train.source(seen=True)))
        assert found == str(train.store.path(NAME))

    run(scene())
    assert list(rollout.store.fetched.iterdir()) == []


def test_an_equal_path_on_another_node_is_not_taken_for_the_same_memory(tmp_path: Path) -> None:
    """The folder can be read, and what lies there is another node's."""
    train, rollout = (Node(tmp_path, name, shared=None) for name in ("train", "rollout"))
    train.store.path(NAME).write_bytes(b"of another")
    assert rollout.store.find(NAME, [train.source()]) is None
    assert rollout.store.find(NAME, [train.source(seen=True)]) is not None


def test_from_another_node_it_is_fetched_and_said_to_be_here(tmp_path: Path, shared: Path) -> None:
    train, rollout = (Node(tmp_path, name, shared=shared) for name in ("train", "rollout"))
    data = os.urandom(9 << 20)
    train.store.path(NAME).write_bytes(data)

    async def scene() -> None:
        await train.links.start(NOWHERE)
        order = rollout.order(train.source(), size=len(data))
        found = await rollout.links.ready(order)
        assert found == str(rollout.store.fetched_path(NAME))
        assert rollout.came == [(NAME, len(data), "train")]
        assert rollout.room == [len(data)]
        assert await rollout.links.ready(order) == found
        for node in (train, rollout):
            await node.links.close()

    run(scene())
    assert rollout.store.fetched_path(NAME).read_bytes() == data
    assert rollout.store.fetched_names() == [NAME]
    assert rollout.store.names() == []


def test_a_fetch_that_was_ordered_ahead_is_the_one_that_a_switch_waits_for(tmp_path: Path) -> None:
    train, rollout = (Node(tmp_path, name, shared=None) for name in ("train", "rollout"))
    train.store.path(NAME).write_bytes(b"weights")

    async def scene() -> None:
        await train.links.start(NOWHERE)
        rollout.links.want(NAME, 7, [train.source()])
        rollout.links.want(NAME, 7, [train.source()])
        await rollout.links.ready(rollout.order(train.source(), size=7))
        rollout.links.want(NAME, 7, [train.source()])
        for node in (train, rollout):
            await node.links.close()

    run(scene())
    assert len(rollout.came) == 1


def test_when_its_node_is_lost_the_copy_in_the_shared_folder_is_loaded(
    tmp_path: Path, shared: Path
) -> None:
    train, rollout = (Node(tmp_path, name, shared=shared) for name in ("train", "rollout"))

    async def scene() -> None:
        train.store.path(NAME).write_bytes(b"weights")
        train.store.publishing(NAME)
        await train.store.made_safe(NAME)
        await train.links.start(NOWHERE)
        gone = train.source()
        await train.links.close()
        found = await rollout.links.ready(rollout.order(gone, size=7))
        assert found == str(shared / f"{NAME}.safetensors")
        assert await rollout.links.ready(rollout.order()) == found

    run(scene())


def test_a_node_without_room_loads_from_the_shared_folder(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, rollout = (Node(tmp_path, name, shared=shared) for name in ("train", "rollout"))
    found = os.statvfs(tmp_path)
    little = os.statvfs_result((*found[:3], *[0] * 2, *found[5:]))

    async def scene() -> None:
        for path in (train.store.path(NAME), shared / f"{NAME}.safetensors"):
            path.write_bytes(b"weights")
        await train.links.start(NOWHERE)
        monkeypatch.setattr(os, "statvfs", lambda _: little)
        found = await rollout.links.ready(rollout.order(train.source(), size=7))
        assert found == str(shared / f"{NAME}.safetensors")
        for node in (train, rollout):
            await node.links.close()

    run(scene())


def test_a_snapshot_that_nobody_has_is_an_error_that_says_who_was_asked(
    tmp_path: Path, shared: Path
) -> None:
    train, rollout = (Node(tmp_path, name, shared=shared) for name in ("train", "rollout"))

    async def scene() -> None:
        await train.links.start(NOWHERE)
        with pytest.raises(BadImage, match=f"{NAME}: cannot .*train: there is no {NAME} here"):
            await rollout.links.ready(rollout.order(train.source(), size=7))
        for node in (train, rollout):
            await node.links.close()

    run(scene())


def test_an_agent_of_another_partition_gives_nothing(tmp_path: Path, shared: Path) -> None:
    train = Node(tmp_path, "train", shared=shared, key=b"another" * 6)
    rollout = Node(tmp_path, "rollout", shared=shared)
    train.store.path(NAME).write_bytes(b"weights")

    async def scene() -> None:
        await train.links.start(NOWHERE)
        with pytest.raises(BadImage, match="does not have this partition's key"):
            await rollout.links.ready(rollout.order(train.source(), size=7))
        for node in (train, rollout):
            await node.links.close()

    run(scene())


def test_a_wait_goes_on_when_another_source_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, rollout = (Node(tmp_path, name, shared=None) for name in ("train", "rollout"))
    train.store.path(NAME).write_bytes(b"weights")
    monkeypatch.setattr(snapshot_links, "WAIT_S", 20)

    async def scene() -> None:
        waiting = asyncio.create_task(rollout.links.ready(rollout.order(size=7)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await train.links.start(NOWHERE)
        rollout.links.want(NAME, 7, [train.source()])
        assert await waiting == str(rollout.store.fetched_path(NAME))
        for node in (train, rollout):
            await node.links.close()

    run(scene())


def test_what_is_dropped_while_it_is_waited_for_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = Node(tmp_path, "rollout", shared=None)
    monkeypatch.setattr(snapshot_links, "WAIT_S", 20)

    async def scene() -> None:
        waiting = asyncio.create_task(rollout.links.ready(rollout.order(size=7)))
        await asyncio.sleep(0.05)
        rollout.links.drop([NAME])
        with pytest.raises(BadImage, match="was dropped while"):
            await waiting

    run(scene())


# ---- when a publish may end --------------------------------------------------------------------


def test_a_publish_ends_when_another_node_has_it_though_the_shared_folder_is_slow(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Node(tmp_path, "train", shared=shared)

    async def scene() -> None:
        slow = asyncio.Event()

        async def copy(name: str) -> None:
            await slow.wait()

        monkeypatch.setattr(train.store, "_copy", copy)
        train.store.publishing(NAME)
        train.store.path(NAME).write_bytes(b"weights")
        ending = asyncio.create_task(train.store.made_safe(NAME))
        await asyncio.sleep(0.02)
        assert not ending.done()
        train.store.is_elsewhere(NAME)
        await ending
        train.store.published_or_not(NAME)
        slow.set()
        await train.store.settle(seconds=5)

    run(scene())


def test_a_publish_fails_when_nobody_else_can_have_it(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Node(tmp_path, "train", shared=shared)
    monkeypatch.setattr(snapshot_store, "_ELSEWHERE_S", 0.05)

    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    async def scene() -> None:
        train.store.publishing(NAME)
        train.store.path(NAME).write_bytes(b"weights")
        monkeypatch.setattr("shutil.copyfile", full)
        with pytest.raises(StorageFull):
            await train.store.made_safe(NAME)
        ending = asyncio.create_task(train.store.made_safe(NAME))
        train.store.is_elsewhere(NAME)
        await ending

    run(scene())
    assert list(shared.iterdir()) == []


def test_where_there_is_one_node_a_publish_ends_at_once(tmp_path: Path) -> None:
    train = Node(tmp_path, "train", shared=None)

    async def scene() -> None:
        train.store.publishing(NAME)
        await train.store.made_safe(NAME)

    run(scene())


def test_a_copy_of_what_was_dropped_meanwhile_does_not_stay(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, real = Node(tmp_path, "train", shared=shared), snapshot_store._copy_file

    def late(source: Path, target: Path, writer: str) -> None:
        real(source, target, writer)
        source.unlink()

    async def scene() -> None:
        train.store.publishing(NAME)
        train.store.path(NAME).write_bytes(b"weights")
        monkeypatch.setattr(snapshot_store, "_copy_file", late)
        await train.store.made_safe(NAME)

    run(scene())
    assert list(shared.iterdir()) == []


def test_a_node_that_is_given_back_leaves_what_it_has_in_the_shared_folder(
    tmp_path: Path, shared: Path
) -> None:
    node = Node(tmp_path, "node", shared=shared)
    node.store.path("published.v1").write_bytes(b"one")
    node.store.fetched_path("fetched.v1").write_bytes(b"two")
    run(node.store.settle(seconds=5))
    found = {path.name: path.read_bytes() for path in shared.iterdir()}
    assert found == {"published.v1.safetensors": b"one", "fetched.v1.safetensors": b"two"}


# ---- garbage -----------------------------------------------------------------------------------


def test_a_restarted_agent_keeps_what_is_half_fetched_and_lives(tmp_path: Path) -> None:
    node = Node(tmp_path, "node", shared=None)
    for name in ("lives", "gone"):
        path = node.store.fetched_path(name)
        part_of(path).write_bytes(b"half")
        list_of(path).write_bytes(b"chunks")
    node.store.own()
    node.store.keep_only(["lives"])
    path = node.store.fetched_path("lives")
    assert set(node.store.fetched.iterdir()) == {part_of(path), list_of(path)}


def test_what_is_dropped_for_good_has_no_mapping_left(tmp_path: Path) -> None:
    """Each is fetched into the memory of the one before, through the same mapping."""
    train, rollout = (Node(tmp_path, name, shared=tmp_path / name) for name in ("t", "r"))

    def mapped() -> bool:
        return str(rollout.store.fetched) in Path("/proc/self/maps").read_text()

    async def bring(name: str) -> None:
        path = train.store.path(name)
        path.write_bytes(b"weights" * 1000)
        order = rollout.order(train.source(), size=7000)
        await rollout.links.ready(msgspec.structs.replace(order, incoming=name))

    async def scene() -> None:
        await train.links.start(NOWHERE)
        for number in range(3):
            await bring(f"s1-1.train.0.v{number}")
            rollout.store.drop(f"s1-1.train.0.v{number}")
            assert rollout.store.spare.exists()
            assert mapped() == (number > 0)
        await bring("s1-1.train.0.v8")
        with rollout.store.reading("s1-1.train.0.v8"):
            rollout.store.drop("s1-1.train.0.v8")
        assert not mapped()
        await bring("s1-1.train.0.v10")
        rollout.store.drop("s1-1.train.0.v10")
        await bring("s1-1.train.0.v11")
        assert mapped()
        rollout.store.keep_only([])
        assert not mapped()
        for node in (train, rollout):
            await node.links.close()

    run(scene())


def test_memory_of_a_dropped_snapshot_is_kept_for_the_next_only_if_nobody_reads_it(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, "node", shared=None)
    path = node.store.fetched_path(NAME)
    path.write_bytes(b"weights")
    with path.open("rb") as reader:
        assert not nobody_has(path)
        node.store.drop(NAME)
        assert not path.exists()
        assert not node.store.spare.exists()
        assert reader.read() == b"weights"
    path.write_bytes(b"weights")
    with node.store.reading(NAME):
        node.store.drop(NAME)
    assert not node.store.spare.exists()
    path.write_bytes(b"weights")
    node.store.drop(NAME)
    assert node.store.spare.read_bytes() == b"weights"
    assert node.store.fetched_names() == []


# ---- the daemon's side -------------------------------------------------------------------------

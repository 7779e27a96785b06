"""The tiers of agents: nobody deletes or spoils what another writes."""

import asyncio
import errno
import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from plexrl_slurm.core.errors import BadImage, Denied, StorageFull
from plexrl_slurm.daemons import agentd, folders, shared_tier
from plexrl_slurm.daemons.host_tier import HostTier
from plexrl_slurm.memory import contents, durable
from plexrl_slurm.memory.files import WRITER, NamedBuffer, part_name, write_tensors
from plexrl_slurm.transport import messages as tm
from tests.daemons.holds_bench import World, settings_in, world_in
from tests.memory.test_slab import make_header, write


def tier_in(folder: Path, name: str = "h1.0", *, shared: bool = True) -> HostTier:
    snapshots = folder / "snapshots" if shared else None
    return HostTier(folder / "host" / "n1" / name, snapshots=snapshots, writer=name)


def with_image(tier: HostTier, deployment: str = "a", progress: tuple[int, int] = (7, 1)) -> None:
    store = tier.store("train-0", 1)
    slot = store.begin()
    write(store.paths(slot)[0], make_header(8), 7)
    store.commit(slot, deployment=deployment, progress=progress)


def persist_order(folder: Path) -> tm.PersistOrder:
    return tm.PersistOrder(
        epoch=1, id="1", wpg="train-0", deployment="a", folder=str(folder / "durable")
    )


def switch_order(folder: Path, **more: Any) -> tm.SwitchOrder:
    return tm.SwitchOrder(
        epoch=1,
        id="1",
        wpg="train-0",
        incarnation=1,
        incoming="a",
        durable_path=str(folder / "durable" / "a" / "000000009.0000"),
        durable_progress=(9, 0),
        **more,
    )


# ---- folders -----------------------------------------------------------------------------------


def test_an_agent_that_is_told_what_lives_deletes_no_snapshot_that_all_share(
    tmp_path: Path,
) -> None:
    tier = tier_in(tmp_path)
    made_since = tier.snapshots.shared_path("made-since")
    assert made_since is not None
    made_since.parent.mkdir()
    made_since.write_bytes(b"weights")
    tier.keep_only(deployments=[], snapshots=["other"])
    assert made_since.exists()


@pytest.mark.parametrize("shared", [True, False])
def test_an_agent_deletes_from_its_memory_what_does_not_live(tmp_path: Path, shared: bool) -> None:
    tier = tier_in(tmp_path, shared=shared)
    for name in ("lives", "gone"):
        tier.snapshots.path(name).write_bytes(b"weights")
    tier.keep_only(deployments=[], snapshots=["lives"])
    assert tier.snapshots.names() == ["lives"]


def test_a_snapshot_that_is_dropped_while_it_is_written_is_not_left_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = tier_in(tmp_path)
    path = tier.snapshots.path("s")
    monkeypatch.setenv(WRITER, f"{tier.writer}.3")  # of the gang's third start
    being_written = part_name(path)
    being_written.write_bytes(b"half")
    tier.drop(tm.DropOrder(epoch=1, deployments=[], snapshots=["s"]))
    assert not being_written.exists()


def test_two_gangs_that_write_one_file_do_not_meet_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parts = tmp_path / "s.safetensors", set()
    for writer in ("h1.0.n1.5", "h2.0.n2.6"):
        monkeypatch.setenv(WRITER, writer)
        parts.add(part_name(path))
        buffer = NamedBuffer(name="w", dtype="float32", shape=(1,), data=memoryview(b"abcd"))
        write_tensors(path, [buffer], durable=False)
    assert len(parts) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_was_deleted_while_its_agent_started_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, real = tier_in(tmp_path), fcntl.flock
    folder = tmp_path / "host" / "n1" / "h1.0"

    def late(descriptor: int, how: int) -> None:
        if folder.exists() and not seen:
            seen.append(descriptor)
            shutil.rmtree(folder)  # as another hold's agent does with what is left over
        real(descriptor, how)

    seen: list[int] = []
    monkeypatch.setattr(fcntl, "flock", late)
    asyncio.run(tier.own())
    assert seen
    assert (folder / "agent.lock").exists()
    other = os.open(folder / "agent.lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_host_dir_that_cannot_be_made_is_one_sentence_of_the_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()

    async def serve(_config: object) -> None:
        HostTier(tmp_path / "file" / "n1", snapshots=None, writer="w")

    monkeypatch.setattr(agentd, "serve", serve)
    monkeypatch.setattr("plexrl_slurm.daemons.agentd.AgentConfig.read", lambda _path: None)
    monkeypatch.setattr(sys, "argv", ["plexrl-agentd", "h1.json"])
    monkeypatch.setattr("plexrl_slurm.logs.set_up", lambda: None)
    with pytest.raises(SystemExit) as ended:
        agentd.main()
    assert ended.value.code == 74
    assert capsys.readouterr().err == (
        f"plexrl-agentd: error: {tmp_path}/file/n1 cannot be written (Not a directory): a file is "
        f"where a folder belongs: move it away\n"
    )


def test_an_agent_that_waits_for_anothers_folder_says_for_whose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(folders, "SAID_FIRST", 1)

    async def scene() -> None:
        first = await folders.locked(tmp_path, lambda: None)
        second = asyncio.create_task(folders.locked(tmp_path, lambda: None))
        while not caplog.messages:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        os.close(first)
        os.close(await second)

    asyncio.run(scene())
    (said,) = caplog.messages
    assert f"{tmp_path} is in use by another agent (pid {os.getpid()}): this one waits" in said
    assert "give one of them a folder or a [partition] name of its own" in said


@pytest.mark.parametrize("above", [0, 1, 3])
def test_a_tier_that_other_users_can_change_is_refused(tmp_path: Path, above: int) -> None:
    tier = HostTier(tmp_path / "a" / "b" / "c" / "d", snapshots=tmp_path / "s", writer="w")
    folder = (tmp_path / "a" / "b" / "c" / "d" / "x").parents[above]
    folder.chmod(0o777)
    with pytest.raises(Denied, match="other users"):
        asyncio.run(tier.own())
    folder.chmod(0o1777)  # sticky, as /dev/shm is: nobody else renames or deletes what is ours
    asyncio.run(tier.own())


# ---- the durable tier --------------------------------------------------------------------------


def test_a_save_for_which_there_is_no_room_is_refused_before_any_rank_begins(
    tmp_path: Path,
) -> None:
    tier = tier_in(tmp_path)
    store = tier.store("train-0", 1)
    order = tm.SaveOrder(
        epoch=1, id="1", wpg="train-0", incarnation=1, deployment="a", progress=(1, 0)
    )
    with pytest.raises(StorageFull, match="free space there"):
        asyncio.run(tier.begin_save(order, out=1 << 60))
    assert store.next_slot() == 0
    assert asyncio.run(tier.begin_save(order, out=1)).slot == 0


def test_a_durable_image_that_the_file_system_does_not_give_fails_one_switch_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(*_: object, **_more: object) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    tier = tier_in(tmp_path)
    tier.store("train-0", 1)
    monkeypatch.setattr(durable, "read_image", stale)
    with pytest.raises(BadImage, match="Stale file handle"):
        asyncio.run(tier.fetch(switch_order(tmp_path)))
    assert tier.store("train-0").begin() == 0  # the slot is free again


def test_copies_of_one_deployment_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, real, under_way = tier_in(tmp_path), durable.write_image, 0

    def slow(*arguments: Any, **named: Any) -> Any:
        nonlocal under_way
        under_way += 1
        most.append(under_way)
        asyncio.run(asyncio.sleep(0.02))
        try:
            return real(*arguments, **named)
        finally:
            under_way -= 1

    most: list[int] = []
    monkeypatch.setattr(durable, "write_image", slow)
    with_image(tier)

    async def both() -> None:
        order = persist_order(tmp_path)
        await asyncio.gather(tier.persist(order), tier.persist(order))

    asyncio.run(both())
    assert most == [1, 1]
    assert (durable.folder_of(tmp_path / "durable", "a", (7, 1)) / "manifest.json").exists()


# ---- garbage -----------------------------------------------------------------------------------


def test_a_daemon_that_starts_deletes_what_belongs_to_nobody(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    for name in ("s1-1.train.0", "s1-9.train.0"):
        (settings.durable_dir / name / "000000001.0000").mkdir(parents=True)
    settings.snapshots_dir.mkdir()
    kept = {"live.v1.safetensors", ".live.v2.safetensors.h1.0.n1.5.part"}
    gone = {"old.v1.safetensors", ".old.v2.safetensors.h1.0.n1.5.part"}
    for name in kept | gone:
        (settings.snapshots_dir / name).write_bytes(b"x")
    shared_tier.sweep(settings, deployments=["s1-1:train:0"], snapshots=["live.v1", "live.v2"])
    assert [path.name for path in settings.durable_dir.iterdir()] == ["s1-1.train.0"]
    assert {path.name for path in settings.snapshots_dir.iterdir()} == kept


Scene = Callable[[World], Coroutine[Any, Any, None]]


def play(folder: Path, scene: Scene) -> None:
    async def whole() -> None:
        async with world_in(folder) as world:
            await scene(world)

    asyncio.run(whole())


def test_an_image_that_was_copied_while_its_deployment_was_dropped_goes_too(
    tmp_path: Path,
) -> None:
    async def scene(world: World) -> None:
        daemon = await world.daemon()
        folder = durable.folder_of(world.settings.durable_dir, "s1-1:train:0", (3, 0))
        folder.mkdir(parents=True)
        done = tm.Done(
            number=1,
            wpg="train-0",
            order="1",
            what="persist",
            ok=True,
            deployment="s1-1:train:0",
            progress=(3, 0),
        )
        daemon.service.image_persisted(done)
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not folder.parent.exists():
                break
        assert not folder.parent.exists()

    play(tmp_path, scene)


# ---- folders of dead runs, and too small ones --------------------------------------------------


def left_by(folder: Path, name: str) -> Path:
    """What an agent leaves that was killed."""
    left = folder / "host" / "n1" / name
    left.mkdir(parents=True)
    (left / "agent.lock").touch()
    (left / "slab").write_bytes(b"x")
    return left


def test_only_what_is_certainly_a_dead_agents_is_cleaned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, living = left_by(tmp_path, "h1.0"), left_by(tmp_path, "h2.0")
    foreign, unlocked = left_by(tmp_path, "h3.0"), left_by(tmp_path, "h4.0")
    (unlocked / "agent.lock").unlink()
    os.chown(foreign, 65534, 65534)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "agent.lock").touch()
    link = tmp_path / "host" / "n1" / "h5.0"
    link.symlink_to(elsewhere)
    linked = left_by(tmp_path, "h6.0")
    (linked / "agent.lock").unlink()
    (linked / "agent.lock").symlink_to(elsewhere / "agent.lock")
    mine = left_by(tmp_path, "mine")
    said: list[str] = []
    with (living / "agent.lock").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        folders.tidy_siblings(mine, say=said.append)
    assert said == [str(dead)]
    assert not dead.exists()
    kept = (living, foreign, unlocked, elsewhere, link, linked, mine)
    assert all(folder.exists() for folder in kept)


def test_a_tmpfs_that_can_never_hold_what_it_is_to_hold_is_said(tmp_path: Path) -> None:
    small = HostTier(tmp_path / "host", snapshots=None, writer="w", host_bytes=1 << 60)
    asyncio.run(small.own())
    assert "and host_bytes is 1073741824.00 GiB: mount it larger" in small.stock().trouble
    fits = HostTier(tmp_path / "other", snapshots=None, writer="w", host_bytes=1 << 20)
    asyncio.run(fits.own())
    assert fits.stock().trouble == ""


def test_slabs_of_a_wpg_that_is_no_more_give_their_memory_back(tmp_path: Path) -> None:
    store = tier_in(tmp_path).store("train-0", 1)
    slot = store.begin()
    write(store.paths(slot)[0], msgspec.structs.replace(make_header(8), world=1), 7)
    again = tier_in(tmp_path)
    again.forget_idle([])
    assert len(again.images()) == 1, "it has an image"
    again.keep_only(deployments=[], snapshots=[])
    again.forget_idle(["train-0"])
    assert list((tmp_path / "host").rglob("slot-*")), "it runs, and its slabs stay warm"
    again.forget_idle([])
    assert not list((tmp_path / "host").rglob("slot-*"))


def test_equal_weights_of_two_snapshots_leave_memory_with_the_last(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, shared=False)
    first, second = tier.snapshots.path("a.v1"), tier.snapshots.path("b.v1")
    first.write_bytes(b"12345678")
    contents.remember(first, 1)
    assert contents.link(second, 1)
    assert sorted(tier.snapshots.names()) == ["a.v1", "b.v1"]
    tier.drop(tm.DropOrder(epoch=1, deployments=[], snapshots=["a.v1"]))
    assert second.read_bytes() == b"12345678" and not first.exists()
    tier.keep_only(deployments=[], snapshots=[])
    assert not list(tier.snapshots.published.glob("**/*.safetensors"))

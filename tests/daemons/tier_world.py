"""The tiers of one agent, driven as an agent drives them, by a random program on a faulty disk.

Threads run one disk step at a time, when the program lets them: a run is the same whenever its
seed is. A model knows which images were reported complete, and what they contain.
"""

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.errors import PlexError
from plexrl_slurm.daemons import host_room
from plexrl_slurm.daemons.host_tier import HostTier, Passage
from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.memory import disk as seam
from plexrl_slurm.memory import durable, files, nvme, sums
from plexrl_slurm.memory.slab import Slab, SlabHeader, SlabTensor, read_header
from plexrl_slurm.transport import messages as tm
from tests.daemons.tier_threads import AtOnce, Inline, Worker
from tests.memory.faults import FaultyDisk, Stopped

WPG, WORLD, SIZE, SLAB = "train-0", 2, 20_000, 6 * 4096
IMAGE = WORLD * SLAB
Progress = tuple[int, int]
#: Of the event loop, until everything has ended: some hundreds are usual.
_MOST_TURNS = 200_000


def content(deployment: str, progress: Progress, rank: int) -> bytes:
    """What an image of this progress contains: a replay makes the same."""
    seed = blake2b(repr((deployment, tuple(progress), rank)).encode(), digest_size=50).digest()
    return seed * (SIZE // len(seed))


class World:
    """One agent's tiers, its ranks, and the daemon's knowledge of them."""

    def __init__(self, root: Path, seed: int, *, slots: int = 4, copies: int = 8) -> None:
        self.rng, self.root, self.seed = random.Random(seed), root, seed
        self.disk = FaultyDisk(rng=self.rng, memory=root / "host")
        self._threads: dict[int, Worker] = {}
        self.disk.pause = self._pause
        self._slots, self._copies = slots, copies
        #: Progress that was reported complete, by deployment; a dropped one is not there.
        self.complete: dict[str, Progress | None] = {}
        self.durable: dict[str, Progress] = {}
        self.resident, self.position, self.dirty = "", (0, 0), False
        self._tasks: set[asyncio.Task[None]] = set()
        self.lane, self._number = asyncio.Lock(), 0
        #: The agent has begun.
        self.serving = False
        #: Copies to the durable tier are under way.
        self.persisting: set[str] = set()
        #: How many images of a deployment were damaged in memory, which has been told to nobody. An
        #: older one may come to light when the newest has been given up.
        self.flipped: Counter[str] = Counter()
        self.flips = 0
        #: What the daemon heard of damage.
        self.told: list[str] = []
        self.loads = self.restarts = self.cuts = self.overs = 0
        #: The most bytes of host memory that slabs ever had, at any step of a disk.
        self.most_bytes = 0
        (root / "durable").mkdir(parents=True)

    # -- the machine -------------------------------------------------------------------------
    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have the tiers use this disk and these threads."""
        monkeypatch.setattr(seam, "disk", self.disk)
        for module, name in ((nvme, "BLOCK"), (sums, "BLOCK"), (files, "CHUNK")):
            monkeypatch.setattr(module, name, 8192)
        monkeypatch.setattr(nvme, "_each", lambda work, blocks: [work(each) for each in blocks])
        monkeypatch.setattr(nvme, "ThreadPoolExecutor", AtOnce)
        monkeypatch.setattr(asyncio, "to_thread", self._to_thread)
        monkeypatch.setattr(host_room, "REST_US", 0)

    def _pause(self) -> None:
        folder = self.root / "host"
        slabs = [path.stat().st_size for path in folder.rglob("slot-*") if path.exists()]
        self.most_bytes = max(self.most_bytes, sum(slabs))
        worker = self._threads.get(threading.get_ident())
        if worker is not None:
            worker.pause()

    async def _to_thread(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        worker = Worker(lambda: function(*args, **named), self._threads)
        try:
            while not worker.future.done():
                for _ in range(self.rng.choice((0, 0, 0, 1, 3))):
                    await asyncio.sleep(0)
                worker.advance()
        except asyncio.CancelledError:
            while not worker.future.done():  # the thread goes on, whoever waits for it
                worker.advance()
            worker.future.exception()
            raise
        return worker.future.result()

    async def start(self) -> None:
        """Another process of the agent, on what is on the disks."""
        self.serving = False
        while True:
            self.disk.dead = False
            self.tier = HostTier(
                self.root / "host" / "n1" / "h1.0",
                snapshots=self.root / "snapshots",
                writer=f"w{self.restarts}",
                nvme=NvmeTier(
                    self.root / "nvme" / "n1" / "h1.0", limit=self._copies * IMAGE, shared=True
                ),
                host_bytes=self._slots * IMAGE,
            )
            assert self.tier._nvme is not None
            self.tier._nvme._sweeper = Inline()  # type: ignore[assignment]
            try:
                await self.tier.own()
                self.tier.store(WPG, WORLD)
                self.tier.keep_only(deployments=list(self.complete), snapshots=[])
            except (Stopped, OSError):
                self._release()  # the hold's script starts another
                self.restarts += 1
                continue
            break
        self.serving = True
        self.lane = asyncio.Lock()
        self.resident, self.dirty = "", False
        self.check()

    def _release(self) -> None:
        """What the end of a process does."""
        assert self.tier._nvme is not None
        for owner in (self.tier, self.tier._nvme):
            if owner._lock is not None:
                os.close(owner._lock)

    async def end(self) -> None:
        """The process dies now, whatever it was doing."""
        self.disk.dead = True
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            if outcome is not None and not isinstance(outcome, Stopped | asyncio.CancelledError):
                raise outcome
        self._tasks.clear()
        self._release()
        self.restarts += 1

    async def restart(self) -> None:
        """It dies and comes back."""
        await self.end()
        await self.start()

    async def flip(self) -> None:
        """The agent dies, and a bit of an image that has checksums flips before the next comes."""
        await self.settle()
        store = self.tier.store(WPG)
        summed = [each for each in store.held() if store.is_summed(each.slot)]
        await self.end()
        if summed:
            held = self.rng.choice(sorted(summed, key=lambda each: each.slot))
            with self.rng.choice(store.paths(held.slot)).open("r+b") as slab:
                slab.seek(4096 + self.rng.randrange(SIZE))
                (byte,) = slab.read(1)
                slab.seek(-1, 1)
                slab.write(bytes([byte ^ 4]))
            self.flips += 1
            self.flipped[held.deployment] += 1
            if held.deployment in self.complete:
                self.complete[held.deployment] = self.durable.get(held.deployment)
        await self.start()

    async def cut_power(self) -> None:
        """The node dies, and with it what was in memory; the partition has the durable tier."""
        await self.end()
        self.disk.cut_power()
        self.cuts += 1
        for name in self.complete:
            self.complete[name] = self.durable.get(name)
        await self.start()
        assert self.tier.images() == []

    # -- events ------------------------------------------------------------------------------
    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def turn(self) -> None:
        """Let everything go on a little; a task that failed fails the test."""
        for _ in range(self.rng.randint(0, 12)):
            await asyncio.sleep(0)
        await self._reap()

    async def settle(self) -> None:
        """Until nothing is under way."""
        await self._reap()
        for _ in range(_MOST_TURNS):
            if not self._tasks:
                return
            await asyncio.sleep(0)
            await self._reap()
        for task in self._tasks:
            task.print_stack()
        raise AssertionError(f"{len(self._tasks)} tasks wait for ever; seed {self.seed}")

    async def _reap(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            try:
                await task
            except Stopped:
                assert self.disk.dead
        if self.disk.dead:
            await self.restart()

    def create(self) -> str:
        """A deployment that is on the device and in no image; what was there was clean."""
        self._number += 1
        name = f"d{self._number}"
        self.complete[name] = None
        self.resident, self.position, self.dirty = name, (1, 0), True
        return name

    async def save(self) -> None:
        """An image of the resident."""
        async with self.lane:
            name, progress = self.resident, self.position
            if not name:
                return
            order = tm.SaveOrder(
                epoch=1, id="1", wpg=WPG, incarnation=1, deployment=name, progress=progress,
                replaceable=self._replaceable(name),
            )  # fmt: skip
            self.tier.returns(name)
            passage = await self.tier.begin_save(order)
            self._note_over(name)
            await self._pass(passage, name, progress)

    async def switch(self, incoming: str) -> None:
        """Bring it in; the resident is written out if it is dirty."""
        async with self.lane:
            if incoming not in self.complete or incoming == self.resident:
                return
            outgoing, progress = (self.resident if self.dirty else ""), self.position
            known = self.durable.get(incoming)
            at_least, faults = self.complete[incoming], self.disk.faults
            order = tm.SwitchOrder(
                epoch=1, id="1", wpg=WPG, incarnation=1, incoming=incoming, outgoing=outgoing,
                progress=progress, durable_progress=known or (0, 0),
                durable_path=str(self._durable(incoming, known)) if known else "",
                replaceable=self._replaceable(outgoing),
            )  # fmt: skip
            self.tier.returns(incoming)
            try:
                passage = await self.tier.begin_switch(order)
            except PlexError as problem:
                if incoming in self.complete and self.disk.faults == faults:
                    raise AssertionError(f"a switch failed without a fault: {problem}") from problem
                return
            self._note_over(outgoing)
            self._fell_back(incoming, passage.left if passage is not None else None, faults)
            at_least = self.complete.get(incoming, at_least)
            if passage is None or passage.held is None:
                assert at_least is None or incoming not in self.complete, f"{incoming} is lost"
                return
            for rank, path in enumerate(passage.loads):
                found = loaded(path, incoming, rank)
                assert at_least is None or found >= at_least, f"{incoming} is older than reported"
                assert found == passage.held.progress
            self.resident = ""
            await self._pass(passage, outgoing, progress)
            self.loads += 1
            if incoming in self.complete:  # else its slab may be gone by now
                found = loaded(passage.loads[0], incoming, 0)  # nobody wrote it meanwhile
                self.resident, self.position, self.dirty = incoming, found, False

    def _replaceable(self, name: str) -> bool:
        """What the daemon says: a durable image is written down, and no other is under way."""
        return name in self.durable and name not in self.persisting

    def _note_over(self, name: str) -> None:
        """If an image is being written over, the durable one is what is certain."""
        if name in self.complete and self.tier.store(WPG).is_under(name):
            self.complete[name] = self.durable[name]
            self.overs += 1

    async def _pass(self, passage: Passage, outgoing: str, progress: Progress) -> None:
        """What the ranks do; then the agent notes it."""
        ok = False
        try:
            for rank, path in enumerate(passage.saves):
                await self._write(path, outgoing, progress, rank)
            await asyncio.sleep(0)
            ok = self.rng.random() < 0.95
        except OSError:
            pass
        finally:
            if not self.disk.dead:
                self.tier.end(passage, outgoing, progress, ok=ok)
                self.tier.drop_again(quiet=True)
        if ok and outgoing in self.complete and passage.saves:
            before = self.complete[outgoing]
            self.complete[outgoing] = max(progress, before or progress)
            if self.resident == outgoing:
                self.dirty = self.position != progress

    async def _write(self, path: Path, deployment: str, progress: Progress, rank: int) -> None:
        slab = Slab(path)
        placed = slab.write(
            SlabHeader(
                deployment=deployment, progress=progress, rank=rank, world=WORLD,
                architecture="tiny", tensors=(SlabTensor("t", "bytes", (SIZE,), SIZE),),
            )
        )  # fmt: skip
        (view,) = slab.views(placed.tensors)
        data = content(deployment, progress, rank)
        for at in (0, SIZE // 2):
            view[at : at + SIZE // 2] = data[at : at + SIZE // 2]
            await asyncio.sleep(0)
            if self.disk.dead:
                raise Stopped
        slab.commit()

    def expect(self, name: str) -> None:
        """The scheduler's hint; the agent prepares while nothing moves."""
        order = tm.ExpectOrder(epoch=1, wpg=WPG, deployment=name)
        self.spawn(self.tier.expect(order, quiet=lambda: not self.lane.locked()))

    async def scrub(self) -> None:
        """Read a copy again, as if its time had come; nothing is damaged here."""
        assert self.tier._scrubber is not None
        self.tier._scrubber._every_us = 1
        await self.tier._scrubber.once(now_us() + 1_000_000_000)

    def step(self) -> None:
        """The resident learns."""
        if self.resident:
            seq, part = self.position
            self.position = (seq, part + 1) if self.rng.random() < 0.3 else (seq + 1, 0)
            self.dirty = True

    def _durable(self, name: str, progress: Progress) -> Path:
        return durable.folder_of(self.root / "durable", name, progress)

    async def persist(self, name: str) -> None:
        """Copy its image to the durable tier."""
        known, faults = self.durable.get(name), self.disk.faults
        here = any(image.deployment == name for image in self.tier.images())
        order = tm.PersistOrder(
            epoch=1, id="1", wpg=WPG, deployment=name, folder=str(self.root / "durable"),
            known=known,
        )  # fmt: skip
        self.persisting.add(name)
        try:
            found = await self.tier.persist(order)
        except (PlexError, KeyError, OSError) as problem:
            if here and name in self.complete and self.disk.faults == faults:
                raise AssertionError(f"a copy failed without a fault: {problem}") from problem
            return
        finally:
            self.persisting.discard(name)
        self._fell_back(name, found.left, faults)
        if name in self.complete and found.held is not None:
            self.durable[name] = max(found.held.progress, known or found.held.progress)

    def _fell_back(self, name: str, left: tm.ImagesLeft | None, faults: int) -> None:
        """A disk that does not give an image, asked twice, has lost it: the daemon is told."""
        if left is not None and left.damaged and name in self.complete:
            assert self.flipped[name] or self.disk.faults > faults + 1, (
                f"given up without two faults: {left.damaged}"
            )
            self.flipped[name] -= self.flipped[name] > 0
            self.told += left.damaged
            self.complete[name] = left.image
            if left.durable is None:
                self.durable.pop(name, None)
            else:
                self.durable[name] = left.durable

    def drop(self, name: str) -> None:
        """Its job ended."""
        self.complete.pop(name, None)
        self.durable.pop(name, None)
        if self.resident == name:
            self.resident, self.dirty = "", False
        with suppress(Stopped):
            self.tier.drop(tm.DropOrder(epoch=1, deployments=[name], snapshots=[]))

    # -- what must be so ---------------------------------------------------------------------
    def check(self) -> None:
        """Everything that was reported complete is there, or newer."""
        there = {image.deployment: image.progress for image in self.tier.images()}
        for name, progress in self.complete.items():
            best = max((p for p in (there.get(name), self.durable.get(name)) if p), default=None)
            assert progress is None or (best is not None and best >= progress), (
                f"{name}: {progress} was reported complete, and {best} is there"
            )

    async def audit(self) -> None:
        """At the end, with a disk that works: all can be loaded, and nothing is left over."""
        self.disk.fault = lambda _step, _kind: ""
        await self.settle()
        assert not self.disk.dead
        for name in list(self.complete):
            await self.switch(name)
        self.check()
        store, room, below = self.tier.store(WPG), self.tier._room, self.tier._nvme
        assert room is not None and below is not None
        assert not store._writing and not store._pinned and not room._promised
        assert room.prefetcher._key is None
        await self.restart()
        below = self.tier._nvme
        assert below is not None
        assert {each.deployment for each in self.tier.images()} <= set(self.complete)
        slabs = sum(path.stat().st_size for path in below._images.rglob("*.slab"))
        assert slabs == below.used <= below.limit
        assert not [path for path in (self.root / "nvme").rglob(".*") if path.name != "agent.lock"]
        for name, progress in self.durable.items():
            folder = self._durable(name, progress)
            spare = [self.root / "host" / f"check-{rank}" for rank in range(WORLD)]
            assert durable.read_image(folder, spare).progress == progress
            for rank, path in enumerate(spare):
                assert loaded(path, name, rank) == progress
                path.unlink()
        await self.end()


def loaded(path: Path, deployment: str, rank: int) -> Progress:
    """Progress of a slab whose content must be what was saved at it."""
    header = read_header(path)
    assert (header.deployment, header.rank) == (deployment, rank)
    slab = Slab(path)
    (view,) = slab.views(slab.read().tensors)
    seq, part = header.progress
    assert bytes(view) == content(deployment, (seq, part), rank), f"{path} is wrong"
    return seq, part

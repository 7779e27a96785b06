"""Durable images are read again: damage is set aside, told, and made good by another copy."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plexrl_slurm.clock import now_us
from plexrl_slurm.core.ids import DeploymentId
from plexrl_slurm.core.messages import DurableLost
from plexrl_slurm.daemons import durable_scrubber
from plexrl_slurm.daemons.durable_scrubber import DurableScrubber
from plexrl_slurm.daemons.orders import Durable
from plexrl_slurm.memory import durable
from tests.memory.test_slab import make_header, write

DAY_US = 86_400_000_000
A = DeploymentId("a")


class Daemon:
    """Of a daemon, what it uses."""

    def __init__(self, folder: Path, *seqs: int) -> None:
        self.home = folder / "durable" / "a"
        for seq in seqs:
            slab = folder / "slab"
            write(slab, make_header(9000), seq)
            image = durable.folder_of(folder / "durable", "a", (seq, 0))
            durable.write_image(image, [slab], writer="w")
        self.fed: list[Any] = []
        self.written: list[Any] = []
        self.told: list[dict[str, Any]] = []
        path = str(durable.folder_of(folder / "durable", "a", (seqs[-1], 0)))
        spare = (seqs[-2], 0) if len(seqs) > 1 else None
        known = {A: Durable(progress=(seqs[-1], 0), path=path, spare=spare)}
        self.shell = SimpleNamespace(durable=known, deployments={A: None}, feed=self.fed.append)
        live = SimpleNamespace(job=1, dropped=False)
        parts: Any = SimpleNamespace(
            settings=SimpleNamespace(scrub_days=3, durable=True),
            shell=self.shell,
            state=SimpleNamespace(deployments={A: live}),
            writer=SimpleNamespace(add=lambda *what, lazy=False: self.written.append(what)),
        )
        self.scrubber = DurableScrubber(parts, found=self.told.append)

    def flip(self, seq: int) -> None:
        slab = self.home / f"{seq:09d}.0000" / "rank-0.slab"
        with slab.open("r+b") as file:
            file.seek(5000)
            file.write(b"!")

    async def scrub(self, days: float) -> int:
        read = 0
        while await self.scrubber.once(now_us() + int(days * DAY_US)):
            read += 1
        return read


def test_each_image_is_read_once_in_its_time_and_nobody_is_told(tmp_path: Path) -> None:
    async def scene() -> None:
        daemon = Daemon(tmp_path, 1, 2)
        assert await daemon.scrub(2) == 0
        assert await daemon.scrub(4) == 2
        assert await daemon.scrub(4) == 0
        assert not daemon.fed and not daemon.told

    asyncio.run(scene())


def test_a_damaged_image_is_set_aside_and_the_one_before_it_counts(tmp_path: Path) -> None:
    async def scene() -> None:
        daemon = Daemon(tmp_path, 1, 2)
        daemon.flip(2)
        await daemon.scrub(4)
        assert sorted(path.name for path in daemon.home.iterdir()) == [
            "000000001.0000", "damaged-000000002.0000",
        ]  # fmt: skip
        assert daemon.shell.durable[A].progress == (1, 0)
        assert daemon.shell.durable[A].path.endswith("000000001.0000")
        (event,) = daemon.fed
        assert isinstance(event, DurableLost)
        assert (event.durable, event.spare) == ((1, 0), None)
        (told,) = daemon.told
        assert (told["id"], told["seq"]) == ("a", 2) and "damaged-" in told["aside"]
        assert len(daemon.written) == 2

    asyncio.run(scene())


@pytest.mark.parametrize("seqs", [(1,), (1, 2)], ids=["the only one", "the one before"])
def test_what_is_left_after_another_one_is_known(tmp_path: Path, seqs: tuple[int, ...]) -> None:
    async def scene() -> None:
        daemon = Daemon(tmp_path, *seqs)
        daemon.flip(1)
        await daemon.scrub(4)
        (event,) = daemon.fed
        left = (2, 0) if len(seqs) > 1 else None
        assert (event.durable, event.spare) == (left, None)
        known = daemon.shell.durable.get(A)
        assert (known.progress if known else None) == left

    asyncio.run(scene())


def test_a_file_system_that_is_not_there_sets_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        daemon = Daemon(tmp_path, 1)
        real = durable_scrubber._ages

        def gone(known: Any) -> Any:
            found = real(known)
            if daemon.home.parent.exists():
                daemon.home.parent.rename(tmp_path / "elsewhere")
            return found

        monkeypatch.setattr(durable_scrubber, "_ages", gone)
        assert await daemon.scrubber.once(now_us() + 4 * DAY_US)
        assert not daemon.fed and not daemon.told
        assert A in daemon.shell.durable

    asyncio.run(scene())


def test_an_end_of_the_daemon_ends_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable_scrubber, "SHARE", 1e-6)  # it would take for ever

    async def scene() -> None:
        daemon = Daemon(tmp_path, 1)
        reading = asyncio.create_task(daemon.scrub(4))
        await asyncio.sleep(0.3)
        assert not reading.done()
        reading.cancel()

    asyncio.run(asyncio.wait_for(scene(), 20))

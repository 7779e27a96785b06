"""What one daemon leaves in state_dir for the next."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from plexrl_slurm.core.errors import Denied
from plexrl_slurm.daemons import partitiond
from plexrl_slurm.settings import Settings


def settings(folder: Path, port: int = 0, partition: str = "rlvr") -> Settings:
    return Settings(
        partition=partition,
        state_dir=folder,
        database_url="",
        host_dir=folder,
        host_bytes=1,
        listen_port=port,
    )


def test_the_next_daemon_has_the_port_of_the_last_one_unless_one_is_configured(
    tmp_path: Path,
) -> None:
    assert partitiond._port(settings(tmp_path)) == 0
    partitiond._remember_port(settings(tmp_path), 4321)
    assert partitiond._port(settings(tmp_path)) == 4321
    assert partitiond._port(settings(tmp_path, 99)) == 99


@pytest.mark.parametrize("left", ["", "43x"])
def test_a_port_that_was_cut_off_by_a_full_disk_keeps_no_daemon_from_starting(
    tmp_path: Path, left: str
) -> None:
    (tmp_path / "api.port").write_text(left)
    assert partitiond._port(settings(tmp_path)) == 0


def test_a_full_disk_does_not_cost_the_port_that_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitiond._remember_port(settings(tmp_path), 4321)

    def full(self: Path, *_: Any, **__: Any) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    partitiond._remember_port(settings(tmp_path), 5555)
    assert partitiond._port(settings(tmp_path)) == 4321


def test_a_state_dir_is_one_partitions(tmp_path: Path) -> None:
    for _ in range(2):
        os.close(partitiond.lock(settings(tmp_path)))
    said = (tmp_path / "partitiond.pid").read_text()
    with pytest.raises(Denied, match="is the state_dir of partition 'rlvr': give 'other' one"):
        partitiond.lock(settings(tmp_path, partition="other"))
    assert (tmp_path / "partitiond.pid").read_text() == said == f"{os.getpid()}\n"
    (tmp_path / "partition").unlink()
    os.close(partitiond.lock(settings(tmp_path, partition="other")))

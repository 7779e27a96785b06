"""A rank that does not see its GPUs says so instead of using the CPU."""

from pathlib import Path

import pytest

from plexrl_slurm.core.errors import BadInput
from plexrl_slurm.engines.gpus import check_gpus

SLURM = {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "0,1", "SLURMD_NODENAME": "gpu-3"}


def test_fewer_than_slurm_gave_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"gave 2 GPUs on gpu-3 and torch \(CUDA 12\.8\) sees 1"):
        check_gpus(environment=SLURM, cuda="12.8", seen=1, driver=tmp_path / "none")
    check_gpus(environment=SLURM, cuda="12.8", seen=2, driver=tmp_path / "none")


def test_a_torch_for_the_cpu_is_refused_where_there_are_gpus(tmp_path: Path) -> None:
    driver = tmp_path / "nvidiactl"
    check_gpus(environment=SLURM, cuda=None, seen=0, driver=driver)
    driver.touch()
    with pytest.raises(BadInput, match="built for the CPU only"):
        check_gpus(environment=SLURM, cuda=None, seen=0, driver=driver)


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": "0"}, {"SLURM_JOB_ID": "1"}])
def test_without_slurms_gpus_nothing_is_asked(environment: dict[str, str], tmp_path: Path) -> None:
    check_gpus(environment=environment, cuda="12.8", seen=0, driver=tmp_path)

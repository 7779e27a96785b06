"""A world for the contract that is a file (see fake_slurm.py)."""

import json
import sys
from pathlib import Path
from typing import Any

from plexrl_slurm.core.ids import SlurmId
from plexrl_slurm.slurm.port import ClusterPort
from tests.slurm import fake_slurm
from tests.slurm.fake_slurm import FakeSlurm

RECORDED = Path(__file__).parent / "recorded" / "22.05-port"
PROGRAMS = ("sbatch", "scontrol", "scancel", "squeue", "sinfo", "sacct", "sacctmgr")


def make_fake(folder: Path) -> FakeSlurm:
    """The recorded nodes, no jobs yet, and Slurm's programs in ``folder/bin``."""
    jobs = json.loads((RECORDED / "squeue.json").read_bytes())["jobs"]
    blank = next(job for job in jobs if job["job_id"] == 6)
    blank |= {"tres_req_str": "", "priority": 1, "state_reason": "Priority"}
    state: dict[str, Any] = {
        "blank": blank,
        "jobs": [],
        "records": [],
        "nodes": json.loads((RECORDED / "sinfo.json").read_bytes())["nodes"],
    }
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    source = Path(fake_slurm.__file__).read_text(encoding="utf-8")
    (folder / "bin").mkdir()
    for name in PROGRAMS:
        program = folder / "bin" / name
        program.write_text(f"#!{sys.executable} -IS\n{source}", encoding="utf-8")
        program.chmod(0o755)
    return FakeSlurm(folder)


class FakeWorld:
    """A faked Slurm and an adapter on it; user and service are the same."""

    def __init__(self, fake: FakeSlurm, port: ClusterPort) -> None:
        self.fake, self.user, self.service = fake, port, port
        self.name, self.folder = "plxalice", fake.folder

    def heterogeneous(self) -> SlurmId:
        """A running job of two components."""
        runs = {"job_state": "RUNNING", "start_time": 1_796_001_832, "nodes": "n1"}
        first = self.fake.submit(**runs, tres_alloc_str="cpu=1,gres/gpu=1")
        second = self.fake.submit(**runs, tres_alloc_str="cpu=1,gres/gpu=2,gres/gpu:h200=2")
        with self.fake.state() as state:
            for offset, number in enumerate((first, second)):
                entry = next(job for job in state["jobs"] if str(job["job_id"]) == number)
                entry.update(het_job_id=int(first), het_job_offset=offset)
        return SlurmId(first)

    def silence(self) -> None:
        """Every program says that slurmctld does not answer."""
        self.set_mode("down")

    def answer_again(self) -> None:
        """Until here."""
        self.set_mode("")

    def set_mode(self, mode: str) -> None:
        """What programs do instead of answering; "" for nothing."""
        (self.fake.folder / "mode").write_text(mode, encoding="utf-8")

    def calls(self, program: str) -> list[list[str]]:
        """Arguments of each call of ``program``."""
        return [words[1:] for words in self.fake.calls() if words[0] == program]

"""What an agent is told at its start, by the hold's script and by Slurm."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from plexrl_slurm.daemons.nvme_tier import NvmeTier
from plexrl_slurm.daemons.part_tier import PartTier


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """What the hold's script tells an agent (JSON)."""

    agent: str
    hold: str
    node: str
    endpoint: str
    state_dir: str
    #: Folder on a tmpfs for images and snapshots of this partition.
    host_dir: str
    #: Folder for snapshots that all agents share; "": each has its own, on its tmpfs.
    snapshots_dir: str = ""
    #: Bytes that images and snapshots may take in host_dir; with NVMe, the agent keeps to them.
    host_bytes: int = 0
    #: Folder on a disk of the node for images that do not fit; "": there is none.
    nvme_dir: str = ""
    nvme_bytes: int = 0
    #: A copy there is read again after so many days; 0: never.
    scrub_days: int = 0
    #: Component of the hold that the node belongs to.
    component: int = 0
    #: How often Slurm had requeued the hold.
    restarts: int = 0

    @property
    def snapshots(self) -> Path | None:
        """The shared folder, if there is one."""
        return Path(self.snapshots_dir) if self.snapshots_dir else None

    @property
    def homes(self) -> list[Path]:
        """Folders that this agent alone owns."""
        return [Path(folder) for folder in (self.host_dir, self.nvme_dir) if folder]

    def tier(self, writer: str) -> PartTier:
        """The host tier, and what lies below it."""
        return PartTier(
            Path(self.host_dir),
            snapshots=self.snapshots,
            writer=writer,
            nvme=self.nvme,
            host_bytes=self.host_bytes,
            scrub_days=self.scrub_days,
        )

    @property
    def nvme(self) -> NvmeTier | None:
        """The tier below the host tier, if there is one."""
        if not self.nvme_dir:
            return None
        shared = bool(self.snapshots_dir)
        return NvmeTier(Path(self.nvme_dir), limit=self.nvme_bytes, shared=shared)

    @classmethod
    def read(cls, path: Path) -> "AgentConfig":
        """The file; where it names no node, Slurm's word for this one, which has its own folder."""
        config = cls(**json.loads(path.read_text(encoding="utf-8")))
        if config.node:
            return config
        node, component = os.environ["SLURMD_NODENAME"], int(os.environ["PLEXRL_COMPONENT"])
        own = Path(node) / f"{config.hold}.{component}"
        return replace(
            config,
            nvme_dir=str(Path(config.nvme_dir) / own) if config.nvme_dir else "",
            node=node,
            component=component,
            restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            agent=f"{config.hold}.{component}.{node}",
            host_dir=str(Path(config.host_dir) / own),
        )


def visible_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """What Slurm put into CUDA_VISIBLE_DEVICES; ``None`` without Slurm's GPUs."""
    if "SLURM_JOB_ID" not in environment or "CUDA_VISIBLE_DEVICES" not in environment:
        return None
    return [each for each in environment["CUDA_VISIBLE_DEVICES"].split(",") if each]


def devices_of(wanted: Sequence[int], gpus: Sequence[str] | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of a WPG, "" to leave it alone; ``None`` if they are not there."""
    if gpus is None or not wanted:
        return ""
    return ",".join(gpus[each] for each in wanted) if max(wanted) < len(gpus) else None

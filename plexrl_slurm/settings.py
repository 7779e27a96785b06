"""The partition's configuration: one frozen value, read once at the edge, unknown keys refused.

Precedence: command-line flag, then ``PLEXRL_*`` environment, then the TOML file, then the
default. ``read`` (this module's only I/O) also looks at the model folders, so that the
catalogue it returns carries real sizes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from plexrl_slurm.core.catalogue import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class WpgSettings:
    """One ``[[wpg]]`` table: ``count`` equal WPGs named ``<pool>-0``, ``<pool>-1``, …"""

    #: ``train`` or ``rollout``.
    pool: str
    #: ``deepspeed``, ``vllm``, ``fake_train`` or ``fake_sample``.
    engine: str
    #: GPUs (CPU-only machines: slots) of each.
    gpus: int = 1
    count: int = 1
    #: CPU cores for each WPG in turn: ``[[0], [1]]``; empty: anywhere.
    cores: tuple[tuple[int, ...], ...] = ()
    #: Engine options: deepspeed ``zero_stage`` (1 or 2), ``max_tokens_per_microbatch``; vllm
    #: ``kv_cache_bytes``, ``max_num_seqs``, ``prefix_caching``, ``block_size``.
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one partition."""

    #: ``[partition]``: what users write after ``-p``.
    partition: str
    #: Spool, sockets, logs, checkpoints; absolute.
    state_dir: Path
    #: SQLAlchemy URL.
    database_url: str
    #: Host-memory tier: a folder on a tmpfs; absolute.
    host_dir: Path
    #: Bytes that images and snapshots may take there.
    host_bytes: int
    #: TCP address of the API, for controllers.
    listen_host: str = "127.0.0.1"
    listen_port: int = 8421
    #: ``hrrs``, ``fifo``, ``drain_first`` or ``round_robin``.
    policy: str = "hrrs"
    #: Longest anticipatory hold.
    hold_us: int = 2_000_000
    #: Optimizer steps between two host images of a deployment that is never switched out.
    image_every: int = 10
    #: A training call of more tokens than this is run in parts.
    max_part_tokens: int = 16_384
    #: A session without a heartbeat for so long is over.
    session_timeout_us: int = 120_000_000
    #: ``[hold] backend``: ``local`` or ``slurm``.
    backend: str = "local"
    wpgs: tuple[WpgSettings, ...] = ()
    #: By name.
    models: Mapping[str, ModelSpec] = field(default_factory=dict)
    #: Where it was read from.
    path: Path = Path()

    @property
    def socket(self) -> Path:
        """The unix socket that the CLI talks to."""
        return self.state_dir / "api.sock"

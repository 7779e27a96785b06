"""CURVE keys of a partition: made once, readable by the service user only."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import zmq


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair, Z85 text."""

    public: bytes
    secret: bytes


def made_once(path: Path, make: Callable[[], bytes]) -> bytes:
    """The content of a file that only its owner can read; whoever comes first makes it."""
    if not path.exists():
        part = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(make())
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            part.unlink()
    return path.read_bytes()


def _key_pair(path: Path) -> KeyPair:
    public, secret = made_once(path, _new_pair).split()
    return KeyPair(public=public, secret=secret)


def _new_pair() -> bytes:
    return b"".join(half + b"\n" for half in zmq.curve_keypair())


def server_keys(state_dir: Path) -> KeyPair:
    """The daemon's own pair."""
    return _key_pair(key_folder(state_dir) / "server.key")


def agent_keys(state_dir: Path) -> KeyPair:
    """The pair that every agent of the partition uses."""
    return _key_pair(key_folder(state_dir) / "agent.key")


def key_folder(state_dir: Path) -> Path:
    """Where a partition's keys are."""
    folder = state_dir / "keys"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder

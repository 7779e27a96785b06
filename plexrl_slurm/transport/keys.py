"""CURVE keys of a partition: made once, readable by the service user only."""

import os
from dataclasses import dataclass
from pathlib import Path

import zmq


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A CURVE key pair, Z85 text."""

    public: bytes
    secret: bytes


def _key_pair(path: Path) -> KeyPair:
    if not path.exists():
        public, secret = zmq.curve_keypair()
        part = path.with_suffix(f".{os.getpid()}")
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(public + b"\n" + secret + b"\n")
        try:
            os.link(part, path)
        except FileExistsError:
            pass
        finally:
            part.unlink()
    public, secret = path.read_bytes().split()
    return KeyPair(public=public, secret=secret)


def server_keys(state_dir: Path) -> KeyPair:
    """The daemon's own pair."""
    return _key_pair(_folder(state_dir) / "server.key")


def agent_keys(state_dir: Path) -> KeyPair:
    """The pair that every agent of the partition uses."""
    return _key_pair(_folder(state_dir) / "agent.key")


def _folder(state_dir: Path) -> Path:
    folder = state_dir / "keys"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder

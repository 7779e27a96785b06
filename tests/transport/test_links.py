"""The daemon's end of the link finds its port again, wherever it is told to listen."""

import asyncio
import socket
from pathlib import Path

import pytest

from plexrl_slurm.core.errors import Denied
from plexrl_slurm.transport.links import AgentServer


def listen(folder: Path, host: str) -> str:
    async def once() -> str:
        server = AgentServer(folder)
        try:
            return server.start(host)
        finally:
            server.close()

    return asyncio.run(once())


def test_the_next_daemon_listens_where_agents_look_for_it(tmp_path: Path) -> None:
    first = listen(tmp_path, "127.0.0.1")
    assert first.startswith("tcp://127.0.0.1:")
    assert listen(tmp_path, "127.0.0.1") == first


def test_an_address_that_was_corrected_counts_from_the_next_start_on(tmp_path: Path) -> None:
    port = listen(tmp_path, "127.0.0.1").rpartition(":")[2]
    assert listen(tmp_path, "127.0.0.2") == f"tcp://127.0.0.2:{port}"
    assert (tmp_path / "agents.endpoint").read_text() == f"tcp://127.0.0.2:{port}\n"


def test_a_name_will_do(tmp_path: Path) -> None:
    assert listen(tmp_path, "localhost").startswith("tcp://localhost:")


def test_a_port_that_somebody_else_has_is_named(tmp_path: Path) -> None:
    endpoint = listen(tmp_path, "127.0.0.1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", int(endpoint.rpartition(":")[2])))
        other.listen()
        with pytest.raises(Denied, match=r"cannot listen for agents at 127\.0\.0\.1, port"):
            listen(tmp_path, "127.0.0.1")

"""The API on a loopback port and a unix socket, in a thread, over a fake service."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from plexrl_slurm.api.app import make_app
from plexrl_slurm.api.auth import AuthenticateSocket, principal_of_peer
from plexrl_slurm.api.server import Serving, serve
from plexrl_slurm.core.catalogue import ModelSpec
from tests.api.fake_service import TOKEN_A, FakeService

VOCABULARY = 100
CONTEXT = 32


def make_model(path: str, name: str = "tiny") -> ModelSpec:
    return ModelSpec(
        name=name,
        path=path,
        dtype="float32",
        max_context_length=CONTEXT,
        vocab_size=VOCABULARY,
        parameters=1000,
        architecture="abc",
    )


@dataclass(frozen=True)
class Api:
    """A running API and the service behind it."""

    service: FakeService
    serving: Serving
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.serving.port}"

    def in_loop(self, act: Callable[[], Any]) -> None:
        """Do it in the API's thread, where the service's events belong."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (act(), done.set()))
        assert done.wait(5)

    def http(self, token: str | None = TOKEN_A) -> httpx.Client:
        headers = {} if token is None else {"X-API-Key": token}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False)

    def unix(self, token: str | None = None) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.serving.socket_path))
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(transport=transport, base_url="http://plexrl", headers=headers)


def run_api(
    folder: Path, *, authenticate_socket: AuthenticateSocket = principal_of_peer
) -> Iterator[Api]:
    service = FakeService({"tiny": make_model(str(folder / "model"))})
    app = make_app(service, authenticate_socket=authenticate_socket)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="api")
    thread.start()

    async def start() -> Serving:
        return await serve(app, host="127.0.0.1", port=0, socket_path=folder / "api.sock")

    try:
        serving = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield Api(service, serving, loop)
        asyncio.run_coroutine_threadsafe(serving.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    yield from run_api(tmp_path)

"""The API on a loopback port and a unix socket, in a thread, over a fake service."""

import asyncio
import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from plexrl_slurm.api.app import make_app
from plexrl_slurm.api.auth import AuthenticateSocket, principal_of_peer
from plexrl_slurm.api.munge import Munge
from plexrl_slurm.api.server import Serving, Tls, serve
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


@dataclass
class Api:
    """A running API and the service behind it."""

    service: FakeService
    app: FastAPI
    serving: Serving
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.serving.port}"

    def in_loop(self, act: Callable[[], Any]) -> None:
        """Do it in the API's thread, where the service's events belong."""

        async def once() -> None:
            act()

        asyncio.run_coroutine_threadsafe(once(), self.loop).result(5)

    def http(self, token: str | None = TOKEN_A) -> httpx.Client:
        headers = {} if token is None else {"X-API-Key": token}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False)

    def unix(self, token: str | None = None) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.serving.socket_path))
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(transport=transport, base_url="http://plexrl", headers=headers)


@contextmanager
def run_api(
    folder: Path,
    *,
    authenticate_socket: AuthenticateSocket = principal_of_peer,
    munge: Munge | None = None,
    tls: Tls | None = None,
) -> Iterator[Api]:
    service = make_service(folder)
    app = make_app(service, authenticate_socket=authenticate_socket, munge=munge)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="api")
    thread.start()

    async def start() -> Serving:
        path = folder / "api.sock"
        return await serve(app, host="127.0.0.1", port=0, socket_path=path, tls=tls)

    try:
        serving = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
        yield Api(service, app, serving, loop)
        asyncio.run_coroutine_threadsafe(serving.stop(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def eventually(happened: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def make_service(folder: Path) -> FakeService:
    return FakeService({"tiny": make_model(str(folder / "model"))})


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with run_api(tmp_path_factory.mktemp("api")) as api:
        yield api


@pytest.fixture
def api(running: Api, tmp_path: Path) -> Api:
    """The module's server with a service of the test's own behind it."""
    running.service = running.app.state.service = make_service(tmp_path)
    return running


@pytest.fixture(scope="module")
def excused() -> Iterator[None]:
    """No proxies; and what the SDK left open is collected where nobody minds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
            patch.delenv(name, raising=False)
        yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def sdk(api: Api) -> Iterator[Any]:
    """A client of job A."""
    from tests.api.sdk import tinker

    with tinker.ServiceClient(base_url=api.url, api_key=TOKEN_A) as client:
        yield client


@pytest.fixture
def trainer(sdk: Any) -> Any:
    """A fresh model."""
    return sdk.create_lora_training_client(base_model="tiny", rank=0).result(20)

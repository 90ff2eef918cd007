"""A real server on a real engine: uvicorn in a thread, a free port, HTTP from outside."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from oscar_serving.engines.hf import Engine, EngineOptions
from oscar_serving.server import ServerSettings, create_app

from .tiny import build_model

OPTIONS: dict[str, Any] = {
    "artifact": "hadamard",
    "kv_cache_memory": 8 << 20,
    "max_num_seqs": 8,
    "max_batched_tokens": 256,
    "sink": 16,
    "recent": 32,
    "page_size": 16,
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "model_id": "tiny",
}


#: Options that an SRFT cache takes in place of the above: no windows, no artifact.
SRFT: dict[str, Any] = {"kv_cache_dtype": "srft_int4", "artifact": "auto", "sink": None, "recent": None}


@dataclass
class Served:
    """A running server: its URL, a client, and the engine behind it."""

    url: str
    client: httpx.Client
    engine: Engine

    def complete(self, **fields: Any) -> Any:
        """The JSON of a completion that must succeed."""
        response = self.client.post("/v1/completions", json={"model": "tiny", "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def chat(self, text: str = "hello", **fields: Any) -> Any:
        """The JSON of a chat completion that must succeed."""
        body = {"model": "tiny", "temperature": 0, "messages": [{"role": "user", "content": text}], **fields}
        response = self.client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def wait_until_idle(self) -> None:
        """Until no request runs or waits and no page is held."""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            stats = self.engine.stats()
            if not stats.running and not stats.waiting and not stats.quantized.used and not stats.windows.used:
                return
            time.sleep(0.01)
        pytest.fail(f"the engine did not come to rest: {self.engine.stats()}")


@contextlib.contextmanager
def serve(engine: Engine, **settings: Any) -> Iterator[Served]:
    """Serve ``engine`` until the block ends."""
    app = create_app(engine, ServerSettings(**settings))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, http="h11", lifespan="on", log_level="warning"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=60) as client:
                yield Served(url, client, engine)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def load(model_folder: Path) -> Callable[..., Engine]:
    """Loads an engine on the tiny model, with options changed by keyword."""
    return lambda **changes: Engine.load(model_folder, EngineOptions(**{**OPTIONS, **changes}))


@pytest.fixture(scope="session", params=["oscar_int2", "srft_int4"])
def served(load: Callable[..., Engine], request: pytest.FixtureRequest) -> Iterator[Served]:
    """One server of each codec for all tests that leave it as it was."""
    with serve(load(**SRFT) if request.param == "srft_int4" else load()) as running:
        yield running

"""A real embedded server with a key, on a tiny random model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from oscar_serving.engines.hf import Engine
    from tests.server.conftest import Served

KEY = "key of the tests"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    from tests.server.tiny import build_model

    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def load(model_folder: Path) -> Callable[..., Engine]:
    """Loads an engine on the tiny model, with options changed by keyword."""

    def engine(**changes: Any) -> Engine:
        from oscar_serving.engines.hf import Engine, EngineOptions
        from tests.server.conftest import OPTIONS

        return Engine.load(model_folder, EngineOptions(**{**OPTIONS, **changes}))

    return engine


@pytest.fixture(scope="session")
def served(load: Callable[..., Engine]) -> Iterator[Served]:
    """A server whose client brings the key."""
    from tests.server.conftest import serve

    with serve(load(), api_key=KEY) as running:
        running.client.headers["Authorization"] = f"Bearer {KEY}"
        yield running

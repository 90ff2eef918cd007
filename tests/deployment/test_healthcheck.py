"""``docker/healthcheck.py`` as a process, against real servers: well, busy, stuck, closed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .conftest import KEY
from .tools import DOCKER, run

if TYPE_CHECKING:
    from oscar_serving.engines.hf import Engine
    from tests.server.conftest import Served


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The health check with nothing of this environment but these variables."""
    clean = {"PATH": os.environ["PATH"], **variables}
    return run(sys.executable, DOCKER / "healthcheck.py", *arguments, env=clean)


def test_server_that_decodes(served: Served, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{KEY}\n")
    done = check(served.url, OSCAR_API_KEY_FILE=str(tmp_path / "key"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("healthy: tiny decoded 2 tokens")
    assert check(OSCAR_API_KEY=KEY, OSCAR_HEALTH_URL=served.url).returncode == 0


def test_wrong_and_missing_keys(served: Served, tmp_path: Path) -> None:
    for variables in ({"OSCAR_API_KEY": "wrong"}, {}):
        done = check(served.url, **variables)
        assert (done.returncode, done.stderr) == (
            1,
            "unhealthy: the server refuses the API key (status 401)\n",
        )
    done = check(served.url, OSCAR_API_KEY_FILE=str(tmp_path / "missing"))
    assert done.returncode == 1
    assert done.stderr.startswith("unhealthy: cannot read the API key")


def test_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    done = check(f"http://127.0.0.1:{port}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"unhealthy: no server at http://127.0.0.1:{port}")


def test_engine_that_is_stuck_though_routes_answer(load: Callable[..., Engine]) -> None:
    from tests.server.conftest import serve

    engine, go_on = load(), threading.Event()
    with serve(engine) as served:
        step = engine.step

        def stuck() -> bool:
            go_on.wait()
            return step()

        engine.step = stuck  # type: ignore[method-assign]
        try:
            done = check(served.url, "--timeout", "1")
        finally:
            go_on.set()
        assert done.returncode == 1
        assert done.stderr == "unhealthy: no token within 1 s, and nobody else gets any either\n"
        assert check(served.url).returncode == 0


def test_full_server_that_works_is_healthy(load: Callable[..., Engine]) -> None:
    from tests.server.conftest import serve

    with serve(load(max_num_seqs=1, max_waiting=1)) as served:
        body = {"prompt": "x", "n": 2, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()  # dropping it would close the stream
            next(lines)
            done = check(served.url, "--timeout", "0.3")
        assert (done.returncode, done.stdout) == (0, "healthy: busy, and tokens are coming\n"), done.stderr

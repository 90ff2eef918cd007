"""``oscar serve`` as a process: start lines, signals, exit status."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from oscar_serving.server import ServerSettings, bind

COMMAND = [sys.executable, "-m", "oscar_serving", "serve"]
WAIT = 300  # seconds, far more than it takes
TINY = [
    "--artifact",
    "hadamard",
    "--kv-cache-memory",
    "8MiB",
    "--port",
    "0",
    "--threads",
    "1",
    "--dtype",
    "float32",
]


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """A server that is ready: the process, its URL, and what it said."""
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            said: list[str] = []
            for line in running.stdout:
                said.append(line.strip())
                if line.startswith("ready"):
                    break
            assert said, "the server did not start"
            assert said[-1].startswith("ready"), said
            yield running, said[-1].split()[1].removesuffix("/v1"), said
        finally:
            running.kill()


def test_start_lines_and_sigterm_under_load(model_folder: Path) -> None:
    with process(str(model_folder), "--served-model-name", "tiny", *TINY) as (running, url, said):
        start = "\n".join(said)
        for word in (
            "tiny",
            "oscar_int2",
            "K 2 bits",
            "first 64 and last 256",
            "artifact",
            "tokens in",
            "kernels",
        ):
            assert word in start
        assert url.startswith("http://127.0.0.1:")
        assert httpx.get(f"{url}/health").status_code == 200
        [card] = httpx.get(f"{url}/v1/models").json()["data"]
        assert (card["id"], card["root"]) == ("tiny", str(model_folder.resolve()))
        body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": True, "logprobs": 0}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as response:
            lines = response.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2][6:])["choices"][0]["finish_reason"] == "length"
        assert len(events) == 400  # the first event went before the signal, [DONE] is one more
        assert running.wait(WAIT) == 0


def test_drain_time_is_over(model_folder: Path) -> None:
    with process(str(model_folder), "--drain-timeout", "0", *TINY) as (running, url, _):
        body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=WAIT) as response:
            lines = response.iter_lines()
            next(lines)
            running.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert json.loads(events[-2][6:])["error"]["code"] == "shutting_down"
        assert events[-1] == "data: [DONE]"
        assert running.wait(WAIT) == 0


def test_listener_names_its_protocol() -> None:
    """asyncio sets TCP_NODELAY only on such sockets; without it every answer waits for the client's delayed ACK."""
    with bind(ServerSettings(port=0)) as listener:
        assert listener.proto == socket.IPPROTO_TCP


TWO_ON_ONE_PORT = """
import sys
from oscar_serving.engines.hf import Engine, EngineOptions
from oscar_serving.server import ServerSettings, bind, run_server
engine = Engine.load(sys.argv[1], EngineOptions(artifact="hadamard", kv_cache_memory=8 << 20, threads=1))
with bind(ServerSettings(port=0)) as first:
    settings = ServerSettings(port=first.getsockname()[1], log_level="warning")
    try:
        second = bind(settings)  # Linux allows it while nobody listens
        first.listen()
        run_server(engine, settings, second, print)
    except OSError as error:
        sys.exit(f"{error}".replace(str(settings.port), "PORT"))
"""


def test_two_servers_that_start_at_once_on_one_port(model_folder: Path) -> None:
    command = [sys.executable, "-c", TWO_ON_ONE_PORT, str(model_folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("cannot listen on 127.0.0.1 port PORT: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("setting", "says"),
    [({"host": " "}, "host is empty"), ({"api_key": ""}, "api_key is empty")],
)
def test_settings_that_would_open_the_server_to_all_are_refused(setting: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ServerSettings(**setting)  # type: ignore[arg-type]


def test_taken_port_is_one_line_before_the_model_is_loaded(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, str(model_folder), *TINY, "--port", port], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: cannot listen on 127.0.0.1 port {port}:")
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""

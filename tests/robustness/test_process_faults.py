"""Faults from outside, against ``oscar serve`` as a process: hostile requests, slow readers, a killed server."""

from __future__ import annotations

import http.client
import json
import resource
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from ..server.test_process import COMMAND, TINY, process
from ..server.tiny import build_model

KEY = "key"
OPTIONS = [*TINY, "--served-model-name", "tiny", "--max-body-size", "64KiB", "--log-level", "warning"]
HEADERS = {"Authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with process(str(model), *OPTIONS, "--api-key", KEY) as (_, url, _):
        yield url


def assert_serves(url: str) -> None:
    body = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60)
    assert answer.json()["usage"]["completion_tokens"] == 2


def raw(url: str, data: bytes, *, end: bool = True) -> bytes:
    """What the server answers to these bytes; empty when it only closes the connection.

    With ``end`` the client closes its own direction, which the server takes for a client that went away.
    """
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port or 80), timeout=60) as connection:
        received = b""
        try:
            connection.sendall(data)
            if end:
                connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                received += piece
        except OSError:  # closed by the server, before or while the bytes went out
            pass
        return received


def posted(body: bytes) -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["many", "long", "path"],
)
def test_header_floods_are_cut_off(url: str, flood: bytes) -> None:
    answer = raw(url, flood)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert_serves(url)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": "\xff\xfe"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"a": ' * 9_000 + b"1", 400),
        (b'{"prompt": ' + b"[" * 50_000, 400),
        (b'{"seed": ' + b"9" * 50_000 + b"}", 400),
        (b'{"prompt": "' + b"x" * 100_000 + b'"}', 413),
    ],
    ids=["utf8", "surrogate", "objects", "lists", "number", "size"],
)
def test_bodies(url: str, body: bytes, status: int) -> None:
    answer = raw(url, posted(body), end=False)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert_serves(url)


@pytest.mark.parametrize("data", [b"", b"\x00\xff" * 100, b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01"])
def test_what_is_not_http(url: str, data: bytes) -> None:
    answer = raw(url, data)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
    assert_serves(url)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "/etc/passwd", "%2e%2e/version", "tiny/../tiny", "tiny%00"]
)
def test_model_names_are_no_paths(url: str, name: str) -> None:
    address = httpx.URL(url)
    connection = http.client.HTTPConnection(address.host, address.port, timeout=60)  # sends the path as it is
    connection.request("GET", f"/v1/models/{name}", headers=HEADERS)
    answer = connection.getresponse()
    assert answer.status == 404
    assert b"root:" not in answer.read()
    body = {"model": name, "prompt": "x"}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=HEADERS).status_code == 404


def test_every_route_of_the_document_asks_for_the_key(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json", headers=HEADERS).json()
    for path, operations in document["paths"].items():
        for method in operations:
            for headers in ({}, {"Authorization": "Bearer ke"}, {"Authorization": "Bearer keyy"}):
                status = httpx.request(method, f"{url}{path}", headers=headers).status_code
                assert status == (200 if path in ("/health", "/version") else 401)


def test_a_reader_that_stops_holds_nobody_up(url: str) -> None:
    """Its stream stays in the sockets' buffers; others are answered, and its pages come back when it goes."""
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True, "logprobs": 5}
    address = httpx.URL(url)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.host, address.port))
        connection.sendall(posted(json.dumps(body).encode()))
        assert connection.recv(16).startswith(b"HTTP/1.1 200")
        assert_serves(url)
    while 'vllm:num_requests_running{model_name="tiny"} 0' not in httpx.get(f"{url}/metrics", headers=HEADERS).text:
        pass
    assert_serves(url)


def test_kill_and_start_again_on_the_same_port(model: Path) -> None:
    """SIGKILL in the middle of a stream; the next server takes the port at once and answers the same."""
    body = {"prompt": "again", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
    with process(str(model), *OPTIONS) as (running, url, _):
        before = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
        with httpx.stream(
            "POST", f"{url}/v1/completions", json={**body, "max_tokens": 1900, "stream": True}, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            running.send_signal(signal.SIGKILL)
            with pytest.raises(httpx.HTTPError):
                list(lines)
        assert running.wait(60) == -signal.SIGKILL
    port = str(httpx.URL(url).port)
    with process(str(model), *OPTIONS, "--port", port) as (_, url, _):
        after = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"]
    assert after == before


def test_model_cache_on_a_full_disk(tmp_path: Path) -> None:
    """Files may not grow past 4 KiB, as on a full disk: one line, and nothing is left behind."""
    done = subprocess.run(
        [*COMMAND[:-1], "models", "get", "smollm2"],
        # A truncated .pyc would break every later process.
        env={"OSCAR_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    progress, error = done.stderr.splitlines()
    assert progress.startswith("downloading")
    assert error.startswith("error: ModelError:")
    assert "File too large" in error
    assert list((tmp_path / "models").iterdir()) == []

"""Start the quickstart server on a free port, ask it a question both ways, look at its metrics, stop it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

#: Without the system message this small model is undecided between beginning with "The" and with "L'".
MESSAGES = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]
START_LIMIT = 600.0  # seconds: the first start fetches and converts the weights
ANSWER_LIMIT = 300.0


def main(options: list[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "oscar_serving", "serve", "smollm2", "--port", str(port), *options]
    server = subprocess.Popen(command)
    try:
        wait_until_healthy(url, server)
        answer = ask(url)
        print(f"whole answer:    {answer}")
        streamed, pages = ask_streaming(url)
        print(f"streamed answer: {streamed}")
        print(f"INT2 pages in use while it answered: {pages}")
        expect("Paris" in answer, "the whole answer does not say Paris")
        expect("Paris" in streamed, "the streamed answer does not say Paris")
        expect(pages > 0, "/metrics shows no INT2 page in use")
        server.send_signal(signal.SIGTERM)
        expect(server.wait(60) == 0, f"the server left with exit status {server.returncode} on SIGTERM")
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    print("quickstart check: all well")


def expect(condition: bool, otherwise: str) -> None:
    """Leave with a message unless ``condition`` holds."""
    if not condition:
        sys.exit(f"quickstart check: {otherwise}")


def wait_until_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Poll ``/health``, which answers 200 once the engine has decoded a token."""
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        expect(server.poll() is None, f"the server ended with status {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    sys.exit(f"quickstart check: the server was not ready after {START_LIMIT:.0f} s")


def post(url: str, *, stream: bool) -> Any:
    """Send the question to the chat endpoint."""
    body = {
        "model": "smollm2",
        "messages": MESSAGES,
        "max_tokens": 32,
        "temperature": 0,
        "stream": stream,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=ANSWER_LIMIT)


def ask(url: str) -> str:
    """The answer in one piece."""
    with post(url, stream=False) as response:
        text: str = json.load(response)["choices"][0]["message"]["content"]
    return text


def ask_streaming(url: str) -> tuple[str, float]:
    """The answer piece by piece, and the INT2 pages in use after the first piece."""
    pieces: list[str] = []
    pages = 0.0
    with post(url, stream=True) as response:
        for event in events(response):
            text = event["choices"][0]["delta"].get("content")
            if text:
                pages = max(pages, pages_in_use(url)) if not pieces else pages
                pieces.append(text)
    return "".join(pieces), pages


def events(response: Any) -> Iterator[Any]:
    """The JSON of each server-sent event before ``[DONE]``."""
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            return
        if data:
            yield json.loads(data)
    sys.exit("quickstart check: the stream ended without [DONE]")


def pages_in_use(url: str) -> float:
    """Value of ``oscar_pages_in_use{tier="int2"}``."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    match = re.search(r'^oscar_pages_in_use\{[^}]*tier="int2"[^}]*\} (\S+)', text, re.M)
    expect(match is not None, "/metrics has no oscar_pages_in_use of tier int2")
    assert match is not None
    return float(match[1])


if __name__ == "__main__":
    main(sys.argv[1:])

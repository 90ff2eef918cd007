#!/usr/bin/env python3
"""Is the server decoding? Asks it for two tokens; exit status 0 when they come, else 1 and one line that says why.

    healthcheck.py [URL] [--timeout SECONDS]

A route that only answers says nothing about a decode loop that hangs. When the answer does not come in time, or the
queue is full, the server may just be busy: then it is healthy if its count of generated tokens grew meanwhile.

For vLLM, SGLang (with --enable-metrics) and the embedded server; the standard library alone. The API key comes from
the file that $OSCAR_API_KEY_FILE names, or from $OSCAR_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any

#: Status of a server that has no room for one more request.
BUSY = (429, 503)
#: The counters of the three servers: vLLM's name (also the embedded server's) and SGLang's.
GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
#: Seconds for routes that compute nothing.
SHORT = 5.0


class UnhealthyError(Exception):
    """Why the server is not healthy, in one line."""


def main() -> None:
    """Check once and exit."""
    parser = argparse.ArgumentParser(description="Exit with 0 if the server decodes, else with 1 and the reason.")
    parser.add_argument("url", nargs="?", default=os.environ.get("OSCAR_HEALTH_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for the two tokens (default: 20)")
    options = parser.parse_args()
    try:
        print(f"healthy: {check(options.url.rstrip('/'), read_key(), options.timeout)}")
    except UnhealthyError as reason:
        sys.exit(f"unhealthy: {reason}")


def read_key() -> str | None:
    """The API key, or None where the server has none."""
    name = os.environ.get("OSCAR_API_KEY_FILE")
    if not name:
        return os.environ.get("OSCAR_API_KEY") or None
    try:
        return Path(name).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UnhealthyError(f"cannot read the API key: {error}") from None


def check(url: str, key: str | None, timeout: float) -> str:
    """Why the server is healthy; raises :class:`UnhealthyError`."""
    try:
        before = generated_tokens(url, key)
        model = json.loads(ask(f"{url}/v1/models", key, SHORT))["data"][0]["id"]
    except TimeoutError:
        raise UnhealthyError(f"{url} does not answer within {SHORT:.0f} s") from None
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UnhealthyError(f"{url}/v1/models is no list of models: {error!r}") from None
    start = time.monotonic()
    try:
        tokens = decode(url, key, model, timeout)
    except (TimeoutError, BusyError) as obstacle:
        if isinstance(obstacle, BusyError):
            time.sleep(max(0.0, min(2.0, timeout)))  # time for the others' next tokens
        try:
            grew = generated_tokens(url, key) > before
        except TimeoutError:
            grew = False
        if grew:
            return "busy, and tokens are coming"
        raise UnhealthyError(f"no token within {timeout:g} s, and nobody else gets any either") from None
    return f"{model} decoded {tokens} tokens in {time.monotonic() - start:.2f} s"


def decode(url: str, key: str | None, model: str, timeout: float) -> int:
    """Tokens of an answer that needs a prefill and a decoding step."""
    body = {
        "model": model,
        "prompt": "1 2 3",
        "max_tokens": 2,
        "ignore_eos": True,
        "temperature": 0,
    }
    answer = ask(f"{url}/v1/completions", key, timeout, body)
    try:
        tokens = int(json.loads(answer)["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise UnhealthyError(f"the answer is no completion: {error!r}") from None
    if tokens != 2:
        raise UnhealthyError(f"asked for 2 tokens, got {tokens}")
    return tokens


def generated_tokens(url: str, key: str | None) -> float:
    """Tokens generated since the server started, over all ranks."""
    lines = ask(f"{url}/metrics", key, SHORT).decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] in GENERATED)


class BusyError(Exception):
    """The queue is full."""


def ask(url: str, key: str | None, timeout: float, body: dict[str, Any] | None = None) -> bytes:
    """Body of a 200 answer; :class:`TimeoutError`, :class:`BusyError` or :class:`UnhealthyError` otherwise."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    # A proxy of the environment is for the way out, never for the server beside us.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, data, headers), timeout=timeout) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        if error.code in BUSY and body is not None:
            raise BusyError from None
        if error.code == 401:
            raise UnhealthyError("the server refuses the API key (status 401)") from None
        raise UnhealthyError(f"{url} answered with status {error.code}") from None
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise TimeoutError from None
        raise UnhealthyError(f"no server at {url}: {error.reason}") from None
    except (HTTPException, ConnectionError) as error:
        raise UnhealthyError(f"{url} broke off: {error!r}") from None


if __name__ == "__main__":
    main()

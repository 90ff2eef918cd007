"""One server process on real weights for all client tests; clients that need many packages run in environments of
their own.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from oscar_serving.models import get_model

from ..server.test_process import process

KEY = "a-key-for-tests"
MODEL = "smollm2"
#: Requests that run or wait at most; one more is answered with 429.
LIMIT = 24
OPTIONS = [
    "--served-model-name", MODEL, "--api-key", KEY, "--port", "0", "--device", "cpu", "--threads", "1",
    "--kv-cache-memory", "160MiB", "--max-model-len", "2048", "--max-num-seqs", "8", "--max-waiting", str(LIMIT - 8),
    "--log-level", "warning",
]  # fmt: skip


@dataclass(frozen=True)
class Endpoint:
    """Where the server listens (``url`` without ``/v1``), and the folder of its model for clients that tokenize."""

    url: str
    folder: Path


@pytest.fixture(scope="session")
def endpoint() -> Iterator[Endpoint]:
    """``oscar serve`` on SmolLM2-135M-Instruct."""
    folder = get_model(MODEL)
    with process(str(folder), *OPTIONS) as (_, url, _):
        yield Endpoint(url, folder)


@pytest.fixture
def client_in(tmp_path: Path) -> Callable[..., str]:
    """``client_in(VARIABLE, *command)``: what a command of the virtual environment that VARIABLE names prints."""

    def run(variable: str, program: str, *arguments: str | Path) -> str:
        environment = os.environ.get(variable)
        if not environment:
            pytest.skip(f"{variable} is not set: launch/test-clients.sh makes that environment")
        command = [str(Path(environment) / "bin" / program), *map(str, arguments)]
        variables = {
            **os.environ, "OPENAI_API_KEY": KEY, "API_KEY": KEY, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
            "HOME": str(tmp_path), "VLLM_TARGET_DEVICE": "cpu",
        }  # fmt: skip
        done = subprocess.run(
            command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500, check=False
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        return done.stdout + done.stderr

    return run

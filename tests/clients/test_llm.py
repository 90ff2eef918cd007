"""The ``llm`` command line, which streams."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import KEY, MODEL, Endpoint

pytest.importorskip("llm")
pytestmark = pytest.mark.model


def test_prompt(endpoint: Endpoint, tmp_path: Path) -> None:
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: {MODEL}\n  api_base: {endpoint.url}/v1\n  api_key_name: ours\n"
    )
    command = [sys.executable, "-m", "llm", "prompt", "-m", "ours", "--key", KEY, "-s", "Answer in one sentence."]
    command += ["-o", "temperature", "0", "-o", "max_tokens", "24", "What is the capital of France?"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "LLM_USER_PATH": str(tmp_path)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout

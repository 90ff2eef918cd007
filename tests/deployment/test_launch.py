"""The scripts that start servers: what they refuse, and what they hand on."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from .tools import ROOT, run

ENGINES = ("vllm", "sglang")


@pytest.mark.parametrize("arguments", [(), ("--port", "1")])
@pytest.mark.parametrize("name", [*ENGINES, "embedded"])
def test_a_model_must_be_named(name: str, arguments: tuple[str, ...]) -> None:
    done = run(ROOT / "launch" / f"serve-{name}.sh", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("error: name a model first")
    assert done.stderr.count("\n") == 1


def program(path: Path, text: str) -> None:
    """An executable script at ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("name", ENGINES)
def test_no_gpu_is_said_before_gigabytes_are_fetched(name: str, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvidia-smi", "exit 9")  # as it does without a driver
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, f"OSCAR_{name.upper()}_VENV": str(tmp_path / "venv")}
    done = run(ROOT / "launch" / f"serve-{name}.sh", "/models/m", env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith("error: no NVIDIA GPU here")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "venv").exists()


@pytest.mark.skipif(platform.system() != "Linux", reason="cksum and GPUs of Linux")
@pytest.mark.parametrize("name", ENGINES)
def test_options_are_handed_on_unchanged_and_last(name: str, tmp_path: Path) -> None:
    """The engine is a program that prints its arguments: a real one wants a GPU and gigabytes."""
    program(tmp_path / "bin" / "nvidia-smi", "exit 0")
    venv = tmp_path / "venv"
    program(venv / "bin" / name, "printf '%s\\n' \"$@\"")
    (venv / "bin" / "python").symlink_to(sys.executable)
    wanted = run("bash", "-c", f"printf '%s %s' \"$(cksum < '{ROOT}/pyproject.toml')\" '{ROOT}'").stdout
    (venv / f".oscar-{name}").write_text(wanted)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, f"OSCAR_{name.upper()}_VENV": str(venv)}
    done = run(ROOT / "launch" / f"serve-{name}.sh", "/models/m", "--served-model-name", "my model", env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "serve", "/models/m", "--kv-cache-dtype", "oscar_int2", "--host", "127.0.0.1",
        "--served-model-name", "my model",
    ]  # fmt: skip

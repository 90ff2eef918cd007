"""The scripts that users run first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), ROOT / ".ci" / "run"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_missing_python_is_said_in_one_line(script: str, tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")  # as an interpreter that fails the version check does
    old.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(old), "OSCAR_VENV": str(tmp_path / "venv")}
    done = subprocess.run([ROOT / "launch" / script], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "no Python 3.11 or newer found" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_torch_is_pinned_first() -> None:
    """A looser requirement that came before it would fetch gigabytes of a newer build."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert pins[0] == "torch==2.13.0"
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[^\s;]+", pin) for pin in pins)


def test_every_requirement_is_pinned() -> None:
    """What the environment that runs the tests holds is what the constraints name."""
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pins}
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "list", "--format=freeze"], check=True, capture_output=True, text=True
    )
    installed = {re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in listing.stdout.split()}
    assert not installed - names - {"pip", "oscar-serving", "wheel"}

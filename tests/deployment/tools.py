"""Programs that check deployment files: from the environment's folder of programs, or the machine's."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def tool(name: str) -> str:
    """Path of the program; the test is skipped where it is missing."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here: install the dev requirements")
    return found


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """What came of a command; a failure is the caller's to judge."""
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)

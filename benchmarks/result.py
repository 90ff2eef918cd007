"""Result files: one form for every benchmark and evaluation, so that no number in the docs is typed by hand."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "triton", "vllm", "sglang", "flashinfer-python", "transformers", "numpy")


def write_result(name: str, rows: list[dict[str, Any]], device: str, folder: Path = RESULTS) -> Path:
    """Write ``<folder>/<name>-<YYYYMMDD>.json``; a row has case, metric, unit, ours, baselines, ratio, must, aim,
    direction."""
    needed = {"case", "metric", "unit", "ours", "baselines", "ratio", "must", "aim", "direction"}
    for row in rows:
        if missing := needed - row.keys():
            raise ValueError(f"row {row.get('case')!r} lacks {', '.join(sorted(missing))}")
    now = datetime.now(UTC)
    meta = {
        "name": name,
        "date": now.isoformat(timespec="seconds"),
        "commit": _run("git", "rev-parse", "HEAD"),
        "device": device,
        "driver": _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "versions": {"python": sys.version.split()[0], **_versions()},
        "command": "python -m benchmarks." + " ".join([Path(sys.argv[0]).stem, *sys.argv[1:]]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{now:%Y%m%d}.json"
    path.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return path


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _run(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""

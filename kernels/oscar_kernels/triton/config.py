"""Launch configurations: a table that needs no tuning run, and a file that overrides it."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class DecodeConfig:
    """How the decode kernel is cut.

    Attributes
    ----------
    warps
        Warps a program; each takes its own keys.
    keys
        INT2 keys a warp takes in one step.
    window_keys
        Window keys a warp takes in one step, at least 16.
    rows
        Query rows a program takes (a power of two, at least 8).
    stages
        Software pipeline depth of the INT2 loop.
    waves
        Programs aimed at, as a multiple of what the card holds at once, when there is much work.
    resident
        Programs of a multiprocessor that run at once.
    registers
        Cap on registers a thread, 0 for none.
    packed
        Unpack two codes an instruction by inline assembly (NVIDIA only).
    pdl
        Programmatic dependent launch (Hopper and later).
    """

    warps: int = 4
    keys: int = 32
    window_keys: int = 16
    rows: int = 8
    stages: int = 4
    waves: int = 4
    resident: int = 3
    registers: int = 168
    packed: bool = True
    pdl: bool = False


#: Compute capability (major, minor) → defaults. The nearest lower entry serves a card that is not listed.
DEFAULTS: dict[tuple[int, int], DecodeConfig] = {
    (8, 0): DecodeConfig(registers=0, resident=2),
    (8, 9): DecodeConfig(registers=0, resident=2, stages=3),
    (9, 0): DecodeConfig(),
    (10, 0): DecodeConfig(),
}


def tuning_file() -> Path:
    """Where ``python -m benchmarks.kernels --tune`` writes and the launchers read overrides."""
    root = os.environ.get("OSCAR_CACHE") or str(Path.home() / ".cache" / "oscar-serving")
    return Path(root) / "kernels.json"


def tuning_key(device: str, head_dim: int, k_bits: int, v_bits: int, ratio: int, page_size: int) -> str:
    """Name of a tuned shape in the file."""
    return f"{device}|d{head_dim}|k{k_bits}v{v_bits}|g{ratio}|p{page_size}"


@functools.cache
def _tuned(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else {}


def decode_config(
    device: torch.device, *, head_dim: int, k_bits: int, v_bits: int, ratio: int, page_size: int, rows: int
) -> DecodeConfig:
    """Configuration for a shape; ``rows`` is the number of query rows that share a KV head."""
    if device.type != "cuda":
        base = DecodeConfig(warps=1, keys=16, packed=False)
    else:
        capability = torch.cuda.get_device_capability(device)
        base = DEFAULTS[max((c for c in DEFAULTS if c <= capability), default=(8, 0))]
        name = torch.cuda.get_device_name(device)
        override = _tuned(tuning_file()).get(tuning_key(name, head_dim, k_bits, v_bits, ratio, page_size), {})
        base = replace(base, **override)
    if rows > 8:  # accumulators grow with rows: keep them within the registers
        base = replace(base, rows=min(16, 1 << (rows - 1).bit_length()) if head_dim <= 128 else 8)
    if head_dim > 128:
        base = replace(base, keys=min(base.keys, 32), registers=0, resident=2)
    return base


def save_tuned(entries: dict[str, DecodeConfig]) -> Path:
    """Merge tuned shapes into the file."""
    path = tuning_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | {k: asdict(v) for k, v in entries.items()}, indent=1, sort_keys=True))
    _tuned.cache_clear()
    return path

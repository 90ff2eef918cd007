"""Memory sizes on the command line: ``2GiB``, ``512MiB``, ``80GB``, or bytes."""

from __future__ import annotations

import re

import typer

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024), ("", 1024))
}
_SIZE = re.compile(r"(\d{1,18})(\.\d{1,9})?\s*([a-z]*)", re.ASCII | re.IGNORECASE)


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``2GiB`` (1024-based), ``2GB`` (1000-based), ``2G`` (as GiB) or ``2048``.

    Raises
    ------
    typer.BadParameter
        Not a positive size.
    """
    match = _SIZE.fullmatch(str(text).strip())
    unit = _UNITS.get(match[3].lower(), 0) if match else 0
    size = int(match[1]) * unit + int(float(match[2] or 0) * unit) if match else 0
    if size < 1:
        raise typer.BadParameter(f"{text!r} is not a size; write for example 2GiB, 512MiB, 80GB or a number of bytes")
    return size


def format_size(size: float) -> str:
    """``2147483648`` → ``2.00 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"

"""The position rule: which store a query reads a key from. One function, for every backend and for the reference."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

Positions = TypeVar("Positions", Tensor, int)


def reads_window(key: Positions, query: Positions, *, sink: int, recent: int) -> Positions:
    """Whether the query at position ``query`` reads the key at position ``key`` unquantized (broadcasts).

    True for the first ``sink`` positions and for the ``recent`` positions that end with the query itself; every other
    key at or before the query is read from the INT2 store. Causality is the caller's mask.
    """
    return (key < sink) | (key > query - recent)  # type: ignore[return-value]


def window_start(length: int, recent: int) -> int:
    """First recent position that the next query, at position ``length``, will read unquantized."""
    return max(0, length - recent + 1)

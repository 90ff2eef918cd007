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
    return (key < sink) | (key > query - recent)


def window_start(length: int, recent: int) -> int:
    """First recent position that the next query, at position ``length``, will read unquantized."""
    return max(0, length - recent + 1)


def window_pages(length: int, *, sink: int, recent: int, page_size: int) -> tuple[range, range]:
    """Window pages that a sequence of ``length`` tokens keeps: those of the sink, and the recent ones after them.

    They hold every key that the query at position ``length`` reads unquantized. The recent ones reach back as far as
    the query at the last page boundary reads, at most one page further, so that a sequence that ends here can be
    continued from its last full page.
    """
    end = -(-length // page_size)
    sink_end = -(-min(sink, length) // page_size)
    boundary = length - length % page_size
    return range(sink_end), range(max(sink_end, window_start(boundary, recent) // page_size), end)

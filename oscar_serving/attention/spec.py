"""What kind of attention a layer does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """Constants of one attention layer.

    Attributes
    ----------
    scale
        Factor on ``q k^T``.
    softcap
        ``c`` in ``c * tanh(score / c)``; ``None`` for none.
    sliding_window
        Number of most recent positions, the query's own included, that a query sees; ``None`` for all.
    """

    scale: float
    softcap: float | None = None
    sliding_window: int | None = None

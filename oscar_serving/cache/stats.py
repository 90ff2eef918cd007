"""What a pool says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierStats:
    """Pages of one tier, the null page apart: ``total = used + cached + free``.

    Attributes
    ----------
    used
        Held by requests.
    cached
        Held by the prefix index alone: taken when nothing is free.
    evictions
        Cached pages taken so, since start.
    """

    total: int
    used: int
    cached: int
    free: int
    evictions: int


@dataclass(frozen=True)
class PoolStats:
    """Occupancy now, and counts since start.

    Attributes
    ----------
    requests
        Requests in the pool.
    lookups, lookup_tokens
        Admissions that looked into the prefix index, and their tokens.
    hits, hit_tokens
        Admissions that found something, and the tokens found.
    window_misses, window_miss_tokens
        Admissions whose INT2 pages reached further than their windows, and by how many tokens.
    demoted_tokens
        Tokens whose window page was given up because no later query of the request reads it.
    """

    quantized: TierStats
    windows: TierStats
    requests: int
    lookups: int
    lookup_tokens: int
    hits: int
    hit_tokens: int
    window_misses: int
    window_miss_tokens: int
    demoted_tokens: int

    @property
    def evictions(self) -> int:
        """Cached pages evicted, both tiers."""
        return self.quantized.evictions + self.windows.evictions

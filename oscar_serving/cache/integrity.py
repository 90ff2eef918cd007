"""Everything that must hold in a pool between two calls, recomputed from the requests' tables."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from oscar_serving.cache.tier import NULL_PAGE, Tier

if TYPE_CHECKING:
    from oscar_serving.cache.pool import CachePool, Request


class IntegrityError(AssertionError):
    """A pool contradicts itself: a bug, in the pool or in how it is called."""


def check(pool: CachePool) -> None:
    """Raise :class:`IntegrityError` on the first contradiction."""
    quantized: Counter[int] = Counter()
    windows: Counter[int] = Counter()
    for name, request in pool.requests.items():
        _check_request(pool, name, request)
        quantized.update(request.pages)
        windows.update(page for page in request.windows if page != NULL_PAGE)
    _check_tier("INT2", pool.quantized, quantized)
    _check_tier("window", pool.windows, windows)


def _check_tier(name: str, tier: Tier, held: Counter[int]) -> None:
    total = len(tier.references)
    for page, count in enumerate(tier.references):
        _require(count == held[page], f"{name} page {page}: counts {count} references, tables have {held[page]}")
    used = {page for page in range(total) if tier.references[page]}
    states = [*tier.free, *tier.cold, *tier.warm, *used]
    twice = [page for page, count in Counter(states).items() if count > 1]
    _require(not twice, f"{name} pages {twice}: free, cached or used at once")
    _require(NULL_PAGE not in states, f"{name}: the null page was handed out")
    _require(len(states) == total - 1, f"{name}: {total - 1 - len(states)} pages lost")
    for page in (NULL_PAGE, *tier.free):
        _require(tier.keys[page] is None, f"{name} page {page}: in the index although free")
    for page in (*tier.cold, *tier.warm):
        _require(tier.keys[page] is not None, f"{name} page {page}: cached but not in the index")
    published = {key: page for page, key in enumerate(tier.keys) if key is not None}
    _require(published == tier.index, f"{name}: index and keys of pages differ")
    stats = tier.stats()
    _require(stats.used == len(used), f"{name}: {len(used)} pages used, statistics say {stats.used}")


def _check_request(pool: CachePool, name: str, request: Request) -> None:
    from oscar_serving.cache.pool import chain

    size, length = pool.config.page_size, len(request.tokens)
    full = length // size
    _require(len(request.pages) == len(request.windows), f"request {name!r}: tables of different length")
    _require(len(request.pages) * size >= length + request.reserved, f"request {name!r}: table shorter than its tokens")
    _require(NULL_PAGE not in request.pages, f"request {name!r}: a token without INT2 page")
    for table in (request.pages, [page for page in request.windows if page != NULL_PAGE]):
        _require(len(set(table)) == len(table), f"request {name!r}: a page twice in one table")

    keys, key = [], request.root
    if pool.prefix_caching:
        for i in range(full):
            key = chain(key, request.tokens[i * size : (i + 1) * size])
            keys.append(key)
    _require(keys == request.keys, f"request {name!r}: hashes do not belong to its tokens")

    for tier, table in ((pool.quantized, request.pages), (pool.windows, request.windows)):
        for i, page in enumerate(table):
            if page == NULL_PAGE:
                continue
            if i < full:
                _require(tier.keys[page] in (None, *keys[i : i + 1]), f"request {name!r}: page {i} has another's hash")
            else:
                _require(
                    tier.references[page] == 1 and tier.keys[page] is None, f"request {name!r}: page {i} can be written"
                )

    kept = {j for part in pool._kept(length) for j in part}
    later = {j for part in pool._kept(length + request.reserved) for j in part if j >= full}
    have = {j for j, page in enumerate(request.windows) if page != NULL_PAGE}
    _require(kept | later <= have, f"request {name!r}: no window pages for {sorted((kept | later) - have)}")
    extra = {j for j in have - kept - later if j < full}
    _require(not extra, f"request {name!r}: window pages {sorted(extra)} that no query reads")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)

"""The pages of one store: free list, reference counts, prefix index, eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from oscar_serving.cache.stats import TierStats

#: Never handed out: a table entry of 0 means "no page".
NULL_PAGE = 0


class PoolExhausted(Exception):
    """More pages were asked for than are free or evictable."""


class Tier:
    """Page ids ``1 … pages - 1`` of one store.

    A page is in exactly one of three states: free; used, by ``references[page]`` requests; or cached, by the prefix
    index alone. Used pages may be in the index as well. Cached pages are evicted when nothing is free, those released
    as ``cold`` first, then the ones released longest ago.

    Attributes
    ----------
    index
        Key of a full page → the page that has its content.
    keys
        The reverse: key by page, ``None`` for a page that is not in the index.
    """

    def __init__(self, pages: int) -> None:
        self.free = list(range(pages - 1, NULL_PAGE, -1))
        self.references = [0] * pages
        self.keys: list[bytes | None] = [None] * pages
        self.index: dict[bytes, int] = {}
        self.cold: OrderedDict[int, None] = OrderedDict()
        self.warm: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can give."""
        return len(self.free) + len(self.cold) + len(self.warm)

    def take(self, count: int) -> list[int]:
        """``count`` pages, each with one reference.

        Raises
        ------
        PoolExhausted
            There are not as many; nothing has changed.
        """
        if count > self.available:
            raise PoolExhausted(f"{count} pages asked for, {self.available} available")
        pages = []
        for _ in range(count):
            page = self.free.pop() if self.free else self._evict()
            self.references[page] = 1
            pages.append(page)
        return pages

    def put_back(self, pages: Iterable[int]) -> None:
        """Undo :meth:`take` for pages that nothing was written to."""
        for page in pages:
            self.release(page, None)

    def hold(self, page: int) -> None:
        """One more reference to a page that is used or cached."""
        if self.references[page] == 0:
            self._uncache(page)
        self.references[page] += 1

    def publish(self, page: int, key: bytes) -> None:
        """Put a full page into the index; of two pages with the same content the first one stays."""
        if self.keys[page] is None and key not in self.index:
            self.keys[page] = key
            self.index[key] = page

    def release(self, page: int, key: bytes | None, *, cold: bool = False) -> None:
        """One reference less. After the last one a full page (``key``) stays cached, unless its content already is."""
        if self.references[page] < 1:
            raise ValueError(f"page {page}: released more often than held")
        self.references[page] -= 1
        if self.references[page]:
            return
        if key is not None:
            self.publish(page, key)
        if self.keys[page] is not None:
            (self.cold if cold else self.warm)[page] = None
            return
        self.free.append(page)
        if key is not None and not cold:
            self._refresh(self.index[key])

    def withdraw(self, key: bytes) -> None:
        """Take a page out of the index, so that it is not found again; a cached one is free then."""
        page = self.index.pop(key, None)
        if page is None:
            return
        self.keys[page] = None
        if self.references[page] == 0:
            self._uncache(page)
            self.free.append(page)

    def stats(self) -> TierStats:
        """Occupancy and evictions."""
        total, cached, free = len(self.references) - 1, len(self.cold) + len(self.warm), len(self.free)
        return TierStats(total, total - cached - free, cached, free, self.evictions)

    def _refresh(self, page: int) -> None:
        """A copy of this page was in use until now: if it is cached, evict it as late as the pages that follow it."""
        if self.references[page] == 0:
            self._uncache(page)
            self.warm[page] = None

    def _uncache(self, page: int) -> None:
        queue = self.cold if page in self.cold else self.warm
        del queue[page]

    def _evict(self) -> int:
        page, _ = (self.cold or self.warm).popitem(last=False)
        key = self.keys[page]
        assert key is not None
        del self.index[key]
        self.keys[page] = None
        self.evictions += 1
        return page

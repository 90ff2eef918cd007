"""The mixed-precision paged pool: which page of which store each token of each request lies in.

A pure data structure: page ids only, no tensors. Two tiers with the same page size (``config.page_size`` tokens):

* **INT2 pages** hold every token.
* **Window pages** hold the tokens that a later query reads unquantized by the position rule
  (:mod:`~oscar_serving.cache.rule`): the first ``sink`` positions and the last ``recent``. A page that leaves the
  window is given up; its tokens are in the INT2 tier already.

**One step.** ``reserve`` pages for the next tokens, compute, ``commit`` the token ids. A chunk longer than ``recent``
gets window pages for the sink and for what is still recent at its *end*; tokens in between are written to INT2 alone,
and the queries of this very chunk read them from the chunk's own tensors. Window pages of earlier tokens stay until
``commit``, for the first queries of the chunk read them.

**Prefix index.** A page is findable as soon as it is full and committed, prompt and generated tokens alike, under a
hash of everything before it: its predecessor's hash and its own token ids, starting from ``salt``. A hit of length
``L`` is exact: it needs the INT2 pages of ``[0, L)`` and *all* window pages that the query at position ``L`` reads.
Window pages are cached and evicted apart from INT2 pages. Kept longest are those at places where another request may
continue: the end of a request, the end of its prompt, and where its prompt departs from what others have computed
(there, window pages are written in passing, if a quarter of the tier is left for others).

**Shared pages are never written.** Only full pages are shared. ``fork`` gives the child the full pages; the child
computes the tokens of the last, partly filled page itself, into a page of its own, so that no page copy is needed.

Everything is deterministic, and costs a constant per step and request, plus one hash per page filled.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from oscar_serving.cache import integrity
from oscar_serving.cache.rule import window_pages
from oscar_serving.cache.stats import PoolStats, TierStats
from oscar_serving.cache.tier import NULL_PAGE, PoolExhausted, Tier
from oscar_serving.config import OscarConfig

__all__ = ["CachePool", "PoolExhausted", "PoolStats", "TierStats"]

#: Window pages beyond what a request needs are taken only while this share of the tier stays available: one in four.
HEADROOM = 4


@dataclass(slots=True)
class Request:
    """State of one request.

    Attributes
    ----------
    root
        What its chain of hashes starts from.
    tokens
        Committed token ids.
    pages, windows
        Tables by page index, equally long; 0 in ``windows`` where there is no page.
    keys
        Hashes of the full pages.
    junctions
        Page ranges whose windows are worth keeping when they leave the window.
    reserved
        Tokens reserved and not committed.
    found
        What the prefix index had at admission, until it is counted: tokens looked up, tokens of the hit, and tokens
        beyond it whose INT2 pages were there without their windows.
    """

    root: bytes
    tokens: array[int]
    pages: list[int]
    windows: list[int]
    keys: list[bytes]
    junctions: list[range] = field(default_factory=list)
    reserved: int = 0
    found: tuple[int, int, int] | None = None


class CachePool:
    """Pages of both tiers and the requests that hold them.

    Parameters
    ----------
    config
        ``page_size``, ``sink`` and ``recent`` are used.
    pages, window_pages
        Pages of the INT2 and of the window store, the null page 0 included.
    prefix_caching
        Whether pages are found again after, and shared between, requests.
    """

    def __init__(self, config: OscarConfig, *, pages: int, window_pages: int, prefix_caching: bool = True) -> None:
        for name, count in (("pages", pages), ("window_pages", window_pages)):
            if count < 2:
                raise ValueError(f"{name}={count}: page 0 is never handed out, so at least 2")
        self.config = config
        self.prefix_caching = prefix_caching
        self.quantized = Tier(pages)
        self.windows = Tier(window_pages)
        self.requests: dict[str, Request] = {}
        self._page_size = config.page_size
        self._lookups = self._lookup_tokens = self._hits = self._hit_tokens = 0
        self._window_misses = self._window_miss_tokens = self._demoted_tokens = 0

    def admit(self, request: str, tokens: Sequence[int], *, salt: str = "") -> int:
        """Register ``request`` with the longest exact prefix hit; takes references only, never a page.

        Parameters
        ----------
        tokens
            Its token ids so far. At least one is left to compute.
        salt
            Separates what must not be shared although the tokens are the same: adapters, artifacts, tenants.

        Returns
        -------
        int
            Length of the hit, a multiple of the page size; the request's length from now on.
        """
        if request in self.requests:
            raise ValueError(f"request {request!r}: already in the pool")
        state = Request(_root(salt), array("q"), [], [], [])
        if self.prefix_caching:
            self._look_up(state, tokens)
        self.requests[request] = state
        return len(state.tokens)

    def reserve(self, request: str, new_tokens: int) -> bool:
        """Make room for the next ``new_tokens`` positions in both tiers.

        A second call before :meth:`commit` replaces the first.

        Returns
        -------
        bool
            ``False`` when the pages that are free or cached do not suffice; nothing has changed then.
        """
        state = self._request(request)
        if new_tokens < 1:
            raise ValueError(f"new_tokens={new_tokens}: at least 1")
        first, have = len(state.tokens) // self._page_size, len(state.pages)
        end = len(state.tokens) + new_tokens
        stop = -(-end // self._page_size)
        if stop == first + 1 <= have and state.windows[first] != NULL_PAGE:  # nearly every decode step
            state.reserved = new_tokens
            return True
        missing = max(0, stop - have)
        wanted = [j for part in self._kept(end) for j in range(max(first, part.start), part.stop) if not _at(state, j)]
        if missing > self.quantized.available or len(wanted) > self.windows.available:
            return False
        if stop - first > 1:
            wanted += self._junction_pages(state, first, end, wanted)
        if missing or wanted:
            try:
                pages = self.quantized.take(missing)
                try:
                    windows = self.windows.take(len(wanted))
                except BaseException:
                    self.quantized.put_back(pages)
                    raise
            except PoolExhausted:
                return False
            state.pages += pages
            state.windows += [NULL_PAGE] * missing
            for j, page in zip(wanted, windows, strict=True):
                state.windows[j] = page
        state.reserved = new_tokens
        if state.found:  # only now: who finds no room comes again and looks again
            self._count(state.found)
            state.found = None
        return True

    def commit(self, request: str, tokens: Sequence[int]) -> None:
        """The reserved positions now hold ``tokens``, in every layer and both stores.

        Full pages enter the prefix index; window pages that no later query reads are given up.
        """
        state = self._request(request)
        added = array("q", tokens)
        if len(added) != state.reserved:
            raise ValueError(f"request {request!r}: {len(added)} tokens committed, {state.reserved} reserved")
        before = len(state.tokens)
        state.tokens += added
        state.reserved = 0
        if before // self._page_size == len(state.tokens) // self._page_size:
            return
        if self.prefix_caching:
            self._publish(state)
        self._leave_windows(state, before)

    def table(self, request: str) -> tuple[list[int], list[int]]:
        """INT2 pages and window pages (0 where there is none) by page index.

        These are the pool's own lists, valid until its next call and not to be changed.
        """
        state = self._request(request)
        return state.pages, state.windows

    def length(self, request: str) -> int:
        """Tokens whose K and V are in the cache."""
        return len(self._request(request).tokens)

    def fork(self, request: str, child: str) -> None:
        """Register ``child`` with the full pages of ``request``; takes references only.

        ``length(child)`` is then the last page boundary; the tokens after it are the caller's to compute again.
        """
        state = self._request(request)
        if child in self.requests:
            raise ValueError(f"request {child!r}: already in the pool")
        full = len(state.tokens) // self._page_size
        length = full * self._page_size
        copy = Request(state.root, state.tokens[:length], state.pages[:full], [NULL_PAGE] * full, state.keys[:full])
        for part in self._kept(length):
            copy.windows[part.start : part.stop] = state.windows[part.start : part.stop]
            copy.junctions.append(part)
        self._hold(copy)
        self.requests[child] = copy

    def finish(self, request: str, *, keep: bool = True) -> None:
        """Forget ``request``. Its full pages stay in the prefix index until they are evicted.

        Without ``keep`` they leave the index, those that it shares too: for a request that failed, whose pages would
        spoil every later one that begins alike.
        """
        state = self._request(request)
        del self.requests[request]
        keys = state.keys if keep else []
        # Last page first, so that a page is never evicted before those that can only be found through it.
        for table, tier in ((state.pages, self.quantized), (state.windows, self.windows)):
            if not keep:
                for key in state.keys:
                    tier.withdraw(key)
            for i in range(len(table) - 1, -1, -1):
                if table[i] != NULL_PAGE:
                    tier.release(table[i], keys[i] if i < len(keys) else None)

    def preempt(self, request: str) -> list[int]:
        """Like :meth:`finish`; returns the committed token ids, to be admitted again."""
        tokens = self._request(request).tokens.tolist()
        self.finish(request)
        return tokens

    def stats(self) -> PoolStats:
        """Occupancy and counts, in constant time."""
        return PoolStats(
            quantized=self.quantized.stats(),
            windows=self.windows.stats(),
            requests=len(self.requests),
            lookups=self._lookups,
            lookup_tokens=self._lookup_tokens,
            hits=self._hits,
            hit_tokens=self._hit_tokens,
            window_misses=self._window_misses,
            window_miss_tokens=self._window_miss_tokens,
            demoted_tokens=self._demoted_tokens,
        )

    def check_integrity(self) -> None:
        """Recompute everything from the requests' tables.

        Raises
        ------
        IntegrityError
            Something does not add up.
        """
        integrity.check(self)

    def _request(self, request: str) -> Request:
        try:
            return self.requests[request]
        except KeyError:
            raise ValueError(f"request {request!r}: not in the pool") from None

    def _kept(self, length: int) -> tuple[range, range]:
        config = self.config
        return window_pages(length, sink=config.sink, recent=config.recent, page_size=self._page_size)

    def _look_up(self, state: Request, tokens: Sequence[int]) -> None:
        """Find the longest exact hit and put it into ``state``."""
        size, last = self._page_size, max(0, len(tokens) - 1)
        key = state.root
        keys: list[bytes] = []
        gaps: list[int] = []  # by page: the last page up to it that has no window page, -1 for none
        first_gap, gap = len(tokens), -1
        for i in range(last // size):
            key = chain(key, array("q", tokens[i * size : (i + 1) * size]))
            if key not in self.quantized.index:
                break
            if key not in self.windows.index:
                first_gap, gap = first_gap if gap >= 0 else i, i
            keys.append(key)
            gaps.append(gap)
        best = len(keys)
        while best:
            sink, recent = self._kept(best * size)
            if first_gap >= sink.stop and gaps[best - 1] < recent.start:
                break
            best -= 1
        state.tokens = array("q", tokens[: best * size])
        state.keys = keys[:best]
        state.pages = [self.quantized.index[k] for k in state.keys]
        state.windows = [NULL_PAGE] * best
        for part in self._kept(best * size):
            for j in part:
                state.windows[j] = self.windows.index[state.keys[j]]
        self._hold(state)
        prompt_end = range(self._kept(last - last % size)[1].start, len(tokens) // size)
        state.junctions = [self._kept(best * size)[1], self._kept(len(keys) * size)[1], prompt_end]
        state.found = len(tokens), best * size, (len(keys) - best) * size

    def _count(self, found: tuple[int, int, int]) -> None:
        looked_up, hit, missed = found
        self._lookups += 1
        self._lookup_tokens += looked_up
        self._hits += hit > 0
        self._hit_tokens += hit
        self._window_misses += missed > 0
        self._window_miss_tokens += missed

    def _hold(self, state: Request) -> None:
        for page in state.pages:
            self.quantized.hold(page)
        for page in state.windows:
            if page != NULL_PAGE:
                self.windows.hold(page)

    def _junction_pages(self, state: Request, first: int, end: int, wanted: list[int]) -> list[int]:
        """Window pages that the request does not need itself but that make a later hit possible; all or none."""
        if not self.prefix_caching:
            return []
        full = end // self._page_size
        extra = {j for part in state.junctions for j in range(max(first, part.start), min(part.stop, full))}
        extra = {j for j in extra.difference(wanted) if not _at(state, j)}
        left = self.windows.available - len(wanted) - len(extra)
        return sorted(extra) if left * HEADROOM >= len(self.windows.references) else []

    def _publish(self, state: Request) -> None:
        """Hash the pages that are full and not hashed yet, and put them into the index."""
        size = self._page_size
        for i in range(len(state.keys), len(state.tokens) // size):
            key = chain(state.keys[-1] if state.keys else state.root, state.tokens[i * size : (i + 1) * size])
            state.keys.append(key)
            self.quantized.publish(state.pages[i], key)
            if state.windows[i] != NULL_PAGE:
                self.windows.publish(state.windows[i], key)

    def _leave_windows(self, state: Request, before: int) -> None:
        """Give up the window pages that were kept at length ``before`` and are no longer."""
        sink, recent = self._kept(len(state.tokens))
        for j in range(max(self._kept(before)[1].start, sink.stop), recent.start):
            page = state.windows[j]
            if page == NULL_PAGE:
                continue
            state.windows[j] = NULL_PAGE
            key = state.keys[j] if j < len(state.keys) else None
            self.windows.release(page, key, cold=not any(j in part for part in state.junctions))
            self._demoted_tokens += self._page_size


def chain(parent: bytes, tokens: array[int]) -> bytes:
    """Key of a full page: a hash of its predecessor's key and its token ids."""
    return blake2b(parent + tokens.tobytes(), digest_size=32).digest()


def _root(salt: str) -> bytes:
    return blake2b(salt.encode(), digest_size=32, person=b"oscar-salt").digest()


def _at(state: Request, index: int) -> int:
    """Window page of a page index, 0 where there is none (yet)."""
    return state.windows[index] if index < len(state.windows) else NULL_PAGE

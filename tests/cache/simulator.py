"""An engine in miniature around the real pool: it remembers which token was written where, and checks every read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oscar_serving.cache.pool import CachePool
from oscar_serving.cache.rule import reads_window
from oscar_serving.config import OscarConfig

Tier = Literal["int2", "window"]


@dataclass
class Running:
    """A request as its user sees it; ``computed`` of its ``tokens`` are in the cache."""

    tokens: list[int]
    computed: int
    salt: str
    identity: int


class Simulator:
    """Runs requests through a :class:`CachePool`.

    ``content[tier, page][slot]`` is the identity of what was last written there: the salt and all tokens up to and
    including the one at this position, interned as a number. K and V of a token depend on all of that and nothing
    else, so two requests may read one slot exactly if their identities agree.
    """

    def __init__(self, config: OscarConfig, *, pages: int, window_pages: int, prefix_caching: bool = True) -> None:
        self.config = config
        self.pool = CachePool(config, pages=pages, window_pages=window_pages, prefix_caching=prefix_caching)
        self.content: dict[tuple[Tier, int], list[int]] = {}
        self.running: dict[str, Running] = {}
        self._identities: dict[tuple[int | str, int], int] = {}

    # What a user does -------------------------------------------------------------------------------------------------

    def admit(self, name: str, tokens: Sequence[int], salt: str = "") -> int:
        """Start a request; the hit must be the longest that the position rule allows."""
        expected = self.longest_hit(tokens, salt) if self.pool.prefix_caching else 0
        before = self._occupied()
        hit = self.pool.admit(name, tokens, salt=salt)
        assert hit == expected, f"hit {hit}, the model says {expected}"
        assert hit == self.pool.length(name)
        assert self._occupied() == before, "admission took or evicted pages"
        self.running[name] = Running(list(tokens), hit, salt, len(self.running))
        return hit

    def step(self, name: str, count: int, generated: int = 0, abandoned: int = 0) -> bool:
        """Compute the next ``count`` tokens, ``generated`` where there are none yet; ``False`` if there is no room.

        With ``abandoned``, that many tokens are reserved first and then given up for ``count``.
        """
        request = self.running[name]
        if abandoned:
            self.pool.reserve(name, abandoned)
            self.pool.check_integrity()
        before = self._snapshot()
        if not self.pool.reserve(name, count):
            assert self._snapshot() == before, "a failed reservation changed something"
            return False
        self.pool.check_integrity()
        end = request.computed + count
        request.tokens += [generated] * (end - len(request.tokens))
        self._write(name, request.computed, end)
        for query in sorted({request.computed, (request.computed + end) // 2, end - 1}):
            self._read(name, query, request.computed)
        self.pool.commit(name, request.tokens[request.computed : end])
        request.computed = end
        assert self.pool.length(name) == end
        # A decode step must be able to follow, wherever the request stands.
        self._read(name, end, end)
        return True

    def fork(self, name: str, child: str) -> None:
        """A child with the same tokens; it must compute those after the last page boundary itself."""
        parent = self.running[name]
        before = self._occupied()
        self.pool.fork(name, child)
        assert self._occupied() == before
        size = self.config.page_size
        assert self.pool.length(child) == parent.computed // size * size
        self.running[child] = Running(list(parent.tokens), self.pool.length(child), parent.salt, len(self.running))
        self._read(child, self.running[child].computed, self.running[child].computed)

    def finish(self, name: str, *, keep: bool = True) -> None:
        """End a request."""
        self.pool.finish(name, keep=keep)
        request = self.running.pop(name)
        if not keep:
            assert self.longest_hit([*request.tokens[: request.computed], 0], request.salt) == 0

    def preempt(self, name: str) -> Running:
        """Take a request's pages; what is returned can be admitted again."""
        request = self.running.pop(name)
        assert self.pool.preempt(name) == request.tokens[: request.computed]
        return request

    def check(self) -> None:
        """Integrity, and what the simulator itself can count."""
        self.pool.check_integrity()
        stats = self.pool.stats()
        assert stats.requests == len(self.running)
        for tier, held in zip((stats.quantized, stats.windows), self._held(), strict=True):
            assert tier.used == len(held)
            assert tier.total == tier.used + tier.cached + tier.free
        if not self.pool.prefix_caching:
            assert stats.quantized.cached == stats.windows.cached == 0

    # What should be ---------------------------------------------------------------------------------------------------

    def longest_hit(self, tokens: Sequence[int], salt: str) -> int:
        """From the contents of the pages: the longest aligned prefix that can be continued exactly."""
        size = self.config.page_size
        prefix = self.identities(tokens, salt)
        findable: dict[Tier, set[int]] = {"int2": set(), "window": set()}
        for kind, tier in (("int2", self.pool.quantized), ("window", self.pool.windows)):
            for page in tier.index.values():
                findable[kind].add(self.content[kind, page][-1])  # type: ignore[index]
        best = 0
        for length in range(size, len(tokens), size):
            if prefix[length - 1] not in findable["int2"]:
                break
            read = {k // size for k in range(length) if self._rule(k, length)}
            if all(prefix[page * size + size - 1] in findable["window"] for page in read):
                best = length
        return best

    def identities(self, tokens: Sequence[int], salt: str) -> list[int]:
        """By position: a number for the salt and the tokens up to it."""
        result: list[int] = []
        state: int | str = salt
        for token in tokens:
            state = self._identities.setdefault((state, token), len(self._identities))
            result.append(state)
        return result

    def _rule(self, key: int, query: int) -> bool:
        return reads_window(key, query, sink=self.config.sink, recent=self.config.recent)

    def _write(self, name: str, start: int, end: int) -> None:
        """Write the tokens ``start … end`` to both stores, as a kernel does."""
        request, size = self.running[name], self.config.page_size
        prefix = self.identities(request.tokens[:end], request.salt)
        holders = self._held()
        pages, windows = self.pool.table(name)
        for position in range(start, end):
            for tier, table, held, keys in (
                ("int2", pages, holders[0], self.pool.quantized.keys),
                ("window", windows, holders[1], self.pool.windows.keys),
            ):
                page = table[position // size]
                if page == 0:
                    assert tier == "window", f"position {position} has no INT2 page"
                    continue
                assert held[page] == 1, f"writing to {tier} page {page}, which {held[page]} requests hold"
                assert keys[page] is None, f"writing to {tier} page {page}, which is in the prefix index"
                slots = self.content.setdefault((tier, page), [-1] * size)  # type: ignore[arg-type]
                slots[position % size] = prefix[position]

    def _read(self, name: str, query: int, chunk_start: int) -> None:
        """Read every key before the chunk as the query at ``query`` does."""
        request, size = self.running[name], self.config.page_size
        prefix = self.identities(request.tokens[:chunk_start], request.salt)
        pages, windows = self.pool.table(name)
        for key in range(chunk_start):
            page = pages[key // size]
            assert self.content["int2", page][key % size] == prefix[key], f"INT2 page {page} holds another token"
            if self._rule(key, query):
                page = windows[key // size]
                assert page, f"query {query} has no window page for key {key}"
                assert self.content["window", page][key % size] == prefix[key], f"window page {page}: another token"

    def _held(self) -> tuple[Counter[int], Counter[int]]:
        """By page: how many requests hold it."""
        int2: Counter[int] = Counter()
        window: Counter[int] = Counter()
        for name in self.running:
            pages, windows = self.pool.table(name)
            int2.update(pages)
            window.update(page for page in windows if page)
        return int2, window

    def _occupied(self) -> list[int]:
        stats = self.pool.stats()
        return [n for t in (stats.quantized, stats.windows) for n in (t.free, t.used + t.cached, t.evictions)]

    def _snapshot(self) -> object:
        tables = {name: tuple(map(tuple, self.pool.table(name))) for name in self.running}
        tiers = self.pool.quantized, self.pool.windows
        return tables, [(list(t.free), dict(t.index), list(t.references), list(t.cold), list(t.warm)) for t in tiers]

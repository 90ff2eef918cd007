"""The workload of :mod:`.workload` passes on the pool as it is, and fails on each of these variants of it."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from oscar_serving.cache import pool as pool_module
from oscar_serving.cache import rule as rule_module
from oscar_serving.cache.pool import CachePool
from oscar_serving.cache.tier import Tier

from .test_known_failures import lose_the_sink
from .workload import run_everywhere

BUGS: dict[str, tuple[Any, str, str, str]] = {
    "a hit takes no reference": (Tier, "hold", "self.references[page] += 1", "pass"),
    "a cached page that is hit stays evictable": (Tier, "hold", "self._uncache(page)", "pass"),
    "released at the first of two releases": (Tier, "release", "if self.references[page]:", "if False:"),
    "never released": (Tier, "release", "self.references[page] -= 1", "pass"),
    "a page that is cached is free as well": (
        Tier,
        "release",
        "] = None\n",
        "] = None\n        self.free.append(page)\n",
    ),
    "a free page keeps its hash": (Tier, "_evict", "self.keys[page] = None", "pass"),
    "an evicted page stays in the index": (Tier, "_evict", "del self.index[key]", "pass"),
    "the null page is handed out": (Tier, "__init__", "range(pages - 1, NULL_PAGE, -1)", "range(pages - 1, -1, -1)"),
    "a page handed out is not counted": (Tier, "take", "self.references[page] = 1", "pass"),
    "a second copy takes over the hash": (Tier, "publish", "self.keys[page] is None and key not in self.index", "True"),
    "a page's hash leaves out what precedes it": (pool_module, "chain", "parent + tokens", "b'' + tokens"),
    "a page's hash leaves out its last token": (pool_module, "chain", "tokens.tobytes()", "tokens[:-1].tobytes()"),
    "the salt is ignored": (pool_module, "_root", "salt.encode()", "b''"),
    "a hit of the whole prompt": (CachePool, "_look_up", "len(tokens) - 1", "len(tokens)"),
    "a hit without its sink": (CachePool, "_look_up", "first_gap >= sink.stop and ", ""),
    "a hit without its recent windows": (CachePool, "_look_up", " and gaps[best - 1] < recent.start", ""),
    "a shorter hit than possible": (CachePool, "_look_up", "best = len(keys)", "best = len(keys) // 2"),
    "a hit that takes no windows": (CachePool, "_look_up", "for j in part:", "for j in ():"),
    "a failed reservation keeps its pages": (
        CachePool,
        "reserve",
        "        return False\n    if stop - first",
        "        state.pages += self.quantized.take(1)\n        return False\n    if stop - first",
    ),
    "a reservation of one page too few": (CachePool, "reserve", "stop - have)", "stop - have - 1)"),
    "windows only for the last page of a chunk": (CachePool, "reserve", "if not _at(state, j)]", "if j == stop - 1]"),
    "windows leave before the chunk reads them": (
        CachePool,
        "reserve",
        "state.found = None\n    return True",
        "self._leave_windows(state, 0)\n    state.windows[: first - 1] = [0] * max(first - 1, 0)\n    return True",
    ),
    "windows never leave": (CachePool, "_leave_windows", "state.windows[j] = NULL_PAGE", "continue"),
    "windows leave without being released": (CachePool, "_leave_windows", "self.windows.release(page, key,", "dict("),
    "the sink leaves with the window": (
        CachePool,
        "_leave_windows",
        "max(self._kept(before)[1].start, sink.stop)",
        "0",
    ),
    "a page is published before it is full": (
        CachePool,
        "_publish",
        "len(state.tokens) // size)",
        "-(-len(state.tokens) // size))",
    ),
    "windows are published under the next page's hash": (
        CachePool,
        "_publish",
        "self.windows.publish(state.windows[i], key)",
        "self.windows.publish(state.windows[i - 1], key)",
    ),
    "a fork shares the page that is being written": (
        CachePool,
        "fork",
        "full = len(state.tokens) // self._page_size",
        "full = -(-len(state.tokens) // self._page_size)",
    ),
    "a fork takes no reference": (CachePool, "fork", "self._hold(copy)", "pass"),
    "a fork forgets its windows": (CachePool, "fork", "copy.windows[part.start : part.stop] =", "_ ="),
    "finish forgets a tier": (
        CachePool,
        "finish",
        "((state.pages, self.quantized), (state.windows, self.windows))",
        "((state.pages, self.quantized),)",
    ),
    "finish caches a page that is not full": (
        CachePool,
        "finish",
        "keys[i] if i < len(keys) else None",
        "(state.keys + [b'?'])[min(i, len(state.keys))]",
    ),
    "one recent position too few": (rule_module, "window_start", "length - recent + 1", "length - recent + 17"),
    "the sink is rounded down": (
        rule_module,
        "window_pages",
        "-(-min(sink, length) // page_size)",
        "sink // page_size",
    ),
    "windows reach back from the end, not from the last page boundary": (
        rule_module,
        "window_pages",
        "window_start(boundary, recent)",
        "window_start(length, recent)",
    ),
}


#: What catches a bug that random work does not come upon.
SCENARIOS = {"a hit without its sink": lose_the_sink}


def plant(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Replace ``old`` by ``new`` in the source of a function of ``owner``."""
    original: Callable[..., Any] = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(original))
    assert source.count(old) == 1, f"{name} has changed: {old!r} occurs {source.count(old)} times"
    namespace: dict[str, Any] = {}
    exec("from __future__ import annotations\n" + source.replace(old, new), original.__globals__, namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    if isinstance(owner, ModuleType) and owner is not pool_module and hasattr(pool_module, name):
        monkeypatch.setattr(pool_module, name, namespace[name])


def test_no_bug() -> None:
    simulators = run_everywhere()
    stats = [simulator.pool.stats() for simulator in simulators]
    # The workload reaches what it is meant to reach.
    assert all(s.hits for s in stats)
    assert any(s.quantized.evictions for s in stats)
    assert any(s.windows.evictions for s in stats)
    assert any(s.window_misses for s in stats)
    assert any(s.demoted_tokens for s in stats)


@pytest.mark.parametrize("bug", BUGS)
def test_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *BUGS[bug])
    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        SCENARIOS.get(bug, run_everywhere)()

"""What went wrong in the published implementations and in other engines' pools, one test each."""

from __future__ import annotations

import pytest

from oscar_serving.cache.pool import CachePool
from oscar_serving.config import OscarConfig

from .simulator import Simulator

CONFIG = OscarConfig(sink=16, recent=32, page_size=16)


def simulator(*, pages: int = 100, window_pages: int = 100, prefix_caching: bool = True) -> Simulator:
    return Simulator(CONFIG, pages=pages, window_pages=window_pages, prefix_caching=prefix_caching)


def compute(sim: Simulator, name: str, chunk: int | None = None) -> None:
    """Prefill what is left of a request."""
    request = sim.running[name]
    while left := len(request.tokens) - request.computed:
        assert sim.step(name, min(chunk or left, left))
        sim.check()


def test_pages_are_counted_not_assumed() -> None:
    """1: a count set to its target instead of what happened freed pages twice."""
    sim = simulator(pages=8, window_pages=8)
    sim.admit("a", range(40))
    assert sim.pool.reserve("a", 40)
    sim.check()
    assert sim.pool.stats().quantized.used == 3
    assert not sim.pool.reserve("a", 16 * 8)  # more than there is: what was reserved before stays
    assert sim.pool.reserve("a", 10)  # less than before
    sim.check()
    with pytest.raises(ValueError, match="40 tokens committed, 10 reserved"):
        sim.pool.commit("a", range(40))
    sim.check()
    sim.finish("a")  # reserved, never computed
    sim.check()
    assert sim.pool.stats().quantized.free == sim.pool.stats().windows.free == 7
    with pytest.raises(ValueError, match="'a': not in the pool"):
        sim.pool.finish("a")
    sim.check()


@pytest.mark.parametrize("length", range(1, 67))
def test_a_hit_leaves_a_token_to_compute(length: int) -> None:
    """3: matching again after insertion bypassed the cap on the match length."""
    sim = simulator()
    sim.admit("first", range(length))
    compute(sim, "first")
    table = tuple(map(list, sim.pool.table("first")))
    assert sim.admit("second", range(length)) == (length - 1) // 16 * 16
    compute(sim, "second")
    assert sim.pool.length("first") == length
    assert tuple(map(list, sim.pool.table("first"))) == table, "a running request's pages were exchanged"
    sim.finish("first")
    assert sim.admit("third", range(length)) == (length - 1) // 16 * 16


def test_both_tiers_move_together() -> None:
    """4: caches beside the main one, keyed by slot, were not moved with the slot."""
    sim = simulator()
    sim.admit("parent", range(100))
    compute(sim, "parent")
    sim.fork("parent", "child")  # each of these reads both tiers at every position of the rule, page by page
    compute(sim, "child")
    again = sim.preempt("parent")
    sim.admit("stranger", [5] * 100)
    compute(sim, "stranger")
    assert sim.admit("parent", [*again.tokens, 1]) == 96
    compute(sim, "parent")
    sim.check()


def test_a_hit_needs_its_recent_windows() -> None:
    """6: a prefix hit found windows that were not there."""
    sim = simulator(window_pages=100)
    sim.admit("first", range(200))
    compute(sim, "first")  # in one chunk: windows of the sink and of its end alone
    sim.finish("first")
    assert sim.admit("continued", range(300)) == 192
    assert sim.admit("branch", [*range(100), *[7] * 50]) == 16, "INT2 is there up to 96, the windows of 64 … 96 are not"
    assert sim.pool.stats().lookups == 1, "not counted before the request has room"
    compute(sim, "continued")
    compute(sim, "branch")
    stats = sim.pool.stats()
    assert (stats.lookups, stats.window_misses, stats.window_miss_tokens) == (3, 1, 80)


def lose_the_sink() -> None:
    """INT2 pages and recent windows of a prefix are cached, its sink is not."""
    sim = simulator(window_pages=12)
    sim.admit("first", range(16))
    sim.admit("copy", range(16))
    compute(sim, "first")
    compute(sim, "copy")  # its own sink page is a second copy, not in the index
    sim.running["copy"].tokens += range(16, 112)
    compute(sim, "copy", chunk=16)
    sim.finish("first")
    strangers = 0
    while sim.pool.windows.cold or sim.pool.windows.warm:  # evict what nobody holds
        strangers += 1
        sim.admit(f"stranger {strangers}", [9] * 16, str(strangers))
        compute(sim, f"stranger {strangers}")
    for stranger in range(1, strangers + 1):
        sim.finish(f"stranger {stranger}")
    assert sim.admit("second", range(200)) == 0
    compute(sim, "second", chunk=16)


def test_a_hit_needs_its_sink() -> None:
    lose_the_sink()


@pytest.mark.parametrize("chunk", [None, 16, 24, 64])
def test_a_preempted_request_finds_its_windows(chunk: int | None) -> None:
    """6: the same for a request that comes back."""
    sim = simulator()
    sim.admit("a", range(150))
    compute(sim, "a", chunk)
    for _ in range(37):
        assert sim.step("a", 1)
    again = sim.preempt("a")
    assert sim.admit("a", again.tokens) == 176
    compute(sim, "a")


def test_generated_tokens_are_cached() -> None:
    """8: the next turn computed the previous answer again."""
    sim = simulator()
    sim.admit("turn 1", range(50))
    compute(sim, "turn 1")
    for token in range(100):
        assert sim.step("turn 1", 1, generated=1000 + token)
    history = sim.running["turn 1"].tokens
    assert sim.admit("while it runs", [*history, 1]) == 144
    sim.finish("turn 1")
    sim.finish("while it runs")
    assert sim.admit("turn 2", [*history, *range(30)]) == 144
    compute(sim, "turn 2")


def test_exhaustion_evicts_then_refuses() -> None:
    """9: exhaustion raised, though there were pages to evict or requests to preempt."""
    sim = simulator(pages=11, window_pages=11)
    sim.admit("old", range(80))
    compute(sim, "old")
    sim.finish("old")
    assert sim.pool.stats().quantized.cached == 5
    sim.admit("a", [1] * 100)
    assert sim.step("a", 100)  # 7 pages, 5 of them free
    assert sim.pool.stats().quantized.evictions == 2
    sim.admit("b", [2] * 100)
    assert not sim.step("b", 100)
    sim.check()
    again = sim.preempt("a")
    assert sim.step("b", 100)
    sim.finish("b")
    sim.admit("a", again.tokens)
    compute(sim, "a")
    sim.check()


def test_a_whole_pool_of_cached_pages_is_as_good_as_free() -> None:
    """A pool pinned at 100 % by its prefix cache served garbage, or nothing."""
    sim = simulator(pages=11, window_pages=11)
    for round_ in range(20):
        sim.admit("a", [round_] * 150)
        compute(sim, "a", chunk=40)
        sim.finish("a")
        sim.check()
    stats = sim.pool.stats()
    assert (stats.quantized.used, stats.quantized.cached + stats.quantized.free) == (0, 10)


def test_the_beginning_of_a_chain_is_evicted_last() -> None:
    """Evicted from the front, a cached prompt is of no use although most of its pages are there."""
    sim = simulator(pages=21, window_pages=100)
    sim.admit("first", range(160))
    sim.admit("copy", range(160))
    compute(sim, "first", chunk=16)
    compute(sim, "copy", chunk=16)
    sim.finish("first")
    sim.finish("copy")
    sim.admit("stranger", [9] * 256)  # 16 pages: 10 free, 6 evicted
    compute(sim, "stranger")
    assert sim.pool.stats().quantized.evictions == 6
    assert sim.admit("again", range(160)) == 64


def test_salts_do_not_mix() -> None:
    """One adapter's pages served another."""
    sim = simulator()
    for salt in ("", "adapter", "adaptes"):
        assert sim.admit(f"first {salt}", range(100), salt) == 0
        compute(sim, f"first {salt}")
        assert sim.admit(f"second {salt}", range(100), salt) == 96
        sim.fork(f"second {salt}", f"child {salt}")
        compute(sim, f"child {salt}")


def test_decoding_holds_a_bounded_window() -> None:
    """Tokens that leave the window were never demoted."""
    sim = simulator(window_pages=20)
    sim.admit("a", range(10))
    compute(sim, "a")
    for step in range(1000):
        assert sim.step("a", 1, generated=step)
        assert sim.pool.stats().windows.used <= 1 + 3
    assert sim.pool.stats().demoted_tokens == 16 * (1010 // 16 - 2 - 1)


def test_without_prefix_caching_nothing_is_kept() -> None:
    sim = simulator(prefix_caching=False)
    sim.admit("a", range(100))
    compute(sim, "a")
    assert sim.admit("b", range(100)) == 0
    sim.fork("a", "child")
    compute(sim, "child")
    for name in ("a", "b", "child"):
        sim.finish(name)
    sim.check()
    assert sim.pool.stats().quantized.free == 99
    assert sim.pool.stats().lookups == 0


class TestJunctions:
    """Windows of places where other requests may continue."""

    def test_a_shared_prompt_is_found_from_its_third_use_on(self) -> None:
        """The first one does not know that it will be shared; the second one writes the windows in passing."""
        sim = simulator()
        for turn, hit in enumerate([0, 16, 96, 96]):
            tokens = [*range(100), *[1000 + turn] * 200]
            assert sim.admit(str(turn), tokens) == hit
            compute(sim, str(turn))
            sim.finish(str(turn))

    def test_it_outlives_long_answers(self) -> None:
        """Windows that a long answer leaves behind are evicted before those at junctions."""
        sim = simulator(pages=200, window_pages=24)
        for turn in range(2):
            sim.admit(str(turn), [*range(100), *[1000 + turn] * 200])
            compute(sim, str(turn))
            sim.finish(str(turn))
        sim.admit("long", [*range(100), 5])
        compute(sim, "long")
        for step in range(600):
            assert sim.step("long", 1, generated=step)
        assert sim.pool.stats().windows.evictions > 10
        assert sim.admit("again", [*range(100), 6]) == 96

    @pytest.mark.parametrize("length", [95, 96, 97])
    def test_the_end_of_a_prompt_outlives_its_answer(self, length: int) -> None:
        sim = simulator()
        sim.admit("first", range(length))
        compute(sim, "first")
        for step in range(300):
            assert sim.step("first", 1, generated=step)
        assert sim.admit("regenerate", range(length)) == (length - 1) // 16 * 16
        assert sim.admit("another turn", [*range(length), 9]) == length // 16 * 16

    def test_they_never_take_what_others_need(self) -> None:
        """Without room to spare, windows at junctions are not written."""
        sim = simulator(pages=200, window_pages=8)
        for turn, hit in enumerate([0, 16, 16]):
            assert sim.admit(str(turn), [*range(100), *[1000 + turn] * 200]) == hit
            compute(sim, str(turn))
            assert sim.pool.stats().windows.used <= 4
            sim.finish(str(turn))
            sim.check()


def test_misuse_is_an_error() -> None:
    pool = CachePool(CONFIG, pages=4, window_pages=4)
    pool.admit("a", [1])
    for call, message in [
        (lambda: pool.admit("a", [1]), "'a': already in the pool"),
        (lambda: pool.fork("a", "a"), "'a': already in the pool"),
        (lambda: pool.fork("b", "c"), "'b': not in the pool"),
        (lambda: pool.reserve("a", 0), "new_tokens=0: at least 1"),
        (lambda: pool.commit("a", [1]), "1 tokens committed, 0 reserved"),
        (lambda: pool.table("b"), "'b': not in the pool"),
        (lambda: CachePool(CONFIG, pages=1, window_pages=4), "pages=1: .* at least 2"),
        (lambda: CachePool(CONFIG, pages=4, window_pages=0), "window_pages=0: .* at least 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert pool.reserve("a", 1)
    for tokens in (["x"], [2**63]):
        with pytest.raises((TypeError, OverflowError)):
            pool.commit("a", tokens)  # type: ignore[arg-type]
    pool.commit("a", [1])
    pool.check_integrity()

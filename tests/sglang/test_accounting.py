"""Slots, rows and sinks under SGLang's real allocator, radix cache, request pool and requests: random traffic."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oscar_serving.config import OscarConfig
from oscar_serving.engines.sglang.options import PAGE, WINDOW_PAGE
from oscar_serving.engines.sglang.rows import Rows
from oscar_serving.engines.sglang.store import ring_pages
from oscar_serving.engines.sglang.transforms import Calibration

SINK, RECENT, ROWS = 16, 96, 4
CONFIG = OscarConfig(page_size=PAGE, sink=SINK, recent=RECENT)
RING = ring_pages(CONFIG) * WINDOW_PAGE


@pytest.fixture(scope="module", autouse=True)
def loaded() -> Iterator[None]:
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    load_plugins()
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE))
    with get_parallel().override(attn_tp_rank=0, attn_tp_size=1):
        yield


class Scheduler:
    """What SGLang's scheduler does with a request, around the real pools; each read checks what a slot holds.

    A token stands for all tokens before it too: slots, rings and sinks remember the hash of the prefix they were
    written with, so a slot that was freed too early, a ring of an earlier request or another prompt's sink is seen.
    """

    def __init__(self, pages: int, seed: int) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType

        from oscar_serving.engines.sglang.pool import OscarKVPool
        from oscar_serving.engines.sglang.radix import OscarRadixCache

        self.rng = random.Random(seed)
        kind = {"calibration": Calibration(CONFIG, None), "running": ROWS, "kind": torch.bfloat16}
        self.pool = type("Pool", (OscarKVPool,), kind)(
            size=pages * PAGE, page_size=PAGE, dtype=torch.uint8, head_num=1, head_dim=16, layer_num=1, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        self.pages = pages
        self.allocator = PagedTokenToKVPoolAllocator(pages * PAGE, PAGE, torch.uint8, "cpu", self.pool, False)
        self.allocator.use_triton_kernels = False
        self.requests = ReqToTokenPool(ROWS, 2048, "cpu", False)
        self.requests.oscar_rows = self.pool.rows
        self.cache = OscarRadixCache(
            CacheInitParams(
                disable=False, req_to_token_pool=self.requests, token_to_kv_pool_allocator=self.allocator,
                page_size=PAGE, tree_components=(ComponentType.FULL,), tree_core_backend="python",
            )
        )  # fmt: skip
        self.running: list[Any] = []
        self.waiting: list[Any] = []
        self.slots: dict[int, int] = {}
        self.rings: dict[tuple[int, int], int] = {}
        self.sinks: dict[tuple[int, int], int] = {}
        self.hits = self.retractions = self.steps = 0

    def submit(self, name: str, tokens: list[int], salt: str) -> None:
        """A new request, waiting."""
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.waiting.append(Req(name, "", array("q", tokens), SamplingParams(max_new_tokens=400), cache_salt=salt))

    # Steps ------------------------------------------------------------------------------------------------------------

    def admit(self, chunk: int) -> None:
        """Start the first waiting request, if a row and pages are free."""
        if not self.waiting or not self.requests.available_size():
            return
        request = self.waiting[0]
        request.init_next_round_input(self.cache)
        total = len(request.full_untruncated_fill_ids)
        assert request.prefix_len <= max(0, total - RECENT), "a hit reaches into the window of the first decode"
        request.lock = self.cache.lock(request.last_node)  # first: the pages of the hit can then not be evicted
        if self.allocator.available_size() + self.cache.evictable_size() < total - request.prefix_len + 2 * PAGE:
            self.cache.unlock(request.lock)
            request.lock = None
            return
        self.waiting.pop(0)
        self.hits += request.prefix_len > 0
        self.running.append(request)
        self.extend(request, chunk)

    def extend(self, request: Any, chunk: int) -> None:
        """Compute the next chunk of a prompt."""
        from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache

        request.refresh_fill_ids()
        total = len(request.full_untruncated_fill_ids)
        start = request.prefix_len
        request.extend_end = stop = min(total, start + chunk)
        if request.kv.holds_kv:
            prefix = self.requests.req_to_token[request.kv.req_pool_idx, :start].long()
        else:
            prefix = self.cache.prefix_device_indices(request) if start else torch.empty(0, dtype=torch.int64)
        assert self.requests.alloc([request]) is not None
        evict_from_tree_cache(self.cache, stop - start + PAGE)
        lengths = [torch.tensor([n]) for n in (start, start, stop, stop)]
        last = prefix[-1:] if start else torch.tensor([-1])
        new = self.allocator.alloc_extend(*lengths, last, stop - start)
        assert new is not None, "admission counted wrong"
        row = request.kv.req_pool_idx
        self.requests.write((row, slice(0, start)), prefix.int())
        self.requests.write((row, slice(start, stop)), new.int())
        request.kv.kv_allocated_len = request.kv.kv_committed_len = stop
        self.compute(request, start, stop)
        if stop < total:
            checkpoint_kv_cache(request, self.cache)
        else:
            request.output_ids.append(self.rng.randrange(3))
            checkpoint_kv_cache(request, self.cache)

    def decode(self, request: Any) -> None:
        """Compute one token; retract somebody where there is no page."""
        from sglang.srt.mem_cache.common import evict_from_tree_cache

        length = request.kv.kv_committed_len
        while length % PAGE == 0 and self.allocator.available_size() < PAGE:
            evict_from_tree_cache(self.cache, PAGE)
            if self.allocator.available_size() >= PAGE:
                break
            victim = self.running[-1]
            self.retract(victim)
            if victim is request:
                return
        row = request.kv.req_pool_idx
        new = self.allocator.alloc_decode(
            torch.tensor([length + 1]), torch.tensor([length + 1]), self.requests.req_to_token[row, length - 1 : length]
        )
        self.requests.write((row, length), new.int())
        request.kv.kv_allocated_len = request.kv.kv_committed_len = length + 1
        self.compute(request, length, length + 1)
        request.output_ids.append(self.rng.randrange(3))

    def finish(self, request: Any, *, abort: bool = False) -> list[int]:
        """End a request; its tokens."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH
        from sglang.srt.mem_cache.common import release_kv_cache

        self.running.remove(request)
        request.finished_reason = FINISH_ABORT("") if abort else FINISH_LENGTH(length=0)
        release_kv_cache(request, self.cache, checkpoint=not abort)
        return list(request.origin_input_ids + request.output_ids)

    def retract(self, request: Any) -> None:
        """Take a request's row and pages; it waits with its output so far."""
        from sglang.srt.managers.schedule_batch import release_req

        self.running.remove(request)
        release_req(
            req=request, remaing_req_count=len(self.running), req_to_token_pool=self.requests,
            token_to_kv_pool_allocator=self.allocator, tree_cache=self.cache, hisparse_coordinator=None,
        )  # fmt: skip
        self.waiting.insert(0, request)
        self.retractions += 1

    # What the device would do -----------------------------------------------------------------------------------------

    def compute(self, request: Any, start: int, stop: int) -> None:
        """Write tokens ``start … stop`` to slots, ring and sink, and check every key that they read."""
        self.steps += 1
        tokens = (request.origin_input_ids + request.output_ids)[:stop]
        seed = hash(request.cache_salt)
        prefix = list(itertools.accumulate(tokens, lambda h, t: hash((h, t)), initial=seed))[1:]
        row = request.kv.req_pool_idx
        state = self.pool.rows.open_rows[row]
        place = self.requests.req_to_token[row, :stop].tolist()
        for p in range(start, stop):
            self.slots[place[p]] = prefix[p]
            if state.writes and p < SINK:
                self.sinks[state.sink, p] = prefix[p]
        self._read(state, row, place, prefix, start, own=start)  # the first query of the chunk reads the old ring
        for p in range(max(start, stop - RECENT), stop):
            self.rings[row, p % RING] = prefix[p]
        if stop == start + 1:
            self._read(state, row, place, prefix, start, own=stop)

    def _read(self, state: Any, row: int, place: list[int], prefix: list[int], query: int, own: int) -> None:
        for key in range(min(query + 1, len(prefix))):
            assert place[key] >= PAGE, "a token lies in the null page"
            assert self.slots[place[key]] == prefix[key], "a slot holds another token"
            if key < SINK and state.sink and (key < own or not state.writes):
                assert self.sinks[state.sink, key] == prefix[key], "a sink holds another token"
            elif query - RECENT < key < own and key >= state.valid_from:
                assert self.rings[row, key % RING] == prefix[key], "a stale ring"

    def check(self) -> None:
        """Every page is free, in the tree or a running request's own, and in no two of them."""
        self.pool.rows.check_integrity()
        rows = {r.kv.req_pool_idx for r in self.running}
        assert set(self.pool.rows.open_rows) == rows, "an ended request keeps its row, or a running one has none"
        free = self.allocator.get_all_free_pages().tolist()
        assert len(free) == len(set(free)), "a page is free twice"
        own: list[int] = []
        for r in self.running:
            place = self.requests.req_to_token[r.kv.req_pool_idx, : r.kv.kv_allocated_len]
            own += sorted({int(s) // PAGE for s in place[r.kv.cache_protected_len :].tolist()})
        assert len(own) == len(set(own)), "two requests own a page"
        assert not set(own) & set(free), "a page in use is free"
        tree = (self.cache.evictable_size() + self.cache.protected_size()) // PAGE
        assert len(free) + len(own) + tree == self.pages, f"{len(free)} free, {len(own)} own, {tree} in the tree"


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), pages=st.integers(12, 60), chunk=st.sampled_from([64, 100, 256, 1024]))
def test_random_traffic(seed: int, pages: int, chunk: int) -> None:
    """Insert, match, evict, retract, abort, flush: no page or row is lost, freed twice, or read stale."""
    traffic(seed, pages, chunk)


def traffic(seed: int, pages: int, chunk: int) -> None:
    """Sixty random events, each followed by a check of everything; then the end."""
    scheduler = Scheduler(pages, seed)
    rng = random.Random(seed)
    history = [[rng.randrange(3) for _ in range(rng.randrange(1, 300))] for _ in range(3)]
    for i in range(60):
        action = rng.random()
        if action < 0.35 and len(scheduler.waiting) < 4:
            base = rng.choice(history)
            base = base[: rng.choice([len(base), rng.randrange(len(base) + 1)])]
            tokens = [*base, *(rng.randrange(3) for _ in range(rng.randrange(1, 200)))]
            scheduler.submit(str(i), tokens[: (pages - 4) * PAGE // 2], rng.choice(["", "", "tenant"]))
        elif action < 0.6:
            scheduler.admit(chunk)
        elif action < 0.7 and scheduler.running:
            request = rng.choice(scheduler.running)
            if request.output_ids:
                history.append(scheduler.finish(request, abort=rng.random() < 0.3))
        elif action < 0.75 and scheduler.running:
            request = rng.choice(scheduler.running)
            if request.output_ids:
                scheduler.retract(request)
        elif action < 0.77:
            scheduler.cache.evict(_evict(rng.randrange(1, 4) * PAGE))
        else:
            step(scheduler, chunk, rng.choice([1, 1, 12, 70]))
        scheduler.check()
    drain(scheduler, chunk)


def _evict(tokens: int) -> Any:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    return EvictParams(num_tokens=tokens)


def step(scheduler: Scheduler, chunk: int, tokens: int) -> None:
    """Let every running request go on: its next chunk, or some tokens."""
    for request in list(scheduler.running):
        for _ in range(tokens):
            if request not in scheduler.running:
                break
            left = len(request.origin_input_ids + request.output_ids) - request.kv.kv_committed_len
            if left > 1 or not request.output_ids:
                room = scheduler.allocator.available_size() + scheduler.cache.evictable_size()
                if room < min(left, chunk) + PAGE:
                    scheduler.retract(request)
                    break
                scheduler.extend(request, chunk)
                break
            scheduler.decode(request)


def drain(scheduler: Scheduler, chunk: int) -> None:
    """Finish everything; empty the tree; nothing may be missing."""
    for request in list(scheduler.running):
        scheduler.finish(request, abort=not request.output_ids)
    scheduler.check()
    assert scheduler.requests.available_size() == ROWS
    scheduler.cache.evict(_evict(scheduler.pages * PAGE))
    scheduler.check()
    assert scheduler.allocator.available_size() == scheduler.pages * PAGE
    scheduler.cache.reset()
    assert not scheduler.pool.rows.published
    assert len(scheduler.pool.rows._free) == scheduler.pool.rows.sinks


def test_a_tiny_pool_retracts_and_loses_nothing() -> None:
    """Many conversations on a pool that holds two: every kind of event happens."""
    scheduler = Scheduler(14, 5)
    rng = random.Random(7)
    system = [rng.randrange(3) for _ in range(200)]
    for i in range(24):
        scheduler.submit(str(i), [*system, *(rng.randrange(3) for _ in range(rng.randrange(20, 200)))], "")
    for _ in range(3000):
        scheduler.admit(128)
        step(scheduler, 128, 9)
        scheduler.check()
        for request in list(scheduler.running):
            if len(request.output_ids) > 120:
                scheduler.finish(request)
        if not scheduler.running and not scheduler.waiting:
            break
    assert not scheduler.waiting
    assert scheduler.hits > 5
    assert scheduler.retractions >= 3
    drain(scheduler, 128)


def _no_tail(patch: pytest.MonkeyPatch) -> None:
    from oscar_serving.engines.sglang.radix import OscarRadixCache

    patch.setattr(OscarRadixCache, "swa_reprefill_tail_tokens", lambda self, req=None: 0)


def _no_salt(patch: pytest.MonkeyPatch) -> None:
    from oscar_serving.engines.sglang import radix

    patch.setattr(radix, "salt_of", lambda request: "")
    opened = Rows.open
    patch.setattr(Rows, "open", lambda self, row, prefix, tokens, salt="": opened(self, row, prefix, tokens))


def _whole_ring_valid(patch: pytest.MonkeyPatch) -> None:
    opened = Rows.open

    def wrong(self: Rows, row: int, *args: Any) -> None:
        opened(self, row, *args)
        self.open_rows[row].valid_from = 0

    patch.setattr(Rows, "open", wrong)


def _published_sink_freed(patch: pytest.MonkeyPatch) -> None:
    closed = Rows.close

    def wrong(self: Rows, row: int) -> None:
        sink = self.open_rows[row].sink
        closed(self, row)
        if sink and sink not in self._free:
            self._free.append(sink)

    patch.setattr(Rows, "close", wrong)


def _row_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "close", lambda self, row: None)


def _released(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

    release = PagedTokenToKVPoolAllocator._release_page_ids
    wrong = lambda self, *ids: release(self, *(change(i) for i in ids))  # noqa: E731
    patch.setattr(PagedTokenToKVPoolAllocator, "_release_page_ids", wrong)


def _page_freed_twice(patch: pytest.MonkeyPatch) -> None:
    _released(patch, lambda ids: torch.cat([ids, ids[:1]]))


def _page_lost(patch: pytest.MonkeyPatch) -> None:
    _released(patch, lambda ids: ids[1:])


@pytest.mark.parametrize(
    ("plant", "seen"),
    [
        (_no_tail, "a hit reaches into the window of the first decode"),
        (_no_salt, "a sink holds another token"),
        (_whole_ring_valid, "a stale ring"),
        (_published_sink_freed, "a free sink is in use"),
        (_row_kept, "an ended request keeps its row"),
        (_page_freed_twice, "a page is free twice"),
        (_page_lost, "in the tree"),
    ],
)
def test_a_planted_bug_is_seen(plant: Callable[[pytest.MonkeyPatch], None], seen: str) -> None:
    def some() -> None:
        for seed in range(12):
            traffic(seed, 16 + 3 * seed, 256)

    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        with pytest.raises(AssertionError, match=seen):
            some()

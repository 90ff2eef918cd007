"""vLLM's scheduler and worker, modelled around the real ``KVCacheManager``; each read checks what a block holds."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVQuantMode
from vllm.v1.request import Request, RequestStatus

from oscar_serving.cache.rule import reads_window
from oscar_serving.engines.vllm.options import INT2_BLOCK, WINDOW_BLOCK
from oscar_serving.engines.vllm.window_spec import SinkWindowManager, SinkWindowSpec

init_none_hash(sha256)
INT2, WINDOW = 0, 1


def kv_cache_config(blocks: int, *, sink: int, recent: int, exact: bool = True) -> KVCacheConfig:
    """Two groups of one layer each, as the engine plans them."""
    common = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8, "kv_quant_mode": KVQuantMode.CUSTOM}
    int2 = FullAttentionSpec(block_size=INT2_BLOCK, state_content_bytes=36, **common)
    window = SinkWindowSpec(
        block_size=WINDOW_BLOCK, state_content_bytes=256, sink=sink, recent=recent, exact=exact, **common
    )
    groups = [KVCacheGroupSpec(["a"], int2), KVCacheGroupSpec(["a.oscar_window"], window)]
    return KVCacheConfig(blocks, [], groups, prefix_cache_retention_interval=0)


@dataclass
class Running:
    """One request: the worker's rows (stale entries included) and the steps in flight."""

    request: Request
    rows: tuple[list[int], list[int]] = field(default_factory=lambda: ([], []))


class Simulator:
    """Drives the manager as the scheduler does, and remembers per block and slot which prefix was written there."""

    def __init__(self, blocks: int, *, sink: int, recent: int, exact: bool = True, chunk: int = 2048) -> None:
        config = kv_cache_config(blocks, sink=sink, recent=recent, exact=exact)
        self.manager = KVCacheManager(
            config, 1 << 20, INT2_BLOCK, WINDOW_BLOCK, max_in_flight_tokens=2 * chunk, log_stats=True
        )
        self.pool = self.manager.block_pool
        self.windows = self.manager.coordinator.single_type_managers[WINDOW]
        assert isinstance(self.windows, SinkWindowManager)
        self.sink, self.recent, self.exact, self.chunk = sink, recent, exact, chunk
        self.hasher = get_request_block_hasher(WINDOW_BLOCK, sha256)
        self.running: dict[str, Running] = {}
        self.waiting: list[Request] = []
        self.content: dict[tuple[int, int, int], Any] = {}
        self.hits: list[tuple[int, int]] = []
        self.reads_without_window = 0
        self.peak = 0

    def submit(self, name: str, tokens: list[int], max_tokens: int = 100_000) -> Request:
        """A new request, waiting."""
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request(name, list(tokens), params, None, block_hasher=self.hasher)
        self.waiting.append(request)
        return request

    # One step ---------------------------------------------------------------------------------------------------------

    def admit(self) -> bool:
        """Try to start the first waiting request."""
        request = self.waiting[0]
        blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        expected = self.expected_hit(request)
        assert hit == expected, f"hit {hit}, the model says {expected}"
        new = min(request.num_tokens - hit, self.chunk)
        got = self.manager.allocate_slots(
            request, new, hit, blocks, full_sequence_must_fit=True, has_scheduled_reqs=bool(self.running)
        )
        if got is None:
            return False
        self.waiting.pop(0)
        self.hits.append((hit, request.num_tokens))
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit
        rows = self.manager.get_block_ids(request.request_id)
        self.running[request.request_id] = Running(request, (list(rows[0]), list(rows[1])))
        self.execute(request, new)
        return True

    def advance(self, name: str, rng: random.Random, drafts: int = 0) -> None:
        """One more step of a running request: a chunk, or a token with ``drafts`` that may be rejected."""
        state = self.running[name]
        request = state.request
        left = request.num_tokens - request.num_computed_tokens
        new = min(left, self.chunk)
        drafts = drafts if left == 1 else 0
        while (got := self.manager.allocate_slots(request, new + drafts, num_lookahead_tokens=drafts)) is None:
            victim = list(self.running)[-1]
            self.preempt(victim)
            if victim == name:
                return
        for row, ids in zip(state.rows, got.get_block_ids(), strict=True):
            row.extend(ids)
        self.execute(request, new, drafts, rng)

    def execute(self, request: Request, new: int, drafts: int = 0, rng: random.Random | None = None) -> None:
        """What the worker does: write, then read by the position rule; then append what was sampled."""
        state = self.running[request.request_id]
        first = request.num_computed_tokens
        known = request.all_token_ids
        guesses = [rng.randrange(3) for _ in range(drafts)] if rng else []
        tokens = [*known[: first + new], *guesses]
        prefix = self._prefixes(tokens)
        for p in range(first, first + new + drafts):
            for group, size in ((INT2, INT2_BLOCK), (WINDOW, WINDOW_BLOCK)):
                block = state.rows[group][p // size]
                if block:
                    self.content[group, block, p % size] = prefix[p]
        for q in {first, first + new - 1, first + new // 2}:
            self._read(state, prefix, q, first)
        end = first + new
        if end == request.num_tokens:
            accepted = rng.randrange(drafts + 1) if rng and drafts else 0
            request.append_output_token_ids([*guesses[:accepted], rng.randrange(3) if rng else 1])
            end += accepted
        request.num_computed_tokens = end
        held = sum(not b.is_null for b in self.windows.req_to_blocks[request.request_id])
        self.peak = max(self.peak, held)
        shared = self.recent // WINDOW_BLOCK + 2 if request.shared_prefix_boundary else 0
        assert held <= self.windows.max_admission_blocks_per_request + shared

    @staticmethod
    def _prefixes(tokens: list[int]) -> list[int]:
        """Position → hash of all tokens up to it: what a block slot stands for."""
        return list(itertools.accumulate(tokens, lambda h, token: hash((h, token)), initial=0))[1:]

    def _read(self, state: Running, prefix: list[int], query: int, chunk_start: int) -> None:
        window = {*range(min(self.sink, query + 1)), *range(max(0, query - self.recent), query + 1)}
        for key in sorted(window | set(range(query % 7, query, 7))):
            in_window = reads_window(key, query, sink=self.sink, recent=self.recent)
            block = state.rows[WINDOW][key // WINDOW_BLOCK] if in_window else 0
            if block:
                assert self.content[WINDOW, block, key % WINDOW_BLOCK] == prefix[key], "a window holds another token"
                continue
            if in_window and key < chunk_start:
                self.reads_without_window += 1
                assert not self.exact, f"query {query} lacks the window of key {key}"
            block = state.rows[INT2][key // INT2_BLOCK]
            assert block, f"query {query} lacks the page of key {key}"
            assert self.content[INT2, block, key % INT2_BLOCK] == prefix[key], "INT2 holds another token"

    def finish(self, name: str) -> list[int]:
        """End or abort a request; its tokens so far."""
        state = self.running.pop(name)
        state.request.status = RequestStatus.FINISHED_ABORTED
        self.manager.free(state.request)
        return list(state.request.all_token_ids)

    def preempt(self, name: str) -> None:
        """Take a request's blocks; it will start again with its output so far."""
        request = self.running.pop(name).request
        self.manager.free(request)
        request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        self.waiting.insert(0, request)

    # What should be ---------------------------------------------------------------------------------------------------

    def expected_hit(self, request: Request) -> int:
        """Longest aligned prefix whose INT2 pages, and in *exact* mode sink and window blocks, are all cached."""
        hashes = request.block_hashes
        per = INT2_BLOCK // WINDOW_BLOCK

        def cached(group: int, block: int) -> bool:
            index = (block + 1) * per - 1 if group == INT2 else block
            return self.pool.get_cached_block(hashes[index], [group]) is not None

        best = 0
        for length in range(INT2_BLOCK, request.num_tokens, INT2_BLOCK):
            if not cached(INT2, length // INT2_BLOCK - 1):
                break
            needed = {
                key // WINDOW_BLOCK
                for key in range(length)
                if reads_window(key, length, sink=self.sink, recent=self.recent)
            }
            if not self.exact or all(cached(WINDOW, b) for b in needed):
                best = length
        return best

    def check_references(self) -> None:
        """Reference counts are the number of tables that hold a block; the rest is free."""
        count: dict[int, int] = {}
        for manager in self.manager.coordinator.single_type_managers:
            assert set(manager.req_to_blocks) <= set(self.running)
            for blocks in manager.req_to_blocks.values():
                for b in blocks:
                    if not b.is_null:
                        count[b.block_id] = count.get(b.block_id, 0) + 1
        for b in self.pool.blocks:
            if not b.is_null:
                assert b.ref_cnt == count.get(b.block_id, 0)
        assert self.pool.get_num_free_blocks() == len(self.pool.blocks) - 1 - len(count)
        for state in (self.windows._boundaries, self.windows._next_leaving, self.windows._departed):
            assert set(state) <= {*self.running, *(r.request_id for r in self.waiting)}

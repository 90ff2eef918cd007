"""The second KV-cache group of a layer: the unquantized sink and recent tokens, and the manager of its blocks.

The manager keeps, per request, one table entry for each block of the sequence; entries whose tokens no later query
reads unquantized are the null block. It allocates only what will be read, so a long chunk needs a few blocks, not one
for every 16 tokens.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.utils.math_utils import cdiv, round_down
from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec

from oscar_serving.cache.rule import window_start

#: Tokens of an INT2 block; prefix hits land on its multiples.
HIT_ALIGNMENT = 128

#: Draft tokens at the end of a step that may be rejected: the tail that a step allocates reaches back by them.
MAX_REJECTED_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(AttentionSpec):
    """Spec of the window store of one attention layer.

    Attributes
    ----------
    sink, recent
        The position rule: tokens at the start, and most recent tokens of a query, that are read unquantized.
    exact
        A prefix hit needs its sink and window blocks; otherwise a hit may lack them and reads INT2 instead.
    """

    sink: int
    recent: int
    exact: bool

    @property
    def sink_blocks(self) -> int:
        """Blocks that hold sink tokens."""
        return cdiv(self.sink, self.block_size)

    @property
    def max_blocks_per_request(self) -> int:
        """Most blocks that one request holds at a time, whatever its length."""
        before = cdiv(self.recent - 1, self.block_size) + 1  # what the first query of a chunk reads
        # What the chunk leaves behind, back to the last boundary on which a prefix hit can land.
        after = cdiv(self.recent + HIT_ALIGNMENT + MAX_REJECTED_TOKENS, self.block_size) + 1
        return self.sink_blocks + before + after

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Bytes that one request of the greatest length may hold."""
        whole = cdiv(vllm_config.model_config.max_model_len, self.block_size)
        return min(whole, self.max_blocks_per_request) * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether these layers may share a block table."""
        mine = (self.sink, self.recent, self.exact)
        return all(
            isinstance(s, SinkWindowSpec) and (s.sink, s.recent, s.exact) == mine for s in kv_cache_specs.values()
        )


class _Departed(NamedTuple):
    """A block that left the window but stays findable until a later hit boundary replaces its own."""

    number: int
    block: KVCacheBlock
    block_hash: Any


class SinkWindowManager(SingleTypeKVCacheManager):
    """Blocks of the window store of one KV-cache group.

    *Exact* mode. A hit of length ``L`` needs the sink blocks and the blocks of positions ``L - recent + 1 … L``. Blocks
    are findable (hashed) as soon as they are full. When one leaves the window it is freed; it stays findable while the
    last boundary of the sequence on which a hit can land needs it, and for good if the end of the prompt or a prefix
    shared with another request needs it. All others lose their hash, so that they do not push INT2 pages out of the
    prefix cache.
    """

    kv_cache_spec: SinkWindowSpec

    def __init__(self, kv_cache_spec: SinkWindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.max_admission_blocks_per_request = kv_cache_spec.max_blocks_per_request
        self._boundaries: dict[str, tuple[int, ...]] = {}
        self._next_leaving: dict[str, int] = {}
        self._departed: defaultdict[str, deque[_Departed]] = defaultdict(deque)

    # What to keep ----------------------------------------------------------------------------------------------------

    def expect(self, request_id: str, prompt_tokens: int, shared_prefix: int) -> None:
        """Name the lengths at which later requests may continue this one: its prompt's end and a shared prefix."""
        if request_id in self._boundaries and shared_prefix == 0:
            return
        align = self.cache_hit_alignment_tokens
        lengths = {round_down(prompt_tokens - 1, align), round_down(prompt_tokens, align)}
        # A shared prefix costs one more window for a moment: only where the pool is not nearly one request wide.
        if 2 * (cdiv(prompt_tokens, self.scheduler_block_size) + self.kv_cache_spec.max_blocks_per_request) < (
            self.block_pool.num_gpu_blocks
        ):
            lengths.add(round_down(shared_prefix, align))
        self._boundaries[request_id] = tuple(sorted(lengths - {0}))

    def _needed_by(self, index: int, length: int) -> bool:
        """Whether block ``index`` holds a recent token of the query at position ``length``."""
        start, end = index * self.block_size, (index + 1) * self.block_size
        return start < length and end > window_start(length, self.kv_cache_spec.recent)

    def _wanted(self, request_id: str, start: int, stop: int, end: int) -> list[int]:
        """Which of the blocks ``start … stop`` a step that writes up to position ``end`` needs, ascending."""
        spec = self.kv_cache_spec
        tail = window_start(max(0, end - MAX_REJECTED_TOKENS), spec.recent) // self.block_size
        if tail <= start:
            return list(range(start, stop))
        wanted = set(range(start, min(stop, spec.sink_blocks))) | set(range(max(start, tail), stop))
        for length in self._boundaries.get(request_id, ()):
            first = window_start(length, spec.recent) // self.block_size
            wanted.update(range(max(start, first), min(stop, cdiv(length, self.block_size))))
        return sorted(wanted)

    # Allocation ------------------------------------------------------------------------------------------------------

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
        prefill_end: int = 0,
    ) -> int:
        """Blocks that :meth:`allocate_new_blocks` will take, and free ones that a hit takes out of the queue."""
        have = len(self.req_to_blocks.get(request_id, ())) + len(new_computed_blocks)
        need = cdiv(num_tokens, self.block_size)
        if need <= have and not new_computed_blocks:  # most decode steps
            return 0
        evictable = self._get_num_evictable_blocks(new_computed_blocks)
        if apply_admission_cap:
            assert self.max_admission_blocks_per_request is not None
            return min(max(need - have, 0), self.max_admission_blocks_per_request) + evictable
        return len(self._wanted(request_id, have, need, num_tokens_main_model)) + evictable

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[KVCacheBlock]:
        """Extend the request's table to ``num_tokens``; the null block where no later query will read."""
        table = self.req_to_blocks[request_id]
        start, stop = len(table), cdiv(num_tokens, self.block_size)
        if stop <= start:
            return []
        added = [self._null_block] * (stop - start)
        wanted = self._wanted(request_id, start, stop, num_tokens_main_model)
        fresh = self.block_pool.get_new_blocks(len(wanted))
        for index, block in zip(wanted, fresh, strict=True):
            added[index - start] = block
        if self._record_new_block_ids:
            self.new_block_ids.extend(b.block_id for b in fresh)
        table.extend(added)
        return added

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """0: the sink comes first, so nothing is skipped from the front."""
        return 0

    def allocate_external_computed_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """KV connectors are refused at start."""
        raise NotImplementedError("oscar: KV connectors are not supported")

    # Leaving the window ----------------------------------------------------------------------------------------------

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks that no query from ``processed_computed_tokens`` on reads."""
        table = self.req_to_blocks.get(request_id)
        if not table:
            return
        recent = self.kv_cache_spec.recent
        first = self._next_leaving.get(request_id, self.kv_cache_spec.sink_blocks)
        last = min(window_start(processed_computed_tokens, recent) // self.block_size, len(table))
        # Every step of every request comes here, and few change anything: blocks leave, and hit boundaries pass, when
        # the position crosses a block's edge.
        if last <= first and processed_computed_tokens % self.block_size:
            return
        leaving: list[KVCacheBlock] = []
        for i in range(first, last):
            block = table[i]
            if block.is_null:
                continue
            table[i] = self._null_block
            leaving.append(block)
            if block.block_hash is not None:
                self._departed[request_id].append(_Departed(i, block, block.block_hash))
        if last > first:
            self._next_leaving[request_id] = last
        if leaving:
            self.block_pool.free_blocks(leaving)
        self._forget(request_id, round_down(processed_computed_tokens, self.cache_hit_alignment_tokens))

    def _forget(self, request_id: str, boundary: int) -> None:
        """Take the hash from departed blocks that neither ``boundary`` nor a later one needs."""
        departed = self._departed.get(request_id)
        keep_from = window_start(boundary, self.kv_cache_spec.recent)
        while departed and (departed[0].number + 1) * self.block_size <= keep_from:
            index, block, block_hash = departed.popleft()
            if any(self._needed_by(index, b) for b in self._boundaries.get(request_id, ())):
                continue
            if block.ref_cnt == 0 and block.block_hash == block_hash:
                queue = self.block_pool.free_block_queue
                queue.remove(block)
                self.block_pool.evict_blocks({block.block_id})
                queue.prepend_n([block])

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request and return its blocks."""
        self._boundaries.pop(request_id, None)
        self._next_leaving.pop(request_id, None)
        self._departed.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    # Prefix hits -----------------------------------------------------------------------------------------------------

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest aligned prefix whose sink and window blocks are cached (*exact*), or ``max_length`` (*soft*)."""
        assert isinstance(kv_cache_spec, SinkWindowSpec)
        size = kv_cache_spec.block_size
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=False,
            alignment_tokens=alignment_tokens,
        )
        if drop_eagle_block:
            # The INT2 group has matched and dropped a whole page past this length already.
            max_length -= size
        groups = len(kv_cache_group_ids)
        found: dict[int, list[KVCacheBlock] | None] = {}

        def lookup(index: int) -> list[KVCacheBlock] | None:
            if index not in found:
                found[index] = block_pool.get_cached_block(hashes[index], kv_cache_group_ids)
            return found[index]

        length = round_down(max(max_length, 0), alignment_tokens)
        while length > 0:
            sinks = range(min(kv_cache_spec.sink_blocks, length // size))
            first = max(window_start(length, kv_cache_spec.recent) // size, len(sinks))
            window = range(length // size - 1, first - 1, -1)
            if not kv_cache_spec.exact or (all(map(lookup, window)) and all(map(lookup, sinks))):
                blocks = tuple([block_pool.null_block] * (length // size) for _ in range(groups))
                for index in (*sinks, *window):
                    for table, block in zip(blocks, lookup(index) or (), strict=False):
                        table[index] = block
                return blocks, length
            length -= alignment_tokens
        return tuple([] for _ in range(groups)), 0

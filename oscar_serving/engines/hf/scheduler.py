"""Which tokens of which requests a step computes: decodes, then prefill chunks, first come first served."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from oscar_serving.attention.torch_backend import QUERY_BLOCK
from oscar_serving.cache.pool import CachePool
from oscar_serving.engines.hf.sequence import Sequence


@dataclass(frozen=True)
class Chunk:
    """The next ``count`` tokens of a sequence, from position ``start``; their pages are reserved."""

    sequence: Sequence
    start: int
    count: int

    @property
    def tokens(self) -> list[int]:
        """The token ids."""
        return self.sequence.tokens[self.start : self.start + self.count]

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the last token, so that the next one can be sampled."""
        return self.start + self.count == len(self.sequence.tokens)


def _cut(sequence: Sequence, budget: int) -> int:
    """Tokens of the next chunk. A long one that does not reach the end is cut where a block of queries ends.

    The arithmetic of a query is then bit for bit the same whatever the size of the chunks.
    """
    count = min(sequence.remaining, budget)
    if count < QUERY_BLOCK or count == sequence.remaining:
        return count
    return count - (sequence.computed + count) % QUERY_BLOCK


class Scheduler:
    """Waiting and running requests over one pool.

    ``running`` and ``waiting`` are in order of arrival. Pages run out → the youngest running request goes
    back to the front of the queue, its pages to the prefix index, and is computed again later. The oldest
    request is never preempted for a younger one, and no younger one is admitted before it, so every request
    gets its turn.

    Attributes
    ----------
    concerned
        The request that :meth:`schedule` is taking pages for: when it raises, this one is to fail, and the others
        are scheduled again.
    """

    def __init__(
        self, pool: CachePool, *, max_num_seqs: int, max_batched_tokens: int, page_size: int, prefix_caching: bool
    ) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_batched_tokens = max_batched_tokens
        self._page_size = page_size
        self._prefix_caching = prefix_caching
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.concerned: Sequence | None = None
        self.preemptions = 0
        self.cached_prompt_tokens = 0

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def __len__(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a request at its place in order of arrival."""
        insort(self.waiting, sequence, key=lambda s: s.arrival)

    def finish(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Forget a request; its pages stay in the prefix index until they are needed, if they are to be kept."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._pool.finish(sequence.request_id, keep=keep)
        else:
            self.waiting.remove(sequence)

    def schedule(self) -> list[Chunk]:
        """Chunks of the next step with pages reserved; empty when there is nothing to do."""
        budget = self._max_batched_tokens
        chunks: list[Chunk] = []
        preempted = False
        self.concerned = None
        for decoding in (True, False):
            for sequence in list(self.running):
                if sequence not in self.running or (sequence.remaining == 1) != decoding or not budget:
                    continue
                self.concerned = sequence
                count = _cut(sequence, budget)
                while not self._pool.reserve(sequence.request_id, count):
                    preempted = True
                    victim = self.running[-1]
                    budget += sum(c.count for c in chunks if c.sequence is victim)
                    chunks = [c for c in chunks if c.sequence is not victim]
                    self._preempt(victim)
                    if victim is sequence:
                        break
                else:
                    chunks.append(Chunk(sequence, sequence.computed, count))
                    budget -= count
        while budget and self.waiting and len(self.running) < self._max_num_seqs and not preempted:
            if self._prefix_is_coming(self.waiting[0]):
                break
            self.concerned = self.waiting[0]
            chunk = self._admit(self.waiting[0], budget)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.count
        return chunks

    def _admit(self, sequence: Sequence, budget: int) -> Chunk | None:
        if self.running and not self._has_room(sequence):
            return None
        # Positions that come from the prefix cache have no logits, so a prompt to be scored takes no hit.
        tokens = sequence.tokens[:1] if sequence.scores_prompt else sequence.tokens
        sequence.computed = self._pool.admit(sequence.request_id, tokens)
        count = _cut(sequence, budget)
        reserved = False
        try:
            reserved = self._pool.reserve(sequence.request_id, count)
        finally:
            if not reserved:  # it goes on waiting, without the pages of its prefix
                self._pool.preempt(sequence.request_id)
                sequence.computed = 0
        if not reserved:
            return None
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_length)
            self.cached_prompt_tokens += sequence.cached
        self.waiting.pop(0)
        self.running.append(sequence)
        return Chunk(sequence, sequence.computed, count)

    def _prefix_is_coming(self, sequence: Sequence) -> bool:
        """Whether a running request is computing most of this one's tokens just now: then it waits for a prefix hit."""
        if not self._prefix_caching or sequence.scores_prompt:
            return False
        shared = max(QUERY_BLOCK, len(sequence.tokens) // 2)
        return any(
            other.remaining > 1 and other.tokens[:shared] == sequence.tokens[:shared] and len(sequence.tokens) > shared
            for other in self.running
        )

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether the request fits without preempting; admitted chunk by chunk it would only thrash."""
        tier = self._pool.stats().quantized
        return (len(sequence.tokens) // self._page_size + 1) <= tier.total - tier.used

    def _preempt(self, sequence: Sequence) -> None:
        self._pool.preempt(sequence.request_id)
        self.preemptions += 1
        sequence.computed = 0
        self.running.remove(sequence)
        self.add(sequence)

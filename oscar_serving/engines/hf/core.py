"""One step of the engine: schedule, compute, sample, and what each request is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from oscar_serving.engines.hf.memory import CacheStores
from oscar_serving.engines.hf.options import EngineStats
from oscar_serving.engines.hf.params import FinishReason, RequestError, RequestOutput, TokenLogprob
from oscar_serving.engines.hf.runner import Runner
from oscar_serving.engines.hf.sampling import sample, token_logprobs
from oscar_serving.engines.hf.scheduler import Chunk, Scheduler
from oscar_serving.engines.hf.sequence import Sequence

log = logging.getLogger(__name__)

Delivery = tuple[Sequence, RequestOutput]


@dataclass
class Counters:
    """Counts since start, as in :class:`~oscar_serving.engines.hf.options.EngineStats`."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    requests_finished: int = 0
    requests_failed: int = 0


class EngineCore:
    """Scheduler, runner and stores put together.

    ``lock`` guards everything here but the model's forward pass, during which the state is at rest and may be
    read.
    """

    def __init__(self, stores: CacheStores, runner: Runner, scheduler: Scheduler, *, eos: frozenset[int]) -> None:
        self.stores = stores
        self.scheduler = scheduler
        self.counters = Counters()
        self.lock = threading.RLock()
        self._pool = stores.pool
        self._runner = runner
        self._eos = eos

    def add(self, sequence: Sequence) -> None:
        """Queue a request."""
        with self.lock:
            self.counters.prompt_tokens += sequence.prompt_length
            self.scheduler.add(sequence)

    def step(self) -> list[Delivery]:
        """Compute one step; empty when there was nothing to do. A failure ends the requests it concerns."""
        with self.lock:
            try:
                chunks = self.scheduler.schedule()
            except Exception as error:
                log.exception("scheduling failed")
                concerned = self.scheduler.concerned
                sequences = list(self.scheduler) if concerned is None else [concerned]
                return [self.fail(sequence, _internal(error)) for sequence in sequences]
            if not chunks:
                return self._unschedulable()
            rows, spans = _wanted_rows(chunks)
        try:
            logits = self._runner.forward(chunks, self._pool, rows)
        except Exception as error:
            log.exception("a step failed")
            with self.lock:
                return [self.fail(chunk.sequence, _internal(error)) for chunk in chunks]
        with self.lock:
            return self._conclude(chunks, logits, spans)

    def finish(self, sequence: Sequence, reason: FinishReason) -> Delivery:
        """End a request from outside (``abort``)."""
        with self.lock:
            self.scheduler.finish(sequence)
            return sequence, self._output(sequence, sequence.stops.flush(), [], None, reason)

    def fail(self, sequence: Sequence, error: RequestError) -> Delivery:
        """End a request with an error; its pages are given back, and nobody finds them again."""
        with self.lock:
            self.counters.requests_failed += 1
            self.scheduler.finish(sequence, keep=False)
            return sequence, self._output(sequence, "", [], None, "error", error=error)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What happens within is not in the counters."""
        before = self.counters
        self.counters = Counters()
        try:
            yield
        finally:
            self.counters = before

    def stats(self, *, queued: int) -> EngineStats:
        """A consistent snapshot; ``queued`` requests have not reached the scheduler yet."""
        with self.lock:
            return self.stores.stats(
                running=len(self.scheduler.running),
                waiting=len(self.scheduler.waiting) + queued,
                preemptions=self.scheduler.preemptions,
                cached_prompt_tokens=self.scheduler.cached_prompt_tokens,
                **vars(self.counters),
            )

    def _unschedulable(self) -> list[Delivery]:
        """Nothing runs and yet the head of the queue found no pages: it never will."""
        if self.scheduler.running or not self.scheduler.waiting:
            return []
        error = RequestError(
            "the KV cache has no room for this request even with nothing else running", "cache_too_small"
        )
        return [self.fail(self.scheduler.waiting[0], error)]

    def _conclude(self, chunks: list[Chunk], logits: Tensor, spans: list[tuple[slice, int | None]]) -> list[Delivery]:
        """Commit what was computed, then score, sample and report request by request."""
        deliveries: list[Delivery] = []
        failed: set[str] = set()
        for chunk, (scored, _) in zip(chunks, spans, strict=True):
            sequence = chunk.sequence
            try:
                self._pool.commit(sequence.request_id, chunk.tokens)
                sequence.computed += chunk.count
                self._score_prompt(sequence, logits[scored])
            except Exception as error:
                log.exception("request %s failed", sequence.request_id)
                failed.add(sequence.request_id)
                deliveries.append(self.fail(sequence, _internal(error)))
        ending = [
            (chunk.sequence, row)
            for chunk, (_, row) in zip(chunks, spans, strict=True)
            if chunk.samples and chunk.sequence.request_id not in failed
        ]
        sampling = [(sequence, row) for sequence, row in ending if row is not None]
        deliveries += [self._ended(sequence, "length") for sequence, row in ending if row is None]
        if not sampling:
            return deliveries
        try:
            final = logits[[row for _, row in sampling]]
            tokens = sample(final, [sequence.sampler for sequence, _ in sampling])
            logprobs = _sampled_logprobs(final, [sequence for sequence, _ in sampling], tokens)
        except Exception as error:
            log.exception("sampling failed")
            return deliveries + [self.fail(sequence, _internal(error)) for sequence, _ in sampling]
        for (sequence, _), token, logprob in zip(sampling, tokens, logprobs, strict=True):
            try:
                if token is None:
                    raise ArithmeticError("the model's logits are not numbers")
                deliveries.append(self._advance(sequence, token, logprob))
            except Exception as error:
                log.exception("request %s failed", sequence.request_id)
                deliveries.append(self.fail(sequence, _internal(error)))
        return deliveries

    def _score_prompt(self, sequence: Sequence, logits: Tensor) -> None:
        if sequence.prompt_logprobs is None or not len(logits):
            return
        known = len(sequence.prompt_logprobs)
        targets = sequence.tokens[known : known + len(logits)]
        top = sequence.params.prompt_logprobs or 0
        sequence.prompt_logprobs += token_logprobs(logits, targets, [top] * len(targets))

    def _advance(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> Delivery:
        """Take in a sampled token: text, and whether it ends the request."""
        self.counters.generated_tokens += 1
        params = sequence.params
        sequence.tokens.append(token)
        logprobs = None if logprob is None else [logprob]
        if token in self._eos and not params.ignore_eos:
            return self._ended(sequence, "stop", sequence.stops.flush(), [token], logprobs)
        text, found = sequence.stops.push(sequence.decoder.push(token))
        if found is not None:
            return self._ended(sequence, "stop", text, [token], logprobs, stop_reason=found)
        if token in params.stop_token_ids:
            return self._ended(sequence, "stop", text + sequence.stops.flush(), [token], logprobs, stop_reason=token)
        if sequence.generated >= sequence.max_tokens:
            return self._ended(sequence, "length", text + sequence.stops.flush(), [token], logprobs)
        return sequence, self._output(sequence, text, [token], logprobs, None)

    def _ended(
        self,
        sequence: Sequence,
        reason: FinishReason,
        text: str = "",
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        *,
        stop_reason: str | int | None = None,
    ) -> Delivery:
        self.counters.requests_finished += 1
        self.scheduler.finish(sequence)
        if tokens is None and sequence.params.logprobs is not None:
            logprobs = []
        return sequence, self._output(sequence, text, tokens or [], logprobs, reason, stop_reason=stop_reason)

    def _output(
        self,
        sequence: Sequence,
        text: str,
        tokens: list[int],
        logprobs: list[TokenLogprob] | None,
        reason: FinishReason | None,
        *,
        stop_reason: str | int | None = None,
        error: RequestError | None = None,
    ) -> RequestOutput:
        prompt_logprobs = None if sequence.scores_prompt else sequence.prompt_logprobs
        if prompt_logprobs is not None:
            sequence.prompt_logprobs = None
        return RequestOutput(
            sequence.request_id,
            text,
            tokens,
            logprobs,
            prompt_logprobs,
            reason,
            stop_reason,
            sequence.prompt_length,
            sequence.cached or 0,
            error,
        )


def _wanted_rows(chunks: list[Chunk]) -> tuple[list[int], list[tuple[slice, int | None]]]:
    """Packed rows whose logits are needed, and where among them each chunk's scored rows and last row are."""
    rows: list[int] = []
    spans: list[tuple[slice, int | None]] = []
    first = 0
    for chunk in chunks:
        sequence, begin = chunk.sequence, len(rows)
        if sequence.prompt_logprobs is not None and sequence.scores_prompt:
            # Position p predicts token p + 1.
            low = len(sequence.prompt_logprobs) - 1
            high = min(chunk.start + chunk.count, sequence.prompt_length - 1)
            rows += range(first + max(low, chunk.start) - chunk.start, first + high - chunk.start)
        scored = slice(begin, len(rows))
        last: int | None = None
        if chunk.samples and sequence.generated < sequence.max_tokens:
            last = len(rows)
            rows.append(first + chunk.count - 1)
        spans.append((scored, last))
        first += chunk.count
    return rows, spans


def _sampled_logprobs(logits: Tensor, sequences: list[Sequence], tokens: list[int | None]) -> list[TokenLogprob | None]:
    """Log-probabilities of the sampled tokens, for the requests that want them."""
    entries: list[TokenLogprob | None] = [None] * len(sequences)
    wanted = [
        (row, token, sequence.params.logprobs)
        for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
        if sequence.params.logprobs is not None and token is not None
    ]
    if wanted:
        rows, chosen, tops = (list(column) for column in zip(*wanted, strict=True))
        for row, entry in zip(rows, token_logprobs(logits[rows], chosen, tops), strict=True):
            entries[row] = entry
    return entries


def _internal(error: Exception) -> RequestError:
    return RequestError(f"the request failed: {type(error).__name__}: {' '.join(str(error).split())}", "internal_error")

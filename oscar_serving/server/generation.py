"""The way between the engine's thread and one HTTP request's coroutine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from oscar_serving.engines.hf import Engine, RequestError, RequestOutput, SamplingParams
from oscar_serving.server.errors import ApiError
from oscar_serving.server.metrics import RequestMetrics


@dataclass
class Choice:
    """One continuation that the engine computes for an HTTP request, and what has been counted of it."""

    prompt: list[int]
    params: SamplingParams
    generated_tokens: int = 0
    cached_tokens: int = 0
    first_token_at: float | None = field(default=None, repr=False)


class Generation:
    """The choices of one HTTP request in the engine.

    Iterating gives ``(index of the choice, output)`` until every choice has finished. :meth:`close` takes out
    of the engine what still runs, so that a client that goes away frees its pages; it may be called at any
    time, also twice.
    """

    def __init__(self, engine: Engine, request_id: str, choices: Sequence[Choice], metrics: RequestMetrics) -> None:
        self.choices = list(choices)
        self._engine = engine
        self._metrics = metrics
        self._ids = [f"{request_id}-{index}" for index in range(len(choices))]
        self._running: set[int] = set()
        self._outputs: asyncio.Queue[tuple[int, RequestOutput]] = asyncio.Queue()
        self._started = time.monotonic()

    def start(self) -> None:
        """Hand every choice to the engine.

        Raises
        ------
        ApiError
            The engine refuses one; none is left in it then.
        """
        loop = asyncio.get_running_loop()
        try:
            for index, choice in enumerate(self.choices):

                def deliver(output: RequestOutput, index: int = index) -> None:
                    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                        loop.call_soon_threadsafe(self._outputs.put_nowait, (index, output))

                self._running.add(index)
                self._engine.submit(self._ids[index], choice.prompt, choice.params, deliver)
        except RequestError as error:
            self._running.discard(index)
            self._withdraw()  # nobody gave them up, so they do not count as aborted
            raise ApiError.of(error) from None

    def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        try:
            while self._running:
                index, output = await self._outputs.get()
                self._count(self.choices[index], output)
                if output.finish_reason is not None:
                    self._running.discard(index)
                if output.finish_reason == "error":
                    raise ApiError.of(output.error or RequestError("the engine failed", "internal_error"))
                if output.finish_reason == "abort":
                    raise ApiError.of(RequestError("the server is shutting down", "shutting_down"))
                yield index, output
        finally:
            self.close()

    def _count(self, choice: Choice, output: RequestOutput) -> None:
        now = time.monotonic()
        choice.generated_tokens += len(output.token_ids)
        choice.cached_tokens = output.cached_tokens
        if choice.first_token_at is None and output.token_ids:
            choice.first_token_at = now
            self._metrics.first_token(now - self._started)
        if output.finish_reason is not None:
            since_first = now - choice.first_token_at if choice.first_token_at is not None else None
            self._metrics.finished(
                output.finish_reason,
                now - self._started,
                since_first,
                len(choice.prompt),
                choice.generated_tokens,
            )

    def close(self) -> None:
        """Abort what has not finished."""
        if self._running:
            self._metrics.aborted(len(self._running))
        self._withdraw()

    def _withdraw(self) -> None:
        for index in self._running:
            self._engine.abort(self._ids[index])
        self._running.clear()


_numbers = itertools.count()


def new_request_id(prefix: str) -> str:
    """An id that no other request of this process has."""
    return f"{prefix}-{time.time_ns():x}{next(_numbers) & 0xFFFF:04x}"

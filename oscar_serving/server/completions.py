"""``/v1/completions``: prompts in, their continuations out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any, cast

from starlette.responses import Response

from oscar_serving.engines.hf import RequestOutput, TokenLogprob
from oscar_serving.server.errors import bad_request
from oscar_serving.server.generation import Choice, Generation, new_request_id
from oscar_serving.server.logprobs import completion_logprobs
from oscar_serving.server.prompts import parse_prompts
from oscar_serving.server.requests import MAX_CHOICES, CompletionRequest
from oscar_serving.server.responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    FinishReason,
)
from oscar_serving.server.sampling import completion_params
from oscar_serving.server.state import ServerState, usage
from oscar_serving.server.streaming import EventStream, event
from oscar_serving.server.tokens import TokenTable


class Continuation:
    """One choice on its way out: the engine's outputs become pieces of the answer, an echoed prompt first."""

    def __init__(self, index: int, echo: tuple[str, list[int]] | None, *, logprobs: bool, table: TokenTable) -> None:
        self._index = index
        self._echo = echo
        self._logprobs = logprobs
        self._table = table
        self._offset = 0

    def piece(self, output: RequestOutput) -> CompletionChoice:
        """What is new with ``output``."""
        text, token_ids = output.text, output.token_ids
        entries: list[TokenLogprob | None] = [*(output.logprobs or ())]
        if self._echo is not None:
            echoed, echoed_ids = self._echo
            self._echo = None
            text, token_ids = echoed + text, echoed_ids + token_ids
            entries = [*(output.prompt_logprobs or ()), *entries]
        scored = None
        if self._logprobs:
            scored = completion_logprobs(token_ids, entries, self._table, offset=self._offset)
            self._offset += sum(map(len, scored.tokens))
        # Generation has turned the engine's other reasons into errors.
        reason = cast("FinishReason | None", output.finish_reason)
        choice = CompletionChoice(index=self._index, text=text, logprobs=scored, finish_reason=reason)
        if output.stop_reason is not None:
            choice.stop_reason = output.stop_reason
        return choice


def _joined(pieces: list[CompletionChoice]) -> CompletionChoice:
    """The pieces of one choice as a whole."""
    last = pieces[-1]
    scored = None
    if last.logprobs is not None:
        parts = [piece.logprobs for piece in pieces if piece.logprobs is not None]
        scored = CompletionLogprobs(
            text_offset=[offset for part in parts for offset in part.text_offset],
            token_logprobs=[logprob for part in parts for logprob in part.token_logprobs],
            tokens=[token for part in parts for token in part.tokens],
            top_logprobs=[top for part in parts for top in part.top_logprobs],
        )
    return last.model_copy(update={"text": "".join(piece.text for piece in pieces), "logprobs": scored})


async def complete(state: ServerState, request: CompletionRequest) -> CompletionAnswer:
    """Tokenize the prompts and start their continuations; nothing is computed for a refused request."""
    model = state.model_name(request.model)
    n = request.n or 1
    prompts = parse_prompts(request.prompt)
    if len(prompts) * n > MAX_CHOICES:
        raise bad_request(f"{len(prompts)} prompts with n={n}: at most {MAX_CHOICES} choices in one request", "n")
    choices: list[Choice] = []
    continuations: list[Continuation] = []
    for prompt in prompts:
        text, ids = prompt.text, prompt.token_ids
        if ids is None:
            assert text is not None
            ids = await state.prompts.encode(text, add_special_tokens=request.add_special_tokens is not False)
        if request.echo and text is None:
            text = await state.prompts.decode(ids)
        for number in range(n):
            choices.append(Choice(ids, completion_params(request, number)))
            echo = (text or "", ids) if request.echo else None
            continuations.append(
                Continuation(len(continuations), echo, logprobs=request.logprobs is not None, table=state.table)
            )
    request_id = new_request_id("cmpl")
    return CompletionAnswer(state.generate(request_id, choices), continuations, request, request_id, model, n)


class CompletionAnswer:
    """The answer to one request, whole or as a stream."""

    def __init__(
        self,
        generation: Generation,
        continuations: list[Continuation],
        request: CompletionRequest,
        request_id: str,
        model: str,
        n: int,
    ) -> None:
        self._generation = generation
        self._continuations = continuations
        self._request = request
        self._n = n
        self._frame: dict[str, Any] = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self) -> CompletionResponse:
        """Everything at once."""
        pieces: list[list[CompletionChoice]] = [[] for _ in self._continuations]
        async for index, output in self._generation:
            pieces[index].append(self._continuations[index].piece(output))
        return CompletionResponse(
            **self._frame,
            choices=[_joined(each) for each in pieces],
            usage=usage(self._generation.choices, self._n),
        )

    def stream(self) -> Response:
        """Server-sent events."""
        return EventStream(self._events(), self.close)

    def close(self) -> None:
        """Stop computing what nobody waits for."""
        self._generation.close()

    async def _events(self) -> AsyncIterator[bytes]:
        options = self._request.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        async for index, output in self._generation:
            piece = self._continuations[index].piece(output)
            if not piece.text and piece.finish_reason is None and not (piece.logprobs and piece.logprobs.tokens):
                continue  # held back: part of a character, or what may become a stop string
            chunk = CompletionResponse(**self._frame, choices=[piece])
            if continuous:
                chunk.usage = usage(self._generation.choices, self._n)
            yield event(chunk)
        if options and options.include_usage:
            yield event(CompletionResponse(**self._frame, choices=[], usage=usage(self._generation.choices, self._n)))

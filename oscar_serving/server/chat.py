"""``/v1/chat/completions``: a conversation in, the next message out."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

from starlette.responses import Response

from oscar_serving.engines.hf import RequestOutput
from oscar_serving.server.errors import bad_request
from oscar_serving.server.generation import Choice, Generation, new_request_id
from oscar_serving.server.logprobs import chat_logprobs
from oscar_serving.server.requests import ChatRequest
from oscar_serving.server.responses import (
    AnswerMessage,
    CalledTool,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    Delta,
    FinishReason,
)
from oscar_serving.server.sampling import chat_params
from oscar_serving.server.state import ServerState, usage
from oscar_serving.server.streaming import EventStream, event
from oscar_serving.server.tokens import TokenTable
from oscar_serving.server.tool_calls import HermesReader


class Answer:
    """One choice on its way out: turns the engine's outputs into pieces of a message."""

    def __init__(self, index: int, table: TokenTable, reader: HermesReader | None) -> None:
        self._index = index
        self._table = table
        self._reader = reader

    def piece(self, output: RequestOutput) -> ChatChunkChoice:
        """What is new with ``output``."""
        text, calls = output.text, list[CalledTool]()
        reason = cast("FinishReason | None", output.finish_reason)  # Generation raises for the engine's others
        if self._reader is not None:
            text, calls = self._reader.push(text)
            if reason is not None:
                text += self._reader.flush()
                if self._reader.calls and reason == "stop":
                    reason = "tool_calls"
        delta = Delta()
        if text:
            delta.content = text
        if calls:
            delta.tool_calls = calls
        scored = None
        if output.logprobs is not None:
            scored = chat_logprobs(output.token_ids, output.logprobs, self._table)
        choice = ChatChunkChoice(index=self._index, delta=delta, logprobs=scored, finish_reason=reason)
        if output.stop_reason is not None:
            choice.stop_reason = output.stop_reason
        return choice


def _joined(pieces: list[ChatChunkChoice]) -> ChatChoice:
    """The pieces of one answer as a whole."""
    last = pieces[-1]
    text = "".join(piece.delta.content or "" for piece in pieces)
    calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    message = AnswerMessage(role="assistant", content=text if text or not calls else None)
    if calls:
        message.tool_calls = [CalledTool(id=call.id, type=call.type, function=call.function) for call in calls]
    scored = None
    if last.logprobs is not None:
        scored = ChatLogprobs(content=[entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content])
    assert last.finish_reason is not None
    choice = ChatChoice(index=last.index, message=message, logprobs=scored, finish_reason=last.finish_reason)
    if last.stop_reason is not None:
        choice.stop_reason = last.stop_reason
    return choice


async def chat(state: ServerState, request: ChatRequest) -> ChatAnswer:
    """Render the conversation and start its answers; nothing is computed for a request that is refused."""
    model = state.model_name(request.model)
    n = request.n or 1
    if request.top_logprobs and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs true", "top_logprobs")
    tools = request.tools if request.tools and request.tool_choice != "none" else None
    goes_on = bool(request.continue_final_message)
    prompt = await state.prompts.render_chat(
        request.messages,
        tools=tools,
        add_generation_prompt=not goes_on if request.add_generation_prompt is None else request.add_generation_prompt,
        continue_final_message=goes_on,
        kwargs=request.chat_template_kwargs,
    )
    reads_calls = tools is not None and state.tool_parser() == "hermes"
    answers = [
        Answer(
            index,
            state.table,
            HermesReader(parallel=request.parallel_tool_calls is not False) if reads_calls else None,
        )
        for index in range(n)
    ]
    choices = [Choice(prompt, chat_params(request, index)) for index in range(n)]
    request_id = new_request_id("chatcmpl")
    return ChatAnswer(state.generate(request_id, choices), answers, request, request_id, model)


class ChatAnswer:
    """The answer to one request, whole or as a stream."""

    def __init__(
        self, generation: Generation, answers: list[Answer], request: ChatRequest, request_id: str, model: str
    ) -> None:
        self._generation = generation
        self._answers = answers
        self._request = request
        self._frame: dict[str, Any] = {"id": request_id, "created": int(time.time()), "model": model}

    async def whole(self) -> ChatResponse:
        """Everything at once."""
        pieces: list[list[ChatChunkChoice]] = [[] for _ in self._answers]
        async for index, output in self._generation:
            pieces[index].append(self._answers[index].piece(output))
        return ChatResponse(
            **self._frame,
            object="chat.completion",
            choices=[_joined(each) for each in pieces],
            usage=usage(self._generation.choices, len(self._answers)),
        )

    def stream(self) -> Response:
        """Server-sent events."""
        return EventStream(self._events(), self.close)

    def close(self) -> None:
        """Stop computing what nobody waits for."""
        self._generation.close()

    async def _events(self) -> AsyncIterator[bytes]:
        options = self._request.stream_options
        started: set[int] = set()
        async for index, output in self._generation:
            for piece in self._pieces(index, output, started):
                chunk = ChatChunk(**self._frame, object="chat.completion.chunk", choices=[piece])
                if options and options.continuous_usage_stats:
                    chunk.usage = usage(self._generation.choices, len(self._answers))
                yield event(chunk)
        if options and options.include_usage:
            chunk = ChatChunk(**self._frame, object="chat.completion.chunk", choices=[])
            chunk.usage = usage(self._generation.choices, len(self._answers))
            yield event(chunk)

    def _pieces(self, index: int, output: RequestOutput, started: set[int]) -> Iterator[ChatChunkChoice]:
        """The role when an answer's first token is there (clients time the first chunk), then what is new."""
        piece = self._answers[index].piece(output)
        if index not in started:
            started.add(index)
            role = Delta(role="assistant", content="")
            yield ChatChunkChoice(index=index, delta=role, logprobs=None, finish_reason=None)
        if (
            piece.delta.model_fields_set
            or piece.finish_reason is not None
            or (piece.logprobs and piece.logprobs.content)
        ):
            yield piece

"""Every route, each a few lines."""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel

from oscar_serving.server.body import read_json, validate
from oscar_serving.server.chat import ChatAnswer, chat
from oscar_serving.server.completions import CompletionAnswer, complete
from oscar_serving.server.dashboard import page
from oscar_serving.server.errors import RETRY_AFTER, ApiError, bad_request
from oscar_serving.server.metrics import CONTENT_TYPE
from oscar_serving.server.openapi import errors, events, json_body
from oscar_serving.server.refused import refuse_unsupported
from oscar_serving.server.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from oscar_serving.server.responses import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    HealthResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
    TokenizerInfo,
    VersionResponse,
)
from oscar_serving.server.state import ServerState
from oscar_serving.server.streaming import ClientGone, until_gone
from oscar_serving.version import __version__

router = APIRouter()

Body = TypeVar("Body", bound=BaseModel)

#: What nginx logs for a client that left; nobody reads it.
_CLIENT_CLOSED = 499
_GENERATION_ERRORS = errors(400, 401, 404, 408, 413, 415, 429, 500, 503)
_BODY_ERRORS = errors(400, 401, 404, 408, 413, 415)


async def _read(request: Request, model: type[Body]) -> Body:
    data = await read_json(request, ServerState.of(request).settings.body_timeout)
    if issubclass(model, GenerationRequest):
        refuse_unsupported(data)
    parsed = validate(model, data)
    if isinstance(parsed, GenerationRequest) and parsed.stream_options is not None and not parsed.stream:
        raise bad_request("stream_options is only allowed with stream true", "stream_options")
    return parsed


def _json(model: BaseModel) -> Response:
    return Response(model.model_dump_json(exclude_unset=True), media_type="application/json")


async def _answer(request: Request, answer: CompletionAnswer | ChatAnswer, *, stream: bool) -> Response:
    if stream:
        return answer.stream()
    try:
        return _json(await until_gone(request, answer.whole()))
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED)
    finally:
        answer.close()


def _stream_or(model: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, object]]:
    return {200: {"model": model, "content": events(chunk)}}


@router.post(
    "/v1/completions",
    response_model=None,
    responses={**_stream_or(CompletionResponse, CompletionResponse), **_GENERATION_ERRORS},
    openapi_extra=json_body(CompletionRequest),
)
async def completions(request: Request) -> Response:
    """Continue prompts."""
    body = await _read(request, CompletionRequest)
    return await _answer(request, await complete(ServerState.of(request), body), stream=bool(body.stream))


@router.post(
    "/v1/chat/completions",
    response_model=None,
    responses={**_stream_or(ChatResponse, ChatChunk), **_GENERATION_ERRORS},
    openapi_extra=json_body(ChatRequest),
)
async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    body = await _read(request, ChatRequest)
    return await _answer(request, await chat(ServerState.of(request), body), stream=bool(body.stream))


def _cards(state: ServerState) -> list[ModelCard]:
    return [
        ModelCard(
            id=name,
            object="model",
            created=state.created,
            owned_by="oscar-serving",
            root=state.settings.model_root or state.names[0],
            max_model_len=state.engine.max_model_len,
        )
        for name in state.names
    ]


@router.get("/v1/models", response_model=None, responses={200: {"model": ModelList}, **errors(401)})
async def models(request: Request) -> Response:
    """The model under each of its names."""
    return _json(ModelList(object="list", data=_cards(ServerState.of(request))))


@router.get("/v1/models/{model:path}", response_model=None, responses={200: {"model": ModelCard}, **errors(401, 404)})
async def model(request: Request, model: str) -> Response:
    """One name of the model."""
    state = ServerState.of(request)
    name = state.model_name(model)
    return _json(next(card for card in _cards(state) if card.id == name))


@router.get("/", response_class=HTMLResponse, responses=errors(401))
async def dashboard(request: Request) -> HTMLResponse:
    """A page for people."""
    return page(ServerState.of(request))


@router.get("/health", response_model=None, responses={200: {"model": HealthResponse}, **errors(503)})
async def health(request: Request) -> Response:
    """200 once the engine has answered a real request, until it stops."""
    if not ServerState.of(request).ready:
        wait = {"Retry-After": str(RETRY_AFTER["shutting_down"])}
        raise ApiError(503, "the server is starting or shutting down", code="not_ready", headers=wait)
    return _json(HealthResponse(status="ok"))


@router.get("/version", response_model=None, responses={200: {"model": VersionResponse}})
async def version() -> Response:
    """Version of oscar-serving."""
    return _json(VersionResponse(version=__version__))


@router.get(
    "/metrics",
    response_model=None,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **errors(401)},
)
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(ServerState.of(request).metrics.render(), headers={"Content-Type": CONTENT_TYPE})


@router.post(
    "/tokenize",
    response_model=None,
    responses={200: {"model": TokenizeResponse}, **_BODY_ERRORS},
    openapi_extra=json_body(TokenizeRequest),
)
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as the chat template writes it."""
    body = await _read(request, TokenizeRequest)
    state = ServerState.of(request)
    state.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt")
    if body.messages is not None:
        tokens = await state.prompts.render_chat(
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt is not False,
            kwargs=body.chat_template_kwargs,
        )
    else:
        assert body.prompt is not None
        tokens = await state.prompts.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    result = TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=state.engine.max_model_len)
    if body.return_token_strs:
        result.token_strs = [state.table.text_of(token) for token in tokens]
    return _json(result)


@router.post(
    "/detokenize",
    response_model=None,
    responses={200: {"model": DetokenizeResponse}, **_BODY_ERRORS},
    openapi_extra=json_body(DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    """Text of token ids, special tokens included."""
    body = await _read(request, DetokenizeRequest)
    state = ServerState.of(request)
    state.model_name(body.model)
    return _json(DetokenizeResponse(prompt=await state.prompts.decode(body.tokens)))


@router.get("/tokenizer_info", response_model=None, responses={200: {"model": TokenizerInfo}, **errors(401)})
async def tokenizer_info(request: Request) -> Response:
    """What a client needs to know of the tokenizer to build the same prompts."""
    state = ServerState.of(request)
    tokenizer = state.engine.tokenizer
    info = TokenizerInfo(
        tokenizer_class=type(tokenizer).__name__,
        vocab_size=len(tokenizer),
        model_max_length=state.engine.max_model_len,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
        unk_token=tokenizer.unk_token,
        add_bos_token=bool(getattr(tokenizer, "add_bos_token", False)),
        chat_template=state.prompts.chat_template,
    )
    return _json(info)

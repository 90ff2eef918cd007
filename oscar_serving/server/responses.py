"""What the server answers. Sent with ``exclude_unset``: a field is on the wire exactly when it was given."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(BaseModel):
    """How much of the prompt came from the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of a request; the prompt counts once, whatever ``n``."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """One entry a token in each list; the first token of an echoed prompt has null."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One continuation, or the next piece of it in a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class CompletionResponse(BaseModel):
    """Answer of ``/v1/completions``, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(BaseModel):
    """A likely token and its natural log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    """The sampled token, with the most likely ones beside it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """One entry a token."""

    content: list[ChatTokenLogprob]


class CalledFunction(BaseModel):
    """Name and JSON text of the arguments."""

    name: str
    arguments: str


class CalledTool(BaseModel):
    """A call that the model asks for; ``index`` counts the calls of a message, in streams only."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class AnswerMessage(BaseModel):
    """The assistant's message."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[CalledTool] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None = None


class ChatResponse(BaseModel):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What is new in a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[CalledTool] | None = None


class ChatChunkChoice(BaseModel):
    """The next piece of one answer."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None


class ChatChunk(BaseModel):
    """One chunk of a streamed ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """One served name."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """Answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[ModelCard]


class VersionResponse(BaseModel):
    """Answer of ``/version``."""

    version: str


class HealthResponse(BaseModel):
    """Answer of ``/health``."""

    status: Literal["ok"]


class TokenizeResponse(BaseModel):
    """Answer of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeResponse(BaseModel):
    """Answer of ``/detokenize``."""

    prompt: str


class TokenizerInfo(BaseModel):
    """Answer of ``/tokenizer_info``: what a client needs to build the same prompts."""

    tokenizer_class: str
    vocab_size: int
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    add_bos_token: bool
    chat_template: str | None

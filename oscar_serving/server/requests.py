"""What clients send. An optional field may be null, which means its default; unknown ones are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from oscar_serving.engines.hf.params import MAX_LOGPROBS

#: Most choices of one request: prompts times ``n``.
MAX_CHOICES = 256
#: Most stop strings of one request; each is looked for at every token.
MAX_STOPS = 64

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        _TOKENS,
        {"type": "array", "items": _TOKENS, "minItems": 1},
    ]
}

#: Text, a list of texts, token ids, or a list of token ids; read by ``prompts.parse_prompts``, whose errors
#: are clearer than a union's.
Prompt = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
StopString = Annotated[str, Field(min_length=1, max_length=1000)]
Count = Annotated[int, Field(ge=0)]
TokenId = Annotated[int, Field(ge=0)]


#: Only an assistant's message may be without content: it may hold calls alone.
_CONTENT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"properties": {"role": {"const": "assistant"}}},
        {"properties": {"content": {"not": {"type": "null"}}}, "required": ["content"]},
    ]
}


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Request):
    """``include_usage``: one more chunk with the usage; ``continuous_usage_stats``: usage in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(_Request):
    """Fields that completions and chat share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d{1,18}$")], Annotated[float, Field(ge=-100, le=100)]] | None = (
        None
    )


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class ContentPart(_Request):
    """One part of a message; only text is served."""

    type: Literal["text"]
    text: str


class FunctionCall(_Request):
    """A call of a tool; ``arguments`` is JSON text."""

    name: str
    arguments: str


class ToolCall(_Request):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(_Request):
    """One message; other fields go to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow", json_schema_extra=_CONTENT_SCHEMA)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class FunctionDefinition(_Request):
    """A tool's name, purpose and JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Request):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(GenerationRequest):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(_Request):
    """Body of ``/tokenize``: a prompt, or messages as in chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(_Request):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: list[TokenId]

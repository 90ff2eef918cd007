"""From a request's fields to the engine's sampling parameters."""

from __future__ import annotations

from oscar_serving.engines.hf import RequestError, SamplingParams
from oscar_serving.server.errors import ApiError
from oscar_serving.server.requests import ChatRequest, CompletionRequest, GenerationRequest

#: What OpenAI's completions endpoint generates when nothing is said; chat goes on to the end of the context.
DEFAULT_COMPLETION_TOKENS = 16


def completion_params(request: CompletionRequest, choice: int) -> SamplingParams:
    """Parameters of the ``choice``-th continuation of each prompt."""
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    prompt_logprobs = request.logprobs if request.echo else None
    return _params(request, choice, max_tokens, request.logprobs, prompt_logprobs)


def chat_params(request: ChatRequest, choice: int) -> SamplingParams:
    """Parameters of the ``choice``-th answer."""
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    return _params(request, choice, max_tokens, (request.top_logprobs or 0) if request.logprobs else None, None)


def _params(
    request: GenerationRequest,
    choice: int,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """A null field keeps the engine's default. With a seed, each choice draws its own numbers from it."""
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "ignore_eos",
            "skip_special_tokens",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        if (value := getattr(request, name)) is not None
    }
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=None if request.seed is None else _wrapped(request.seed + choice),
            stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
            stop_token_ids=tuple(request.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            logit_bias={int(token): float(bias) for token, bias in (request.logit_bias or {}).items()},
            **given,
        )
    except RequestError as error:
        raise ApiError.of(error) from None


def _wrapped(seed: int) -> int:
    """Into the range of 64-bit integers."""
    return (seed + 2**63) % 2**64 - 2**63

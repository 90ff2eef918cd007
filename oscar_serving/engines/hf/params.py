"""What a caller asks of the engine for one request, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]

#: Largest number of top log-probabilities a request may ask for.
MAX_LOGPROBS = 100
#: ``seed`` is any integer that fits 64 bits, signed.
_SEED_RANGE = range(-(2**63), 2**63)


class RequestError(ValueError):
    """A request that is refused, or that failed; ``code`` is for programs, the message for people.

    Codes: ``context_length_exceeded``, ``cache_too_small``, ``invalid_parameter`` (``param`` names it),
    ``empty_prompt``, ``invalid_token``, ``duplicate_request``, ``queue_full``, ``shutting_down``,
    ``internal_error``.
    """

    def __init__(self, message: str, code: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. Validated on construction: a bad value raises :class:`RequestError`.

    Attributes
    ----------
    max_tokens
        Tokens to generate; ``None`` means as many as the context allows, 0 generates nothing (with
        ``prompt_logprobs``: score the prompt).
    temperature
        0 is greedy: the most likely token, the lowest id among equals.
    top_p, top_k, min_p
        Nucleus mass in (0, 1]; number of candidates, 0 for all; least probability relative to the most likely
        token. Applied in this order of narrowing: top-k, top-p, min-p, all on the distribution after
        temperature.
    seed
        Seed of this request's own generator: the same draw alone or in a batch. ``None``: derived from the
        engine's seed.
    stop, stop_token_ids
        Strings that end the text (not part of it) and token ids that end it.
    ignore_eos
        Do not stop at the model's end-of-sequence tokens.
    logprobs
        Number of most likely tokens to report beside each generated one; ``None`` reports nothing, 0 the
        token alone. Taken from the model's distribution before temperature, penalties and bias.
    prompt_logprobs
        The same for the tokens of the prompt.
    repetition_penalty, presence_penalty, frequency_penalty
        Repetition: divides positive and multiplies negative logits of tokens of prompt and output. Presence
        and frequency: subtracted once, and per occurrence, for tokens of the output.
    logit_bias
        Token id → number in [-100, 100] added to its logit.
    skip_special_tokens
        Leave special tokens out of the text (they are in ``token_ids`` all the same).
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.top_k == -1:  # the other spelling of "all"
            object.__setattr__(self, "top_k", 0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 0, None)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None and (not _is_int(self.seed) or self.seed not in _SEED_RANGE):
            raise _invalid("seed", self.seed, "a 64-bit integer")
        if not all(isinstance(s, str) and s for s in self.stop):
            raise _invalid("stop", self.stop, "non-empty strings")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, None)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, None)
            _number("logit_bias", bias, -100.0, 100.0)

    def with_(self, **changes: object) -> SamplingParams:
        """A copy with some fields replaced (validated again)."""
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def penalised(self) -> bool:
        """Whether logits depend on earlier tokens or on a bias."""
        return bool(
            self.repetition_penalty != 1.0 or self.presence_penalty or self.frequency_penalty or self.logit_bias
        )


@dataclass(frozen=True)
class TokenLogprob:
    """Natural log-probability of a token, and the most likely ones at its place as (id, logprob)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What is new since the last output of a request.

    Attributes
    ----------
    text, token_ids
        Deltas. ``text`` never splits a UTF-8 character and lags behind ``token_ids`` only by what may still
        become a stop string; the token that ended the request is in ``token_ids``, the stop string is not in
        ``text``.
    logprobs
        One entry for each of ``token_ids`` when asked for, else ``None``.
    prompt_logprobs
        One entry a prompt token (the first is ``None``), in the first output only; ``None`` when not asked
        for.
    finish_reason
        ``None`` until the last output, which every request gets: ``stop``, ``length``, ``abort`` or
        ``error``.
    stop_reason
        The stop string or stop token id that ended the request; ``None`` for end of sequence and otherwise.
    prompt_tokens, cached_tokens
        Length of the prompt, and how much of it came from the prefix cache.
    error
        What went wrong, with ``finish_reason`` ``error``.
    """

    request_id: str
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: RequestError | None = None


def _invalid(name: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{name}={value!r}: allowed is {allowed}", "invalid_parameter", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(name: str, value: object, low: int, high: int | None) -> None:
    if not _is_int(value) or value < low or (high is not None and value > high):  # type: ignore[operator]
        raise _invalid(
            name,
            value,
            f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}",
        )


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or not (low <= value <= high) or (open_low and value == low):  # type: ignore[operator]
        bound = f"a number {'above' if open_low else 'from'} {low:g}"
        raise _invalid(name, value, bound if math.isinf(high) else f"{bound} to {high:g}")

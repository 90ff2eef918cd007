"""Log-probabilities in the two forms of the API."""

from __future__ import annotations

from collections.abc import Sequence

from oscar_serving.engines.hf.params import TokenLogprob
from oscar_serving.server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob
from oscar_serving.server.tokens import TokenTable

#: JSON has no infinity: what an impossible token is reported with.
LEAST = -9999.0


def rounded(logprob: float) -> float:
    """One rounding for sampled and top tokens: lm-evaluation-harness compares the two as floats."""
    return round(max(logprob, LEAST), 6)


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[TokenLogprob | None], table: TokenTable, *, offset: int = 0
) -> CompletionLogprobs:
    """``/v1/completions`` form, text offsets starting at ``offset``.

    Where two of the top tokens read alike, the likelier one stands; the token itself is in its dictionary
    always.
    """
    result = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    for token, entry in zip(token_ids, entries, strict=True):
        text = table.text_of(token)
        result.tokens.append(text)
        result.text_offset.append(offset)
        offset += len(text)
        if entry is None:  # nothing precedes the first token of a prompt
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        result.token_logprobs.append(rounded(entry.logprob))
        top: dict[str, float] = {}
        for other, logprob in (*entry.top, (token, entry.logprob)):
            top.setdefault(table.text_of(other), rounded(logprob))
        result.top_logprobs.append(top)
    return result


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprob], table: TokenTable) -> ChatLogprobs:
    """``/v1/chat/completions`` form."""

    def fields(token: int, logprob: float) -> dict[str, object]:
        return {
            "token": table.text_of(token),
            "logprob": rounded(logprob),
            "bytes": list(table.bytes_of(token)),
        }

    return ChatLogprobs(
        content=[
            ChatTokenLogprob.model_validate(
                fields(token, entry.logprob)
                | {"top_logprobs": [TopLogprob.model_validate(fields(*other)) for other in entry.top]}
            )
            for token, entry in zip(token_ids, entries, strict=True)
        ]
    )

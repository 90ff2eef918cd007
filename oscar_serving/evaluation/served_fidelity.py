"""Fidelity of a server to another one, such as the same model on a BF16 cache, through the OpenAI API alone.

A server tells the log probabilities of a few tokens only. The KL divergence is therefore that of a coarser event: each
of the tokens which both tell, and everything else together: a lower bound of the true one. Top-1 agreement and
(``echo``) perplexity are exact.

Two ways to ask:

``echo``
    One request a sequence, ``echo`` with ``logprobs``. Prefill mode ``raw`` reads the chunk's own keys unquantized: a
    server in that mode is judged on less than it does when it decodes.
``next``
    One request of one token at every ``stride``-th position. With prefix caching the history is read as decode reads
    it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from oscar_serving.evaluation.endpoint import EndpointClient
from oscar_serving.evaluation.fidelity import TokenFidelity, summarize
from oscar_serving.evaluation.model import EvaluationError

#: What one position's answer is: log probability of the next token (``None`` if it was not told), and of the likeliest
#: ones.
Answer = tuple[float | None, dict[str, float]]
_FIRST = 16


def served_fidelity(
    endpoint: EndpointClient,
    reference: EndpointClient,
    sequences: Sequence[Tensor],
    *,
    mode: Literal["echo", "next"] = "echo",
    stride: int = 16,
    top: int = 5,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Compare a server with a reference on int64 sequences.

    Returns
    -------
    dict
        As :func:`~oscar_serving.evaluation.fidelity.summarize`, and ``top`` and ``mode``; in mode ``next`` without
        perplexities.
    """
    if mode not in ("echo", "next") or stride < 1 or top < 1:
        raise EvaluationError(f"mode={mode!r}, stride={stride}, top={top}: echo or next, and at least 1 each")
    fidelity = []
    for index, sequence in enumerate(sequences):
        ids = sequence.tolist()
        positions = list(range(_FIRST, len(ids), stride if mode == "next" else 1))
        if not positions:
            raise EvaluationError(f"a sequence of {len(ids)} tokens is too short: at least {_FIRST + 1}")
        answers = _served(endpoint, ids, positions, mode, top)
        expected = _served(reference, ids, positions, mode, top)
        fidelity.append(_compare(expected, answers))
        if progress is not None:
            progress(index + 1, len(sequences))
    result = summarize(fidelity) | {"top": top, "mode": mode}
    if mode == "next":
        result = {key: value for key, value in result.items() if "perplexity" not in key}
    return result


def _served(endpoint: EndpointClient, ids: list[int], positions: list[int], mode: str, top: int) -> list[Answer]:
    if mode == "echo":
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": top}
        told = _logprobs(endpoint.post("completions", body))
        if len(told["token_logprobs"]) < len(ids):
            raise EvaluationError(f"{endpoint.name} does not echo the prompt's log probabilities; use mode 'next'")
        return [(told["token_logprobs"][p], told["top_logprobs"][p]) for p in positions]
    found: list[Answer] = []
    for position in positions:
        body = {"prompt": ids[:position], "max_tokens": 1, "temperature": 0, "logprobs": top}
        found.append((None, _logprobs(endpoint.post("completions", body))["top_logprobs"][0]))
    return found


def _logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    told = answer["choices"][0].get("logprobs")
    if not told or not told.get("top_logprobs"):
        raise EvaluationError("the server tells no log probabilities on /completions")
    return dict(told)


def _compare(reference: list[Answer], other: list[Answer]) -> TokenFidelity:
    rows = [_position(a, b) for a, b in zip(reference, other, strict=True)]
    return TokenFidelity(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def _position(reference: Answer, other: Answer) -> tuple[float, float, float, float]:
    (expected, mine), (got, theirs) = reference, other
    both = [token for token in mine if token in theirs]
    p = [math.exp(mine[t]) for t in both]
    q = [math.exp(theirs[t]) for t in both]
    p.append(max(1e-12, 1 - sum(p)))
    q.append(max(1e-12, 1 - sum(q)))
    kld = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    agrees = float(max(mine, key=mine.__getitem__) == max(theirs, key=theirs.__getitem__))
    return kld, agrees, -(expected or 0.0), -(got or 0.0)

"""Attention of a whole sequence under the position rule, over what the cache would give back of K and V."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.cache.rule import reads_window

#: Elements of the score matrix that exist at a time.
_SCORE_ELEMENTS = 1 << 24
_MOST_QUERIES = 256


class Tiers(NamedTuple):
    """What a query reads of earlier tokens, in model space, ``[heads, tokens, d]`` each.

    ``*_history`` as decoded from codes, ``*_window`` as kept in the window store. A cache of one tier has the same
    tensors in both.
    """

    k_history: Tensor
    v_history: Tensor
    k_window: Tensor
    v_window: Tensor


def rule_attention(
    q: Tensor,
    tiers: Tiers,
    spec: AttentionSpec,
    *,
    sink: int,
    recent: int,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attend for the last positions of a sequence, each query under the position rule.

    Same result as :func:`oscar_serving.attention.reference.reference_attention` in mode ``rule``, in blocks of queries:
    one product with the keys that most of the block's queries read, and a correction where the block's queries differ.

    Parameters
    ----------
    q
        ``[query heads, queries, d]``, grouped by KV head, positions ``tokens - queries …``.
    tiers
        ``[heads, tokens, d]``, the queries' own tokens included.
    sink, recent
        The position rule.
    sink_logits
        ``[query heads]`` learned sinks, or ``None``.

    Returns
    -------
    Tensor
        ``[query heads, queries, d]``.
    """
    heads, tokens, _ = tiers.k_history.shape
    query_heads, queries, _ = q.shape
    grouped = q.reshape(heads, -1, queries, q.shape[-1])
    block = max(16, min(_MOST_QUERIES, _SCORE_ELEMENTS // max(1, query_heads * tokens)))
    first_query = tokens - queries
    output = torch.empty_like(grouped)
    for start in range(0, queries, block):
        stop = min(start + block, queries)
        output[:, :, start:stop] = _attend_block(
            grouped[:, :, start:stop], tiers, spec, first_query + start, sink, recent, sink_logits
        )
    return output.flatten(0, 1)


def _attend_block(
    q: Tensor, tiers: Tiers, spec: AttentionSpec, start: int, sink: int, recent: int, sink_logits: Tensor | None
) -> Tensor:
    """Queries ``[heads, group, block, d]`` at the positions ``start …``."""
    heads, group, block, _ = q.shape
    stop = start + block
    first = 0 if spec.sliding_window is None else max(0, start - spec.sliding_window + 1)
    # Keys before `mixed` are read from the history by every query of the block (the sink apart), keys from `own` on
    # from the windows by every query; between, it depends on the query.
    sunk = min(max(sink, first), stop)
    mixed = max(sunk, start - recent + 1)
    own = max(mixed, stop - recent)
    keys = _join(tiers.k_window, tiers.k_history, first, sunk, mixed, stop)
    values = _join(tiers.v_window, tiers.v_history, first, sunk, mixed, stop)
    rows = q.flatten(1, 2)

    scores = (rows @ keys.mT).view(heads, group, block, -1)
    position = torch.arange(start, stop, device=q.device)[:, None]
    from_history = None
    if own > mixed:
        key = torch.arange(mixed, own, device=q.device)[None, :]
        from_history = ~reads_window(key, position, sink=sink, recent=recent)
        decoded = (rows @ tiers.k_history[:, mixed:own].mT).view(heads, group, block, -1)
        part = scores[..., mixed - first : own - first]
        part.copy_(torch.where(from_history, decoded, part))
    scores.mul_(spec.scale)
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    later = torch.arange(start, stop, device=q.device)[None, :] > position
    scores[..., start - first :].masked_fill_(later, -math.inf)
    if spec.sliding_window is not None and stop - spec.sliding_window > first:
        key = torch.arange(first, stop - spec.sliding_window, device=q.device)[None, :]
        scores[..., : key.shape[1]].masked_fill_(key <= position - spec.sliding_window, -math.inf)
    if sink_logits is None:
        weights = scores.softmax(-1)
    else:
        extra = sink_logits.to(scores.dtype).view(heads, group, 1, 1).expand(-1, -1, block, 1)
        weights = torch.cat([scores, extra], -1).softmax(-1)[..., :-1]

    output = weights.flatten(1, 2) @ values
    if from_history is not None:
        share = weights[..., mixed - first : own - first] * from_history
        change = tiers.v_history[:, mixed:own] - tiers.v_window[:, mixed:own]
        output += share.flatten(1, 2) @ change
    return output.view(heads, group, block, -1)


def _join(window: Tensor, history: Tensor, first: int, sunk: int, mixed: int, stop: int) -> Tensor:
    if window is history:
        return window[:, first:stop]
    return torch.cat([window[:, first:sunk], history[:, sunk:mixed], window[:, mixed:stop]], 1)

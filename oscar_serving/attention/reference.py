"""Float64 reference of attention over a mixed-precision cache. It decides what is right; it is not fast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.cache.rule import reads_window
from oscar_serving.codec import dequantize, quantize
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform


class Reference(NamedTuple):
    """Output float64 ``[queries, query heads, d]`` in model space and LSE float64 ``[queries, query heads]``."""

    output: Tensor
    lse: Tensor


def stored(
    k: Tensor, v: Tensor, transform: LayerTransform, config: OscarConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """INT2 K, INT2 V, window K, window V of ``k, v`` ``[tokens, heads, d]``: what the tiers hold (float64)."""
    group = k.shape[-1] // config.groups(k.shape[-1])
    tiers: list[Tensor] = []
    for x, bits, shrink, unit in (
        (transform.rotate_k(k), config.k_bits, transform.k_shrink, transform.k_unit),
        (transform.rotate_v(v), config.v_bits, transform.v_shrink, transform.v_unit),
    ):
        q = quantize(x, bits, group, shrink=shrink, unit=unit, scale_dtype=config.scale_dtype, levels=config.levels)
        tiers.append(dequantize(*q, unit=unit, bits=bits, levels=config.levels, dtype=torch.float64))
        tiers.append(x.to(getattr(torch, config.window_dtype)).double())
    return tiers[0], tiers[2], tiers[1], tiers[3]


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    transform: LayerTransform,
    config: OscarConfig,
    spec: AttentionSpec,
    chunk_start: int | None = None,
    window_present: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Reference:
    """Attend for the last ``len(q)`` positions of one sequence.

    Parameters
    ----------
    q
        ``[queries, query heads, d]``, model space, positions ``len(k) - len(q) …``.
    k, v
        ``[tokens, KV heads, d]``, model space.
    chunk_start
        Mode ``raw``: keys at or after this position are read as given, neither rotated nor rounded. ``None``: mode
        ``rule``.
    window_present
        bool ``[tokens]``: where the window store still has the token; elsewhere INT2 is read (a soft prefix hit).
    sink_logits
        ``[query heads]``: learned sinks, one extra logit a head with no value.
    """
    tokens, heads, _ = k.shape
    queries, query_heads, _ = q.shape
    ratio = query_heads // heads
    k_int, v_int, k_win, v_win = (t.repeat_interleave(ratio, 1) for t in stored(k, v, transform, config))
    k_raw, v_raw = (t.double().repeat_interleave(ratio, 1) for t in (k, v))
    q_raw = q.double()
    q_grouped = q_raw.reshape(queries, heads, ratio, -1)
    q_rot = torch.einsum("thgd,hde->thge", q_grouped, transform.q_rotation.double()).flatten(1, 2)
    bias = torch.einsum("thgd,hd->thg", q_grouped, transform.k_mean.double()).flatten(1, 2)

    key = torch.arange(tokens)[None, :]
    query = torch.arange(tokens - queries, tokens)[:, None]
    window = reads_window(key, query, sink=config.sink, recent=config.recent)
    if window_present is not None:
        window = window & window_present[None, :]
    raw = (key >= chunk_start).expand(queries, tokens) if chunk_start is not None else torch.zeros_like(window)

    def dots(keys: Tensor, q_: Tensor) -> Tensor:
        return torch.einsum("qhd,khd->hqk", q_, keys)

    score = torch.where(window, dots(k_win, q_rot), dots(k_int, q_rot)) + bias.mT[..., None]
    score = torch.where(raw, dots(k_raw, q_raw), score) * spec.scale
    if spec.softcap is not None:
        score = spec.softcap * torch.tanh(score / spec.softcap)
    seen = key <= query
    if spec.sliding_window is not None:
        seen = seen & (key > query - spec.sliding_window)
    score = score.masked_fill(~seen, -torch.inf)
    if sink_logits is not None:
        extra = sink_logits.double()[:, None, None].expand(-1, queries, 1)
        probability = torch.softmax(torch.cat([score, extra], -1), -1)[..., :-1]
        lse = torch.logsumexp(torch.cat([score, extra], -1), -1)
    else:
        probability, lse = torch.softmax(score, -1), torch.logsumexp(score, -1)

    rotation = transform.v_rotation.double().repeat_interleave(ratio, 0)
    mean = transform.v_mean.double().repeat_interleave(ratio, 0)

    def mix(select: Tensor, values: Tensor) -> Tensor:
        return torch.einsum("hqk,khd->qhd", probability * select, values)

    cached = mix(window & ~raw, v_win) + mix(~window & ~raw, v_int)
    weight = (probability * ~raw).sum(-1).mT[..., None]  # V's mean belongs to the cached keys only
    output = torch.einsum("qhe,hde->qhd", cached, rotation) + weight * mean + mix(raw, v_raw)
    return Reference(output, lse.mT)

"""Attention on packed codes under a name that Hugging Face models dispatch on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oscar_kernels.metal import bridge
from oscar_serving.codec.signed import Signed, dequantize_signed
from oscar_serving.config import ConfigError
from oscar_serving.engines.apple.compiled import MAX_NEW_TOKENS
from oscar_serving.engines.apple.layer import PackedKeys

#: Name under which models find the attention function, and its mask function.
ATTENTION = "oscar_srft"
#: Keys read, and query tokens computed, at once on the CPU: together they bound the scratch.
KEY_BLOCK = 512
QUERY_BLOCK = 256
#: Arguments that change the result and that the kernels do not know.
FOREIGN_ARGUMENTS = ("s_aux", "sinks", "position_bias", "alibi", "attention_bias", "block_mask")


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: PackedKeys | Tensor,
    value: PackedKeys | Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend for ``query`` ``[batch, query heads, tokens, d]``; returns ``[batch, tokens, query heads, d]``.

    With key and value tensors (no cache, or another one) this is transformers' own SDPA function.
    """
    if not isinstance(key, PackedKeys):
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return output, None
    if foreign := [name for name in FOREIGN_ARGUMENTS if kwargs.get(name) is not None]:
        raise ConfigError(f"{', '.join(foreign)}: packed attention does not know this argument; use DynamicCache")
    layer = key.layer
    mask = None
    if attention_mask is not None:
        if attention_mask.dtype != torch.bool or attention_mask.shape[-1] != key.keys:
            raise ConfigError(
                f"attention mask {attention_mask.dtype} {tuple(attention_mask.shape)}: packed attention takes a bool "
                f"mask of {key.keys} keys; leave masks to the model"
            )
        if attention_mask.shape[1] != 1:
            raise ConfigError("an attention mask for each head is not supported; use DynamicCache")
        mask = attention_mask[:, 0].expand(query.shape[0], -1, -1)
    heads = layer.k.codes.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, softcap = layer.sliding_window or 0, float(kwargs.get("softcap") or 0.0)
    if query.shape[2] <= MAX_NEW_TOKENS and (compiled := layer.compiled):
        output = compiled.attend(query, mask, key.first, key.keys, scale=scale, window=window, softcap=softcap)
        return output.to(query.dtype), None
    rotated = per_head(query.float() * scale, layer.k_side.read_matrix, heads)
    bits = layer.config.k_bits, layer.config.v_bits
    output = attend_rotated(rotated, layer.k, layer.v, mask, key.first, key.keys, window, softcap, bits)
    output = per_head(output, layer.v_side.read_matrix.mT, heads)
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def attend_rotated(
    q: Tensor,
    k: Signed,
    v: Signed,
    mask: Tensor | None,
    first: int,
    keys: int,
    window: int,
    softcap: float,
    bits: tuple[int, int],
) -> Tensor:
    """:func:`oscar_kernels.metal.bridge.attend` on an Apple GPU, :func:`attend_in_blocks` elsewhere."""
    if q.device.type == "mps":
        return bridge.attend(q, *k, *v, mask, first, keys, window, softcap)
    return attend_in_blocks(q, k, v, mask, first, keys, window, softcap, bits)


def per_head(x: Tensor, matrices: Tensor, heads: int) -> Tensor:
    """``[batch, query heads, tokens, d]`` times each KV head's matrix."""
    return (x.unflatten(1, (heads, -1)) @ matrices[:, None]).flatten(1, 2)


def attend_in_blocks(
    q: Tensor,
    k: Signed,
    v: Signed,
    mask: Tensor | None,
    first: int,
    keys: int,
    window: int,
    softcap: float,
    bits: tuple[int, int],
) -> Tensor:
    """What the Metal kernel computes, in torch: blocks of keys, an online softmax, no copy of the cache.

    Parameters are those of :func:`oscar_kernels.metal.bridge.attend`; ``q`` float32.
    """
    out = torch.empty_like(q)
    tokens = q.shape[2]
    for begin in range(0, tokens, QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, tokens)
        positions = torch.arange(keys - tokens + begin, keys - tokens + end, device=q.device)
        block_mask = None if mask is None else mask[:, begin:end]
        out[:, :, begin:end] = _attend_block(
            q[:, :, begin:end], k, v, block_mask, first, positions, keys - tokens + end, window, softcap, bits
        )
    return out


def _attend_block(
    q: Tensor,
    k: Signed,
    v: Signed,
    mask: Tensor | None,
    first: int,
    positions: Tensor,
    keys: int,
    window: int,
    softcap: float,
    bits: tuple[int, int],
) -> Tensor:
    heads, d = k.codes.shape[1], q.shape[-1]
    batch, query_heads, tokens, _ = q.shape
    rows = q.unflatten(1, (heads, -1)).flatten(2, 3)  # query head, then token
    ratio = query_heads // heads
    least = torch.finfo(torch.float32).min
    maximum = q.new_full((batch, heads, ratio * tokens, 1), least)
    total = torch.zeros_like(maximum)
    summed = q.new_zeros(batch, heads, ratio * tokens, d)
    begin = max(0, keys - tokens - window + 1) if window else 0
    for start in range(begin, keys, KEY_BLOCK):
        stop = min(start + KEY_BLOCK, keys)
        part = slice(first + start, first + stop)
        scores = rows @ dequantize_signed(Signed(k.codes[:, :, part], k.scales[:, :, part]), bits[0]).mT
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        seen = _seen(positions, start, stop, window, mask)
        if seen is not None:
            # Grouped by query head, so one mask serves them all.
            grouped = scores.view(batch, heads, ratio, tokens, -1)
            scores = grouped.masked_fill(~seen, least).flatten(2, 3)
        highest = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - highest)
        if mask is not None and seen is not None:  # a row may see nothing at all: exp(least - least) is 1
            weights = weights.view(batch, heads, ratio, tokens, -1).masked_fill(~seen, 0.0).flatten(2, 3)
        correction = torch.exp(maximum - highest)
        total = total * correction + weights.sum(-1, keepdim=True)
        values = dequantize_signed(Signed(v.codes[:, :, part], v.scales[:, :, part]), bits[1])
        summed = summed * correction + weights @ values
        maximum = highest
    result = torch.where(total > 0, summed / total.clamp(min=torch.finfo(torch.float32).tiny), 0.0)
    return result.view(batch, query_heads, tokens, d)


def _seen(positions: Tensor, start: int, stop: int, window: int, mask: Tensor | None) -> Tensor | None:
    """Bool ``[batch or 1, 1, 1, tokens, keys]``; ``None`` when every query sees every key of the block."""
    if mask is None and len(positions) == 1 and not window:
        return None
    key = torch.arange(start, stop, device=positions.device)
    seen = key <= positions[:, None]
    if window:
        seen = seen & (key > positions[:, None] - window)
    return seen[None, None, None] if mask is None else (seen & mask[:, :, start:stop])[:, None, None]


def use_packed_attention(model: PreTrainedModel) -> None:
    """Let a Hugging Face model's layers attend through :func:`packed_attention`; other caches keep working."""
    model.set_attn_implementation(ATTENTION)


AttentionInterface.register(ATTENTION, packed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)

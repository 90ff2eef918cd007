"""Store and attend in plain PyTorch over vLLM's two block tables: the path of a CPU engine.

Not fast: it reads a request's whole history back at once. GPUs take the kernels of :mod:`oscar_kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_serving.attention import AttentionSpec
from oscar_serving.cache.rule import reads_window
from oscar_serving.codec import PageLayout, dequantize, pack, quantize, unpack
from oscar_serving.rotation import LayerTransform


def store(
    pages: Tensor,
    windows: Tensor,
    layout: PageLayout,
    transform: LayerTransform,
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    window_slots: Tensor,
) -> None:
    """Write ``k, v`` ``[T, heads, d]``; slot -1 writes nothing."""
    config, tokens = layout.config, layout.config.page_size
    k, v = transform.rotate_k(k), transform.rotate_v(v)
    keep = (slots >= 0).nonzero().squeeze(1)
    page, slot = slots[keep] // tokens, slots[keep] % tokens
    views = layout.byte_views(pages)
    for i, (x, bits, shrink, unit) in enumerate(
        (
            (k, config.k_bits, transform.k_shrink, transform.k_unit),
            (v, config.v_bits, transform.v_shrink, transform.v_unit),
        )
    ):
        codes, meta = quantize(
            x[keep], bits, layout.group_size, shrink=shrink, unit=unit, scale_dtype=config.scale_dtype
        )
        views[2 * i][page, :, slot] = pack(codes, bits)
        views[2 * i + 1][page, :, slot] = meta.flatten(-2).view(torch.uint8)
    size = windows.shape[3]
    keep = (window_slots >= 0).nonzero().squeeze(1)
    page, slot = window_slots[keep] // size, window_slots[keep] % size
    for i, x in enumerate((k, v)):
        windows[page, i, :, slot] = x[keep].to(windows.dtype)


def attend(
    pages: Tensor,
    windows: Tensor,
    layout: PageLayout,
    transform: LayerTransform,
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int,
    page_row: Tensor,
    window_row: Tensor,
    *,
    raw: bool,
    sinks: Tensor | None,
) -> Tensor:
    """Attend for the last ``n`` tokens of one request.

    Parameters
    ----------
    q
        ``[n, query heads, d]``, model space, the last ``n`` positions.
    k, v
        Keys and values ``[m, heads, d]`` of the last ``m`` positions, model space, that are read without the window
        store (``m`` = 0 or ``n``); all tokens are stored already.
    length
        Tokens of the request, the queries included.
    page_row, window_row
        Block ids of the two stores.
    raw
        Read this step's keys as given; else by the position rule.
    sinks
        Learned sink logits ``[query heads]``.
    """
    config, n, heads = layout.config, q.shape[0], k.shape[1]
    first, key = length - k.shape[0], torch.arange(length)
    query = torch.arange(length - n, length)[:, None]
    block = page_row[key // config.page_size].long()
    read = [s[block, :, key % config.page_size] for s in layout.byte_views(pages)]
    k_int, v_int = (
        dequantize(
            unpack(codes, bits),
            meta.view(layout.meta_dtype).unflatten(-1, (layout.groups, 2)),  # type: ignore[no-untyped-call]
            unit=unit,
            bits=bits,
        )
        for codes, meta, bits, unit in (
            (read[0], read[1], config.k_bits, transform.k_unit),
            (read[2], read[3], config.v_bits, transform.v_unit),
        )
    )
    block = window_row[key // windows.shape[3]].long()
    k_win, v_win = (windows[block, i, :, key % windows.shape[3]].float() for i in (0, 1))
    k_win[first:] = transform.rotate_k(k).to(windows.dtype).float()
    v_win[first:] = transform.rotate_v(v).to(windows.dtype).float()
    present = (block != 0) | (key >= first)
    near = reads_window(key[None, :], query, sink=config.sink, recent=config.recent) & present
    # Blocks that left the window may be another request's by now, of any type: not even 0 times their bytes.
    unread = ~near.any(0)
    k_win[unread] = v_win[unread] = 0.0
    own = (key >= first).expand(n, length) if raw else torch.zeros(n, length, dtype=torch.bool)

    def dots(keys: Tensor, queries: Tensor) -> Tensor:
        return torch.einsum("qhgd,khd->hgqk", queries, keys)

    grouped = q.float().unflatten(1, (heads, -1))  # type: ignore[no-untyped-call]
    rotated = transform.rotate_q(q).unflatten(1, (heads, -1))  # type: ignore[no-untyped-call]
    bias = torch.einsum("qhgd,hd->hgq", grouped, transform.k_mean)[..., None]
    score = torch.where(near, dots(k_win, rotated), dots(k_int, rotated)) + bias
    if raw:
        score[..., first:] = dots(k.float(), grouped)
    score = score * spec.scale
    if spec.softcap is not None:
        score = spec.softcap * torch.tanh(score / spec.softcap)
    score = score.masked_fill(key[None, :] > query, -torch.inf)
    if sinks is not None:
        extra = sinks.float().unflatten(0, (heads, -1))[..., None, None].expand(-1, -1, n, 1)  # type: ignore[no-untyped-call]
        probability = torch.softmax(torch.cat([score, extra], -1), -1)[..., :-1]
    else:
        probability = torch.softmax(score, -1)

    def mix(select: Tensor, values: Tensor) -> Tensor:
        return torch.einsum("hgqk,khd->qhgd", probability * select, values)

    cached = mix(near & ~own, v_win) + mix(~near & ~own, v_int)
    weight = (probability * ~own).sum(-1).permute(2, 0, 1)[..., None]
    out = torch.einsum("qhge,hde->qhgd", cached, transform.v_rotation) + weight * transform.v_mean[:, None]
    if raw:
        out += torch.einsum("hgqk,khd->qhgd", probability[..., first:], v.float())
    return out.flatten(1, 2)

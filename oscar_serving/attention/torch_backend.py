"""Store and attend in eager PyTorch, for any device.

Attention walks the keys in tiles with an online softmax. One tile of one request is read back at a time, so scratch is
bounded by :data:`KEY_TILE` and :data:`QUERY_BLOCK`, never by the length of the history.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from oscar_serving.attention.base import NULL_PAGE, BatchTables, LayerCache
from oscar_serving.attention.tiles import KeyTile, OnlineSoftmax, aligned
from oscar_serving.codec import pack, quantize

#: Keys of a tile; tiles begin at multiples of it, so that neither chunking nor batching moves them.
KEY_TILE = 1024
#: Query positions of a block, likewise aligned.
QUERY_BLOCK = 64


class TorchBackend:
    """The portable backend."""

    name = "torch"

    def store(self, layer: LayerCache, k: Tensor, v: Tensor, tables: BatchTables) -> None:
        """Write new ``k, v`` ``[T, heads, d]`` (model space) to both stores."""
        k, v = layer.transform.rotate_k(k), layer.transform.rotate_v(v)
        quantized, window = _slots(tables, layer.layout.config.page_size)
        if not layer.windows_only:
            sections = packed(layer, k[quantized.rows], v[quantized.rows])
            for view, section in zip(layer.layout.byte_views(layer.pages), sections, strict=True):
                view[quantized.page, :, quantized.slot] = section
        for kv, x in enumerate((k, v)):
            layer.windows[window.page, kv, :, window.slot] = x[window.rows].to(layer.windows.dtype)

    def attend(self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, tables: BatchTables) -> Tensor:
        """Attend for ``q`` ``[T, query heads, d]``; see :class:`~oscar_serving.attention.base.AttentionBackend`."""
        # Rotated as in store, with the same shapes and so to the same bits.
        own = (layer.transform.rotate_k(k), layer.transform.rotate_v(v)) if reads_own(tables) else (k, v)
        out = torch.empty_like(q)
        for b, (start, end) in enumerate(pairwise(tables.host[0])):
            if start < end:
                rows = slice(start, end)
                out[rows] = attend_request(layer, q[rows], k[rows], v[rows], own[0][rows], own[1][rows], tables, b)
        return out


def reads_own(tables: BatchTables) -> bool:
    """Whether any request reads new tokens by the position rule, not raw."""
    starts, lengths, raw_starts = tables.host
    steps = zip(pairwise(starts), lengths, raw_starts, strict=True)
    return any(raw > length - (end - start) for (start, end), length, raw in steps)


def attend_request(
    layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, tables: BatchTables, b: int
) -> Tensor:
    """Attend for the new tokens of request ``b`` alone.

    ``q`` ``[n, query heads, d]`` and ``k, v`` ``[n, heads, d]`` in model space; ``own_k, own_v`` float32 the latter two
    as the store rotates them (read only where the request reads new tokens by the position rule).
    """
    transform, spec, config = layer.transform, layer.spec, layer.layout.config
    n, heads, length = q.shape[0], transform.heads, tables.host[1][b]
    first, raw_start = length - n, min(tables.host[2][b], length)
    if raw_start < first:
        raise ValueError(f"chunk_start={raw_start}: keys before position {first} are not among this step's {n} tokens")
    low = 0 if spec.sliding_window is None else max(0, first - spec.sliding_window + 1)
    grouped = q.float().reshape(n, heads, -1, q.shape[-1])
    # Without a softcap and without raw keys, q·k_mean is the same for every key and the softmax does not see it.
    biased = raw_start < length or spec.softcap is not None
    bias = torch.einsum("thgd,hd->htg", grouped, transform.k_mean) if biased else None

    rotated = transform.rotate_q(q).view(grouped.shape).transpose(0, 1)
    softmax = OnlineSoftmax(rotated, first, spec, block=QUERY_BLOCK)
    own = slice(0, raw_start - first)
    own_k, own_v = (x[own].to(layer.windows.dtype) for x in (own_k, own_v))
    page_rows, window_rows = host_pages(tables)
    for start, stop in aligned(low, raw_start, KEY_TILE):
        pages = slice(start // config.page_size, -(-stop // config.page_size))
        tile = KeyTile(layer, start, stop, page_rows[b][pages], window_rows[b][pages], first, own_k, own_v)
        softmax.add_cached(tile, bias)
    softmax.output = softmax.output @ transform.v_rotation.mT.unsqueeze(1)
    softmax.output += softmax.weight.unsqueeze(-1) * transform.v_mean[:, None, None]
    softmax.q = grouped.transpose(0, 1)
    for start, stop in aligned(max(low, raw_start), length, KEY_TILE):
        rows = slice(start - first, stop - first)
        softmax.add_raw(k[rows].float().transpose(0, 1), v[rows].float().transpose(0, 1), start)
    out = softmax.output / softmax.weight.unsqueeze(-1)
    return out.transpose(0, 1).flatten(1, 2).to(q.dtype)


def token_slots(tables: BatchTables, page_size: int) -> Slots:
    """Page and slot of each new token in the store that holds every token."""
    return _slots(tables, page_size)[0]


class Slots(NamedTuple):
    """Rows of a step's tokens that go to one store, and page and slot of each, int64 ``[rows]``."""

    rows: Tensor
    page: Tensor
    slot: Tensor


def _slots(tables: BatchTables, page_size: int) -> tuple[Slots, Slots]:
    """Where the new tokens go in the INT2 and in the window store; worked out once for all layers of a step."""
    key = f"slots{page_size}"
    if key not in tables.derived:
        starts, lengths, _ = tables.host
        request: list[int] = []
        position: list[int] = []
        for b, (start, end) in enumerate(pairwise(starts)):
            request += [b] * (end - start)
            position += range(lengths[b] - (end - start), lengths[b])
        slots = []
        for rows in host_pages(tables):
            pages = [rows[b][p // page_size] for b, p in zip(request, position, strict=True)]
            kept = [i for i, page in enumerate(pages) if page != NULL_PAGE]
            columns = kept, [pages[i] for i in kept], [position[i] % page_size for i in kept]
            slots.append(Slots(*torch.tensor(columns, dtype=torch.int64, device=tables.page_table.device)))
        tables.derived[key] = slots[0], slots[1]
    return tables.derived[key]


def host_pages(tables: BatchTables) -> tuple[list[list[int]], list[list[int]]]:
    """Page table and window table as lists."""
    if "pages" not in tables.derived:
        tables.derived["pages"] = tables.page_table.tolist(), tables.window_table.tolist()
    return tables.derived["pages"]


def packed(layer: LayerCache, k: Tensor, v: Tensor) -> list[Tensor]:
    """The four sections' bytes, uint8 ``[tokens, heads, bytes]``, of rotated ``k, v`` ``[tokens, heads, d]``."""
    config, transform = layer.layout.config, layer.transform
    # Apple GPUs have no FP8 type; the CPU codec gives the same bytes.
    device = torch.device("cpu") if k.device.type == "mps" and config.scale_dtype == "float8_e4m3" else k.device
    sections = []
    for x, bits, shrink, unit in (
        (k, config.k_bits, transform.k_shrink, transform.k_unit),
        (v, config.v_bits, transform.v_shrink, transform.v_unit),
    ):
        codes, meta = quantize(
            x.to(device),
            bits,
            layer.layout.group_size,
            shrink=shrink.to(device),
            unit=unit.to(device),
            scale_dtype=config.scale_dtype,
        )
        sections += [pack(codes, bits), meta.flatten(-2).view(torch.uint8)]
    return [section.to(k.device) for section in sections]

"""A small cache for the kernel tests, written with the torch codec and poisoned where nothing was written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels.triton.config import DecodeConfig
from oscar_kernels.triton.decode import Plan, Windows, decode, rotate_query, workspace_size
from oscar_serving.attention.reference import Reference, reference_attention
from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.codec import PageLayout, pack, quantize
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform
from tests.maps import apart

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
SMALL = DecodeConfig(warps=1, keys=16, packed=DEVICE.type == "cuda", registers=0)


@dataclass
class Case:
    """What is attended to, and how."""

    head_dim: int = 64
    heads: int = 2
    ratio: int = 4
    queries: int = 1
    lengths: tuple[int, ...] = (150,)
    page: int = 32
    window_page: int = 32
    sink: int = 8
    recent: int = 24
    k_bits: int = 2
    v_bits: int = 2
    groups: int = 1
    scale_dtype: str = "float16"
    window_dtype: str = "bfloat16"
    softcap: float | None = None
    sliding: int | None = None
    missing: bool = False
    sinks: bool = False
    ring: bool = False
    splits: int = 3
    win_splits: int = 1
    config: DecodeConfig = SMALL


def transform_of(case: Case) -> LayerTransform:
    """Random orthogonal rotations per head, means, and units where FP8 uses them."""
    d, heads = case.head_dim, case.heads
    rotation = torch.linalg.qr(torch.randn(2 * heads, d, d))[0].contiguous()
    fp8 = case.scale_dtype != "float16"
    units = (torch.full((heads,), 0.02), torch.full((heads,), 0.03)) if fp8 else (torch.ones(heads), torch.ones(heads))
    mean = torch.randn(2, heads, d) * 0.3
    shrink = torch.full((heads,), 0.9)
    return LayerTransform(*apart(rotation[:heads]), rotation[heads:], mean[0], mean[1], shrink, shrink * 0.9, *units)


def write(case: Case, layout: PageLayout, transform: LayerTransform, k: Tensor, v: Tensor, page_ids: Tensor,
          window_ids: Tensor, pages: Tensor, windows: Tensor) -> None:  # fmt: skip
    """Write the tokens of one request to both stores; window id 0 writes nothing."""
    position = torch.arange(len(k))
    views = layout.views(pages)
    page, slot = page_ids[position // case.page], position % case.page
    sides = (
        (transform.rotate_k(k), case.k_bits, transform.k_shrink, transform.k_unit, views.k_codes, views.k_meta),
        (transform.rotate_v(v), case.v_bits, transform.v_shrink, transform.v_unit, views.v_codes, views.v_meta),
    )
    for i, (x, bits, shrink, unit, codes, meta) in enumerate(sides):
        q = quantize(x, bits, layout.group_size, shrink=shrink, unit=unit, scale_dtype=layout.config.scale_dtype)
        codes[page, :, slot] = pack(q.codes, bits)
        meta.view(torch.uint8)[page, :, slot] = q.meta.view(torch.uint8)
        if case.ring:
            ring = windows.shape[3] - case.sink
            last = len(k) - 1
            keep = (position < case.sink) | (position > last - ring)
            place = torch.where(position < case.sink, position, case.sink + position % ring)
            windows[window_ids[0], i][:, place[keep]] = x[keep].to(windows.dtype).transpose(0, 1)
        else:
            window = window_ids[position // case.window_page]
            kept = window > 0
            windows[window[kept], i, :, (position % case.window_page)[kept]] = x[kept].to(windows.dtype)


def attend(case: Case, seed: int = 0) -> tuple[list[tuple[Tensor, Tensor]], list[Reference]]:
    """Kernel output and LSE, and the reference, of each request."""
    torch.manual_seed(seed)
    d, heads, hq, batch = case.head_dim, case.heads, case.heads * case.ratio, len(case.lengths)
    config = OscarConfig(
        k_bits=case.k_bits, v_bits=case.v_bits, group_size=d // case.groups, sink=case.sink, recent=case.recent,
        page_size=case.page, scale_dtype=case.scale_dtype, window_dtype=case.window_dtype,  # type: ignore[arg-type]
    )  # fmt: skip
    layout, transform = PageLayout(d, config), transform_of(case)
    spec = AttentionSpec(d**-0.5, case.softcap, case.sliding)
    longest = max(case.lengths)
    count, wcount = -(-longest // case.page), 1 if case.ring else -(-longest // case.window_page)
    slots = case.sink + case.recent + case.queries if case.ring else case.window_page
    # pages wider than their contents: no stride may be taken from a shape
    pages = torch.randint(0, 256, (batch * count + 1, heads + 1, layout.head_bytes), dtype=torch.uint8)[:, :heads]
    windows = torch.full((batch * wcount + 1, 2, heads, slots, d + 16), NAN, dtype=getattr(torch, case.window_dtype))
    windows = windows[..., :d]
    layout.views(pages).k_meta.view(torch.uint8).fill_(0x7F)  # NaN in both scale types
    layout.views(pages).v_meta.view(torch.uint8).fill_(0x7F)
    page_table = (torch.randperm(batch * count) + 1).view(batch, count).int()
    window_table = (torch.randperm(batch * wcount) + 1).view(batch, wcount).int()
    valid_from, sink_from = torch.zeros(batch, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    q, references = torch.randn(batch * case.queries, hq, d), []
    sinks = torch.randn(hq) if case.sinks else None
    for b, length in enumerate(case.lengths):
        if not length:
            page_table[b], window_table[b] = 0, 0
            continue
        k, v = torch.randn(length, heads, d), torch.randn(length, heads, d)
        present = torch.ones(length, dtype=torch.bool)
        if case.missing and case.ring:
            valid_from[b], sink_from[b] = max(0, length - 3), min(2, length)
            present = torch.arange(length) >= torch.where(torch.arange(length) < case.sink, sink_from[b], valid_from[b])
        elif case.missing:
            for gone in {0, (length - 1) // case.window_page}:
                window_table[b, gone] = 0
                present[gone * case.window_page : (gone + 1) * case.window_page] = False
        write(case, layout, transform, k, v, page_table[b].long(), window_table[b].long(), pages, windows)
        rows = slice(b * case.queries, b * case.queries + min(case.queries, length))
        references.append(
            reference_attention(
                q[rows], k, v, transform=transform, config=config, spec=spec, window_present=present, sink_logits=sinks
            )
        )
    start = torch.zeros(batch + 1, dtype=torch.int32)
    taken = [min(case.queries, n) for n in case.lengths]
    start[1:] = torch.tensor(taken).cumsum(0)
    q = torch.cat([q[b * case.queries : b * case.queries + n] for b, n in enumerate(taken)])
    geometry = Plan(
        case.win_splits + case.splits, case.win_splits, -(-case.queries * case.ratio // case.config.rows),
        case.queries, case.config,
    )  # fmt: skip
    t = transform.to(DEVICE)
    views = layout.views(pages.to(DEVICE))
    wide = windows.to(DEVICE)
    store = Windows(
        wide[:, 0], wide[:, 1], window_table.to(DEVICE), slots - case.sink if case.ring else 0,
        valid_from.to(DEVICE), sink_from.to(DEVICE),
    )  # fmt: skip
    q = q.to(DEVICE)
    rotated, bias = torch.full(q.shape, NAN, device=DEVICE), torch.full(q.shape[:2], NAN, device=DEVICE)
    rotate_query(q, t.q_rotation, rotated, mean=t.k_mean, bias=bias)
    out, lse = torch.full(q.shape, NAN, device=DEVICE), torch.full(q.shape[:2], NAN, device=DEVICE)
    decode(
        rotated, views, store, page_table.to(DEVICE), start.to(DEVICE),
        torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE), geometry=geometry,
        workspace=torch.full((workspace_size(batch, heads, d, geometry),), NAN, device=DEVICE), out=out,
        sink=case.sink, recent=case.recent, scale=spec.scale, k_unit=t.k_unit, v_unit=t.v_unit, lse=lse, q_bias=bias,
        sinks=None if sinks is None else sinks.to(DEVICE), v_rotation=t.v_rotation, v_mean=t.v_mean,
        sliding_window=case.sliding, softcap=case.softcap,
    )  # fmt: skip
    results = [
        (out[start[b] : start[b + 1]].cpu(), lse[start[b] : start[b + 1]].cpu())
        for b in range(batch)
        if case.lengths[b]
    ]
    return results, references

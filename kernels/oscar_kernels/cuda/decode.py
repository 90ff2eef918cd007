"""Launcher of ``decode.cu``: decode attention over the mixed-precision paged cache, one launch a layer."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from oscar_kernels.cuda.nvrtc import Kernel

_POINTERS = (
    "q", "q16", "k_turn", "k_codes", "k_meta", "v_codes", "v_meta", "k_win", "v_win", "page_table", "window_table",
    "query_start", "lengths", "k_unit", "v_unit", "q_bias", "sinks", "v_back", "v_mean", "out", "lse", "partial",
    "stats", "arrived",
)  # fmt: skip
_STRIDES = ("q_stride", "page_stride", "head_stride", "win_page_stride", "win_head_stride", "win_token_stride")
_INTEGERS = (
    "page_cols", "window_cols", "heads", "ratio", "sink", "recent", "sliding", "splits", "thin",
)  # fmt: skip


class _Params(ctypes.Structure):
    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS]
        + [(name, ctypes.c_int64) for name in _STRIDES]
        + [(name, ctypes.c_int32) for name in _INTEGERS]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
    )


class Plan(NamedTuple):
    """Fixed launch geometry of a batch shape.

    Attributes
    ----------
    splits
        CTAs a (request, KV head, row tile) at most; how many of them work follows from the length, in the kernel.
    thin
        Of which one a multiprocessor; 0 when there is no multiprocessor to spare.
    row_tiles_of_8, row_tiles
        Tiles of eight query rows a CTA; CTAs over the rows of a KV head.
    tokens, min_ctas, stages
        Keys a warp takes at a time, CTAs a multiprocessor, blocks in flight.
    """

    splits: int
    thin: int
    row_tiles_of_8: int
    row_tiles: int
    tokens: int
    min_ctas: int
    stages: int


_WARPS = 4
#: What a CTA costs beside its keys, in keys (query, windows, merge); measured.
_FIXED_KEYS = 1200


def supported(head_dim: int, k_bits: int, v_bits: int, groups: int, page_size: int, win_page_size: int) -> str | None:
    """Why the kernel cannot serve this layout, or ``None``."""
    if head_dim not in (64, 128, 256):
        return f"head size {head_dim} is not 64, 128 or 256"
    if groups not in (1, 2, 4) or groups > min(8 // k_bits, 8 // v_bits):
        return f"{groups} groups do not align with the planes of {k_bits}/{v_bits} bits"
    for size, least in ((page_size, 32), (win_page_size, 16)):
        if size < least or size & (size - 1):
            return f"page size {size} is not a power of two of at least {least}"
    return None


def plan(
    batch: int,
    heads: int,
    ratio: int,
    head_dim: int,
    page_size: int,
    *,
    max_queries: int,
    max_length: int,
    sms: int,
) -> Plan:
    """Launch geometry for up to ``max_length`` keys a request on ``sms`` multiprocessors; shapes only, never data."""
    rows = max_queries * ratio
    per = 1 if rows <= 8 else 2
    row_tiles = -(-rows // (8 * per))
    pairs = batch * heads * row_tiles
    thin = sms // pairs
    if head_dim == 256 or per == 2:
        tokens, min_ctas, stages = (16 if head_dim == 256 else 32), 2, 4
    elif page_size >= 64 and max_length >= (8192 if thin >= 8 else 4096):
        tokens, min_ctas, stages = 64, 3, 3
    else:
        tokens, min_ctas, stages = 32, 3 if thin >= 8 else 4, 4
    most = max(1, min(256, max_length // (_WARPS * tokens)))
    if thin >= 8:
        return Plan(max(1, min(most + 4, min_ctas * thin)), thin, per, row_tiles, tokens, min_ctas, stages)
    # Much work: the number of splits whose last wave wastes least.
    resident = min_ctas * sms

    def cost(splits: int) -> float:
        return -(-pairs * splits // resident) * (max_length / splits + _FIXED_KEYS) + 20 * splits

    splits = min(range(1, min(most, 32) + 1), key=cost)
    return Plan(splits, 0, per, row_tiles, tokens, min_ctas, stages)


def workspace_size(batch: int, heads: int, head_dim: int, geometry: Plan) -> tuple[int, int]:
    """Elements of the float32 and of the int32 workspace; the latter must be zero before the first launch."""
    pairs = batch * heads * geometry.row_tiles
    rows = pairs * geometry.splits * 8 * geometry.row_tiles_of_8
    return rows * (head_dim + 2), pairs


def turn_matrix(rotation: Tensor) -> Tensor:
    """R_K ``[Hkv, d, d]`` as ``k_turn``: its transpose in fp16, whose 11 bits are exact enough below 1."""
    return rotation.mT.contiguous().half()


def back_matrix(rotation: Tensor) -> Tensor:
    """R_V ``[Hkv, d, d]`` as ``v_back``: fp16."""
    return rotation.contiguous().half()


@functools.cache
def _kernel(defines: tuple[tuple[str, int], ...], device: torch.device) -> Kernel:
    return Kernel(Path(__file__).with_name("decode.cu"), "oscar_decode", dict(defines), device)


def decode(
    q: Tensor,
    codes: tuple[Tensor, Tensor, Tensor, Tensor],
    windows: tuple[Tensor, Tensor],
    page_table: Tensor,
    window_table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    *,
    geometry: Plan,
    partial: Tensor,
    arrived: Tensor,
    out: Tensor,
    sink: int,
    recent: int,
    scale: float,
    k_unit: Tensor,
    v_unit: Tensor,
    lse: Tensor | None = None,
    k_turn: Tensor | None = None,
    q_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    v_back: Tensor | None = None,
    v_mean: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Attend for the last queries of each request.

    Parameters
    ----------
    q
        float32 ``[T, Hq, d]``, rotated by R_K; with ``k_turn``, bfloat16 in model space. Any token stride.
    codes
        ``k_codes, k_meta, v_codes, v_meta`` as the page layout's views (FP8 metadata as float8_e4m3fn or uint8).
    windows
        K and V of the window store, bf16 or fp16 ``[pages, Hkv, page_size, d]``, any page, head and token stride.
    page_table, window_table, query_start, lengths
        int32, as in the attention seam; length 0 marks a padding row, which touches nothing.
    partial, arrived
        Workspace of :func:`workspace_size`.
    k_turn
        :func:`turn_matrix` of R_K: the kernel rotates the query itself. It is read while the kernel in front may still
        run, so it must not be what that kernel writes; everything else may be.
    v_back
        :func:`back_matrix` of R_V: the kernel rotates the result back. Read early like ``k_turn``.
    out
        bf16 or fp16 ``[T, Hq, d]``, written in place: model space with ``v_back``, else cache space.
    lse
        float32 ``[T, Hq]``, natural logarithm, or ``None``.
    """
    k_codes, k_meta, v_codes, v_meta = codes
    k_win, v_win = windows
    _, query_heads, d = q.shape
    heads, page_size, groups = k_codes.shape[1], k_codes.shape[2], k_meta.shape[3]
    k_bits, v_bits = k_codes.shape[3] * 8 // d, v_codes.shape[3] * 8 // d
    reason = supported(d, k_bits, v_bits, groups, page_size, k_win.shape[2])
    if reason:
        raise ValueError(f"CUDA decode kernel: {reason}; use the Triton kernel")
    dtype = torch.float32 if k_turn is None else torch.bfloat16
    # The stride of a dimension of size 1 means nothing.
    packed = q.stride(2) == 1 and (q.stride(1) == d or query_heads == 1)
    if q.dtype != dtype or not packed or not out.is_contiguous():
        raise ValueError(f"q must be {dtype} with contiguous tokens and out contiguous, got {q.dtype} {q.stride()}")
    meta8 = k_meta.element_size() == 1
    page_stride, head_stride = (k_codes.stride(i) * k_codes.element_size() for i in (0, 1))
    for c in codes:
        shared = c.stride(0) * c.element_size() == page_stride or c.shape[0] == 1
        if not shared or (c.stride(1) * c.element_size() != head_stride and heads > 1):
            raise ValueError("code and metadata views must share page and head strides, as PageLayout.views gives them")
    if k_win.stride() != v_win.stride() or k_win.stride(-1) != 1:
        raise ValueError("windows must share strides and have contiguous channels")
    defines = (
        ("D", d), ("KB", k_bits), ("VB", v_bits), ("NG", groups), ("META8", int(meta8)),
        ("WIN_BF16", int(k_win.dtype == torch.bfloat16)), ("OUT_BF16", int(out.dtype == torch.bfloat16)),
        ("NT", geometry.row_tiles_of_8), ("TOKENS", geometry.tokens), ("WARPS", _WARPS),
        ("SOFTCAP", int(softcap is not None)), ("PAGE", page_size), ("WPAGE", k_win.shape[2]),
        ("MIN_CTAS", geometry.min_ctas), ("STAGES", geometry.stages),
    )  # fmt: skip
    stats = partial[lengths.shape[0] * heads * geometry.row_tiles * geometry.splits * 8 * geometry.row_tiles_of_8 * d :]
    params = _Params()
    values = (
        None if k_turn is not None else q, None if k_turn is None else q, k_turn, k_codes, k_meta, v_codes, v_meta,
        k_win, v_win, page_table, window_table, query_start, lengths, k_unit, v_unit, q_bias, sinks, v_back, v_mean,
        out, lse, partial, stats, arrived,
    )  # fmt: skip
    for name, tensor in zip(_POINTERS, values, strict=True):
        setattr(params, name, tensor.data_ptr() if tensor is not None else None)
    params.q_stride = q.stride(0)
    params.page_stride, params.head_stride = page_stride, head_stride
    params.win_page_stride, params.win_head_stride, params.win_token_stride = k_win.stride()[:3]
    params.page_cols, params.window_cols = page_table.stride(0), window_table.stride(0)
    params.heads, params.ratio = heads, query_heads // heads
    params.sink, params.recent, params.sliding = sink, recent, sliding_window or 0
    params.splits, params.thin = geometry.splits, geometry.thin
    params.scale, params.softcap = scale, softcap or 0.0
    grid = (geometry.splits, heads * geometry.row_tiles, lengths.shape[0])
    _kernel(defines, q.device).launch(grid, 32 * _WARPS, params)

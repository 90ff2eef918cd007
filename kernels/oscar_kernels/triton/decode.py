"""Decode attention over the mixed-precision paged cache: INT2 history and 16-bit windows.

Three launches a layer: rotate the queries, attend by splits, merge the splits and rotate back. None allocates,
synchronizes or depends on a length on the host, so the three replay inside a CUDA graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from oscar_kernels.triton.config import DecodeConfig
from oscar_kernels.triton.decode_kernel import decode_kernel
from oscar_kernels.triton.rotate_kernel import merge_kernel, rotate_kernel

LOG2E = 1.4426950408889634


class Plan(NamedTuple):
    """Fixed launch geometry: splits in all, how many of them take window keys, row blocks, and the configuration."""

    splits: int
    win_splits: int
    row_blocks: int
    max_queries: int
    config: DecodeConfig


class Windows(NamedTuple):
    """The window store as the kernels see it.

    Attributes
    ----------
    k, v
        ``[pages, Hkv, slots, d]``, any page, head and slot stride.
    table
        int32 ``[B, n]``: window page of each page of positions, 0 for none; with ``ring``, ``[B, 1]`` row numbers.
    ring
        0, or the number of ring positions: position ``p`` of row ``r`` is slot ``p`` below the sink size, else
        ``sink + p % ring``.
    valid_from, sink_from
        int32 ``[B]`` with ``ring``: first recent position, and first sink position, that the row holds.
    """

    k: Tensor
    v: Tensor
    table: Tensor
    ring: int = 0
    valid_from: Tensor | None = None
    sink_from: Tensor | None = None


def plan(batch: int, heads: int, ratio: int, max_queries: int, max_length: int, sms: int, config: DecodeConfig) -> Plan:
    """Launch geometry for up to ``max_length`` keys and ``max_queries`` queries a request; shapes only, never data."""
    row_blocks = -(-max_queries * ratio // config.rows)
    pairs = batch * heads * row_blocks
    resident = config.resident * sms
    most = max(1, max_length // 512)
    win_splits = 2 if pairs * 4 <= resident else 1
    if pairs * (win_splits + 2) <= resident:  # little work: one full wave
        wanted = resident // pairs - win_splits
    else:  # much work: small pieces, so that the last wave is short
        wanted = max(1, config.waves * resident // pairs)
    return Plan(win_splits + min(most, wanted, 128), win_splits, row_blocks, max_queries, config)


def workspace_size(batch: int, heads: int, head_dim: int, geometry: Plan) -> int:
    """float32 elements that :func:`decode` needs as workspace."""
    return batch * heads * geometry.row_blocks * geometry.splits * geometry.config.rows * (head_dim + 1)


def rotate_query(
    q: Tensor, rotation: Tensor, out: Tensor, *, mean: Tensor | None = None, bias: Tensor | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """``out`` float32 ``[T, Hq, d]`` = ``q @ rotation`` head by head; ``bias`` float32 ``[T, Hq]`` = ``q . mean``."""
    tokens, query_heads, d = q.shape
    heads = rotation.shape[0]
    rows = tokens * (query_heads // heads)
    dp = triton.next_power_of_2(d)
    block = 1 if rows <= 16 else 16
    columns = min(dp, 32 if block == 1 else 64)
    grid = (triton.cdiv(rows, block), triton.cdiv(d, columns), heads)
    options = {"launch_pdl": True} if pdl else {}
    rotate_kernel[grid](
        q, rotation, mean, out, bias, query_heads // heads, rows, q.stride(0), q.stride(1), heads,
        HEAD=d, DP=dp, R=block, C=columns, HAS_MEAN=mean is not None, PDL=pdl, num_warps=4, **options,
    )  # fmt: skip


def decode(
    q: Tensor,
    codes: tuple[Tensor, Tensor, Tensor, Tensor],
    windows: Windows,
    page_table: Tensor,
    query_start: Tensor,
    lengths: Tensor,
    *,
    geometry: Plan,
    workspace: Tensor,
    out: Tensor,
    sink: int,
    recent: int,
    scale: float,
    k_unit: Tensor,
    v_unit: Tensor,
    lse: Tensor | None = None,
    q_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    v_rotation: Tensor | None = None,
    v_mean: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    check_windows: bool = True,
) -> None:
    """Attend for the last queries of each request.

    Parameters
    ----------
    q
        float32 ``[T, Hq, d]``, rotated by R_K (:func:`rotate_query`).
    codes
        ``k_codes, k_meta, v_codes, v_meta`` as the page layout's views.
    windows, page_table, query_start, lengths
        int32 tables; length 0 marks a padding row, which touches nothing. At most ``geometry.max_queries`` queries a
        request.
    workspace
        float32, :func:`workspace_size` elements.
    out
        ``[T, Hq, d]``, written in place: model space when ``v_rotation`` is given, else cache space.
    lse
        float32 ``[T, Hq]``, natural logarithm, or ``None``.
    q_bias
        float32 ``[T, Hq]`` q·k_mean; needed with softcap, learned sinks or LSE when the artifact has a K mean.
    check_windows
        False promises that every window page the position rule asks for is there.
    """
    k_codes, k_meta, v_codes, v_meta = (_words(t, i % 2 == 1) for i, t in enumerate(codes))
    _, query_heads, d = q.shape
    heads, page_size, groups = codes[0].shape[1], codes[0].shape[2], codes[1].shape[3]
    k_bits, v_bits = codes[0].shape[3] * 8 // d, codes[2].shape[3] * 8 // d
    if q.dtype != torch.float32 or q.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError("q must be float32 with contiguous channels, and so must out")
    config, ratio, batch = geometry.config, query_heads // heads, lengths.shape[0]
    need = workspace_size(batch, heads, d, geometry)
    if workspace.numel() < need:
        raise ValueError(f"workspace has {workspace.numel()} elements, needs {need}")
    rows = batch * heads * geometry.row_blocks * geometry.splits * config.rows
    part_o, part_lse = workspace[: rows * d], workspace[rows * d : rows * (d + 1)]
    dp = triton.next_power_of_2(d)
    kj, vj = (max(16, triton.next_power_of_2(d * bits // 16)) for bits in (k_bits, v_bits))
    size = d // groups
    k_general, v_general = (groups > 1 and size % (d * bits // 8) != 0 for bits in (k_bits, v_bits))
    window_page = windows.k.shape[2]
    asked = triton.cdiv(sink, window_page) + triton.cdiv(recent + geometry.max_queries, window_page) + 2
    options = {"launch_pdl": True} if config.pdl else {}
    limit = {"maxnreg": config.registers} if config.registers else {}
    bias = q_bias if softcap is not None else None
    decode_kernel[(geometry.splits, heads * geometry.row_blocks, batch)](
        q, bias, k_codes, k_meta, v_codes, v_meta, k_unit, v_unit, windows.k, windows.v,
        page_table, windows.table, windows.valid_from, windows.sink_from, query_start, lengths, part_o, part_lse,
        scale * LOG2E, (softcap or 0.0) * LOG2E, ratio, page_table.stride(0), windows.table.stride(0),
        q.stride(0), q.stride(1), query_heads,
        k_codes.stride(0), k_codes.stride(1), k_meta.stride(0), k_meta.stride(1),
        v_codes.stride(0), v_codes.stride(1), v_meta.stride(0), v_meta.stride(1),
        windows.k.stride(0), windows.k.stride(1), windows.k.stride(2),
        heads, geometry.row_blocks, geometry.splits, geometry.win_splits,
        HEAD=d, DP=dp, KB=k_bits, VB=v_bits, GROUPS=groups, META8=codes[1].element_size() == 1,
        PAGE=page_size, WPAGE=window_page, RING=windows.ring, SINK=sink, RECENT=recent,
        SLIDING=sliding_window or 0, SOFTCAP=softcap is not None, R=config.rows, W=config.warps, N=config.keys,
        WN=config.window_keys,
        CHECK_PAGES=triton.next_power_of_2(asked) if check_windows else 0,
        ASM=config.packed, STAGES=config.stages, K_GENERAL=k_general, V_GENERAL=v_general, KJ=kj, VJ=vj,
        PDL=config.pdl, num_warps=config.warps, num_stages=config.stages, **options, **limit,
    )  # fmt: skip
    row_limit = geometry.max_queries * ratio
    block = 1 if batch * row_limit <= 16 else 16
    rotate = v_rotation is not None
    columns = min(dp, 32 if block == 1 else 64) if rotate else dp
    merge_kernel[(triton.cdiv(batch * row_limit, block), triton.cdiv(d, columns), heads)](
        part_o, part_lse, query_start, lengths, v_rotation, v_mean, q_bias, sinks, out, lse,
        scale, ratio, heads, geometry.row_blocks, geometry.splits, batch, row_limit, out.stride(0), out.stride(1),
        HEAD=d, DP=dp, BLOCK=config.rows, R=block, C=columns, ROTATE=rotate, HAS_MEAN=v_mean is not None,
        HAS_BIAS=q_bias is not None and softcap is None, HAS_SINKS=sinks is not None, HAS_LSE=lse is not None,
        PDL=config.pdl, num_warps=4, **options,
    )  # fmt: skip


def _words(view: Tensor, meta: bool) -> Tensor:
    """Codes as int16 half-words, a (scale, minimum) pair as one int32 (fp16) or int16 (FP8)."""
    if meta:
        word = torch.int32 if view.element_size() == 2 else torch.int16
        return view.view(word)
    return view.view(torch.int16)

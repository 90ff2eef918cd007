"""Launchers of ``gather_kernel.py``: a stretch of the cache back in model space, in bounded scratch.

Prefill over a long history reads it in tiles: :func:`gather` writes a tile of K and V as 16-bit rows, a dense attention
kernel of the engine attends to it, and the partial results are merged by their LSE. The few keys right before a chunk,
which early queries read unquantized and later ones from INT2, are :func:`attend_near`'s.
"""

from __future__ import annotations

import triton
from torch import Tensor

from oscar_kernels.triton.decode import LOG2E, Windows, _words
from oscar_kernels.triton.gather_kernel import gather_kernel, near_kernel


def gather(
    codes: tuple[Tensor, Tensor, Tensor, Tensor],
    windows: Windows,
    page_table: Tensor,
    starts: Tensor,
    cu_keys: Tensor,
    longest: int,
    *,
    k_out: Tensor,
    v_out: Tensor,
    q_rotation: Tensor,
    v_rotation: Tensor,
    k_unit: Tensor,
    v_unit: Tensor,
    k_mean: Tensor | None = None,
    v_mean: Tensor | None = None,
    sink: int,
    near: bool,
) -> None:
    """Read keys ``starts[r] … starts[r] + cu_keys[r + 1] - cu_keys[r]`` of each request back into model space.

    Parameters
    ----------
    codes, windows, page_table
        As for decode; ``windows.table`` int32 ``[R, n]``.
    starts, cu_keys
        int32 ``[R]`` and ``[R + 1]``: first position, and rows of the output, of each request.
    longest
        At least the longest stretch.
    k_out, v_out
        ``[rows, Hkv, d]``, same strides.
    q_rotation, v_rotation
        float32 ``[Hkv, d, d]``; ``k = k' q_rotation^T + k_mean``, ``v = v' v_rotation^T + v_mean``.
    near
        Read the window store wherever it has the token; otherwise for sink tokens only.
    """
    k_codes, k_meta, v_codes, v_meta = codes[0], _words(codes[1], True), codes[2], _words(codes[3], True)
    heads, d = k_codes.shape[1], k_out.shape[2]
    if k_out.stride() != v_out.stride() or k_out.stride(-1) != 1:
        raise ValueError("k_out and v_out must share strides and have contiguous channels")
    if longest == 0:
        return
    k_row, v_row = k_codes.shape[3], v_codes.shape[3]
    block = 64
    gather_kernel[(triton.cdiv(longest, block), starts.shape[0], 2 * heads)](
        k_codes, k_meta, v_codes, v_meta, k_unit, v_unit, windows.k, windows.v, q_rotation, v_rotation, k_mean, v_mean,
        page_table, windows.table, starts, cu_keys, k_out, v_out, heads, page_table.stride(0), windows.table.stride(0),
        k_codes.stride(0), k_codes.stride(1), k_meta.stride(0), k_meta.stride(1),
        v_codes.stride(0), v_codes.stride(1), v_meta.stride(0), v_meta.stride(1),
        windows.k.stride(0), windows.k.stride(1), windows.k.stride(2), k_out.stride(0), k_out.stride(1),
        HEAD=d, DP=max(16, triton.next_power_of_2(d)), KRP=max(16, triton.next_power_of_2(k_row)),
        VRP=max(16, triton.next_power_of_2(v_row)), KB=k_row * 8 // d, VB=v_row * 8 // d, GROUPS=codes[1].shape[3],
        META8=codes[1].element_size() == 1, PAGE=k_codes.shape[2], WPAGE=windows.k.shape[2], SINK=sink, NEAR=near,
        K_MEAN=k_mean is not None, V_MEAN=v_mean is not None, BT=block, num_warps=4,
    )  # fmt: skip


def attend_near(
    q: Tensor,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor] | None,
    query_start: Tensor,
    context: Tensor,
    starts: Tensor,
    cu_keys: Tensor,
    longest_query: int,
    *,
    out: Tensor,
    lse: Tensor,
    recent: int | None,
    scale: float,
    softcap: float | None = None,
    sink: int = 0,
    causal: bool = False,
    sliding_window: int | None = None,
    resume: bool = False,
) -> None:
    """Attend to a stretch of keys of each request, which may be read in two ways.

    Parameters
    ----------
    q
        ``[T, Hq, d]``, model space; row ``i`` of request ``r`` has position ``context[r] + i``.
    near, far
        K and V of the stretch ``[rows, Hkv, d]`` in the type of ``q``, as keys within ``recent`` of the query or below
        ``sink`` and as other keys are read; without ``far`` the other keys are not seen.
    out, lse
        ``[T, Hq, d]``, and float32 ``[Hq, T]`` (natural logarithm, -inf where nothing is seen).
    recent
        ``None``: every key is near.
    causal, sliding_window
        Hide keys behind the query; show a query the last so many positions only, its own included.
    resume
        Add to the attention that ``out`` and ``lse`` hold.
    """
    tokens, query_heads, d = q.shape
    k, v = near
    k_far, v_far = far if far is not None else near
    if any(t.stride() != k.stride() for t in (v, k_far, v_far)) or q.stride(-1) != 1 or out.stride(-1) != 1:
        raise ValueError("keys and values must share strides; queries and output need contiguous channels")
    block_m, block_n = (64, 64) if d <= 128 else (32, 32)
    near_kernel[(triton.cdiv(longest_query, block_m), context.shape[0], query_heads)](
        q, k_far, v_far, k, v, query_start, context, starts, cu_keys, out, lse, query_heads // k.shape[1], tokens,
        scale * LOG2E, (softcap or 0.0) * LOG2E, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        out.stride(0), out.stride(1), HEAD=d, DP=max(16, triton.next_power_of_2(d)),
        RECENT=1 << 30 if recent is None else recent, SINK=sink, FAR=far is not None, SOFTCAP=softcap is not None,
        CAUSAL=causal, SLIDING=sliding_window or 0, RESUME=resume, BM=block_m, BN=block_n, num_warps=4, num_stages=2,
    )  # fmt: skip

"""Rotation of queries into cache space, and the merge of splits with the rotation back: the device code."""

import triton
import triton.language as tl

from oscar_kernels.triton.common_kernel import LOG2E


@triton.jit(do_not_specialize=["ratio", "rows"])
def rotate_kernel(
    q, rotation, mean, out, bias, ratio, rows, q_token, q_head, heads,
    HEAD: tl.constexpr, DP: tl.constexpr, R: tl.constexpr, C: tl.constexpr, HAS_MEAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``out = q @ rotation[head]`` float32 ``[T, Hq, d]`` and ``bias = q . mean``; grid ``(rows, columns, heads)``."""
    head = tl.program_id(2)
    row = tl.program_id(0) * R + tl.arange(0, R)
    live = row < rows
    token = (row // ratio).to(tl.int64)
    q_index = head * ratio + row % ratio
    c = tl.arange(0, DP)
    column = tl.program_id(1) * C + tl.arange(0, C)
    inner = c < HEAD
    matrix = tl.load(
        rotation + head * HEAD * HEAD + c[:, None] * HEAD + column[None, :],
        mask=inner[:, None] & (column < HEAD)[None, :],
        other=0.0,
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    x = tl.load(
        q + (token * q_token + q_index * q_head)[:, None] + c[None, :], mask=live[:, None] & inner[None, :], other=0.0
    ).to(tl.float32)
    if R >= 16:
        y = tl.dot(x, matrix.to(tl.float32), input_precision="tf32")
    else:
        y = tl.sum(x[:, :, None] * matrix.to(tl.float32)[None, :, :], axis=1)
    at = token * (heads * ratio) + q_index
    tl.store(out + at[:, None] * HEAD + column[None, :], y, mask=live[:, None] & (column < HEAD)[None, :])
    if HAS_MEAN and tl.program_id(1) == 0:
        center = tl.load(mean + head * HEAD + c, mask=inner, other=0.0)
        tl.store(bias + at, tl.sum(x * center[None, :], axis=1), mask=live)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["ratio", "row_blocks", "splits", "batch", "row_limit"])
def merge_kernel(
    part_o, part_lse, query_start, lengths, rotation, mean, bias, sinks, out, lse,
    scale, ratio, heads, row_blocks, splits, batch, row_limit, out_token, out_head,
    HEAD: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
    ROTATE: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits of ``R`` rows, rotate back by ``C`` columns; grid ``(rows / R, d / C, heads)``.

    ``BLOCK`` is the row block of the decode kernel that wrote the partial results, ``row_limit`` the most rows a
    request may have.
    """
    head = tl.program_id(2)
    index = tl.program_id(0) * R + tl.arange(0, R)
    request = tl.minimum(index // row_limit, batch - 1)
    row = index % row_limit
    c = tl.arange(0, DP)
    inner = c < HEAD
    column = tl.program_id(1) * C + tl.arange(0, C)
    if ROTATE:
        # out[column] = sum_c o[c] rotation[column, c]
        matrix = tl.load(
            rotation + head * HEAD * HEAD + column[:, None] * HEAD + c[None, :],
            mask=(column < HEAD)[:, None] & inner[None, :],
            other=0.0,
        ).to(tl.float32)
    start = tl.load(query_start + request)
    queries = tl.load(query_start + request + 1) - start
    live = (index < batch * row_limit) & (tl.load(lengths + request) > 0) & (row < queries * ratio)
    if PDL:
        tl.extra.cuda.gdc_wait()
    base = (((request * heads + head) * row_blocks + row // BLOCK) * splits).to(tl.int64) * BLOCK + row % BLOCK
    top = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    o = tl.zeros([R, DP], tl.float32)
    S: tl.constexpr = 16 if R == 1 else 1
    for first in range(0, splits, S):
        s = first + tl.arange(0, S)
        at = base[None, :] + (s * BLOCK)[:, None]
        there = live[None, :] & (s < splits)[:, None]
        weight_log = tl.load(part_lse + at, mask=there, other=float("-inf"))
        value = tl.load(
            part_o + at[:, :, None] * HEAD + c[None, None, :], mask=there[:, :, None] & inner[None, None, :], other=0.0
        )
        new = tl.maximum(top, tl.max(weight_log, axis=0))
        use = tl.where(new == float("-inf"), 0.0, new)
        keep = tl.exp2(top - use)
        weight = tl.exp2(weight_log - use[None, :])
        o = o * keep[:, None] + tl.sum(value * weight[:, :, None], axis=0)
        total = total * keep + tl.sum(weight, axis=0)
        top = new
    token = (start + row // ratio).to(tl.int64)
    q_index = head * ratio + row % ratio
    some = total > 0
    logsum = tl.where(some, (top + tl.log2(total)) / LOG2E, float("-inf"))
    if HAS_BIAS:
        logsum += tl.load(bias + token * (heads * ratio) + q_index, mask=live, other=0.0) * scale
    factor = tl.where(some, 1.0 / total, 0.0)
    share = tl.where(some, 1.0, 0.0)
    if HAS_SINKS:
        logit = tl.load(sinks + q_index, mask=live, other=0.0).to(tl.float32)
        high = tl.maximum(logsum, logit)
        both = high + tl.log2(tl.exp2((logsum - high) * LOG2E) + tl.exp2((logit - high) * LOG2E)) / LOG2E
        share = tl.exp2((logsum - both) * LOG2E)
        factor = factor * share
        logsum = both
    o = o * factor[:, None]
    if ROTATE:
        if R >= 16:
            y = tl.dot(o, tl.trans(matrix), input_precision="tf32")
        else:
            y = tl.sum(o[:, None, :] * matrix[None, :, :], axis=2)
    else:
        y = o
    if HAS_MEAN:
        y += share[:, None] * tl.load(mean + head * HEAD + column, mask=column < HEAD, other=0.0)[None, :]
    tl.store(
        out + (token * out_token + q_index * out_head)[:, None] + column[None, :],
        y.to(out.dtype.element_ty),
        mask=live[:, None] & (column < HEAD)[None, :],
    )
    if HAS_LSE and tl.program_id(1) == 0:
        tl.store(lse + token * (heads * ratio) + q_index, logsum, mask=live)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()

"""Merging two partial attention results by their log-sum-exps: the device code."""

import triton
import triton.language as tl


@triton.jit
def merge_pair_kernel(
    out, lse, part, part_lse, tokens, out_token, out_head, part_token, part_head, lse_head, part_lse_head,
    HEAD: tl.constexpr, DP: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid ``(tokens / BT, heads)``."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    live = token < tokens
    c = tl.arange(0, DP)
    mask = live[:, None] & (c < HEAD)[None, :]
    a = tl.load(lse + head * lse_head + token, mask=live, other=float("-inf"))
    b = tl.load(part_lse + head * part_lse_head + token, mask=live, other=float("-inf"))
    # FlashAttention 2 gives +inf to a query that sees no key.
    a = tl.where(a == float("inf"), float("-inf"), a)
    b = tl.where(b == float("inf"), float("-inf"), b)
    top = tl.maximum(a, b)
    use = tl.where(top == float("-inf"), 0.0, top)
    wa = tl.exp(a - use)
    wb = tl.exp(b - use)
    total = wa + wb
    scale = tl.where(total > 0, 1.0 / total, 0.0)
    at = out + token[:, None] * out_token + head * out_head + c[None, :]
    x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(part + token[:, None] * part_token + head * part_head + c[None, :], mask=mask, other=0.0)
    x = tl.where((wa > 0)[:, None], x * (wa * scale)[:, None], 0.0)
    y = tl.where((wb > 0)[:, None], y.to(tl.float32) * (wb * scale)[:, None], 0.0)
    tl.store(at, (x + y).to(out.dtype.element_ty), mask=mask)
    merged = tl.where(total > 0, use + tl.log(total), float("-inf"))
    tl.store(lse + head * lse_head + token, merged, mask=live)

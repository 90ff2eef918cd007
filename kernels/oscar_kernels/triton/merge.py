"""Merge a partial attention result into another by their log-sum-exps."""

from __future__ import annotations

import triton
from torch import Tensor

from oscar_kernels.triton.merge_kernel import merge_pair_kernel


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge ``part`` ``[T, Hq, d]`` with ``part_lse`` float32 ``[Hq, T]`` into ``out`` and ``lse``, in place.

    A side whose LSE is infinite saw no key and counts for nothing, whatever its output holds.
    """
    tokens, heads, d = out.shape
    if out.stride(-1) != 1 or part.stride(-1) != 1 or lse.stride(-1) != 1 or part_lse.stride(-1) != 1:
        raise ValueError("outputs need contiguous channels, LSEs contiguous tokens")
    block = 32
    merge_pair_kernel[(triton.cdiv(tokens, block), heads)](
        out, lse, part, part_lse, tokens, out.stride(0), out.stride(1), part.stride(0), part.stride(1),
        lse.stride(0), part_lse.stride(0), HEAD=d, DP=triton.next_power_of_2(d), BT=block, num_warps=4,
    )  # fmt: skip

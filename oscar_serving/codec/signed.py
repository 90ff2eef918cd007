"""The symmetric codec (int4 and int8): an abs-max scale for each group, signed codes, two nibbles a byte.

For one row of a (token, KV head), group by group::

    s = float16(min(max|y| / L, 65504))        L = 2**(bits - 1) - 1
    code = clamp(floor(y * (1 / s) + 0.5), -L, L)        y^ = s * code

The scale is rounded to float16 *before* the codes are computed. All arithmetic is float32, with no fused multiply-add
and correctly rounded division. NaN counts as 0 and ±inf as ±65504 (in the row before rotation, see
:mod:`~oscar_serving.codec.srft_int4`); a group whose scale rounds to 0 reads back as zeros.

Packing: codes of 4 bits in two's complement, the even channel in the low nibble. A pair of neighbouring channels is
what one thread of the Metal kernel holds, so it writes whole bytes without asking other threads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FLOAT16_MAX = 65504.0


class Signed(NamedTuple):
    """Packed codes uint8 ``[..., d * bits / 8]`` and scales float16 ``[..., groups]``."""

    codes: Tensor
    scales: Tensor


def quantize_signed(y: Tensor, bits: int, group_size: int) -> Signed:
    """Quantize and pack rows ``[..., d]`` (finite, any float type) in groups of ``group_size`` channels."""
    grouped = y.float().unflatten(-1, (-1, group_size))
    top = float((1 << (bits - 1)) - 1)
    scales = (grouped.abs().amax(-1) / top).clamp_(max=FLOAT16_MAX).half()
    step = scales.float().unsqueeze(-1)
    inverse = torch.where(step > 0, 1.0 / step, torch.zeros_like(step))
    codes = torch.floor(grouped * inverse + 0.5).clamp_(-top, top).to(torch.int8)
    return Signed(pack_signed(codes.flatten(-2), bits), scales)


def dequantize_signed(packed: Signed, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read rows back as ``dtype`` ``[..., d]`` (still rotated, per-channel factors not undone)."""
    codes = unpack_signed(packed.codes, bits).to(dtype)
    grouped = codes.unflatten(-1, (packed.scales.shape[-1], -1))
    return (grouped * packed.scales.to(dtype).unsqueeze(-1)).flatten(-2)


def pack_signed(codes: Tensor, bits: int) -> Tensor:
    """int8 ``[..., d]`` → uint8 ``[..., d * bits / 8]``; ``d`` even for 4 bits."""
    unsigned = codes.view(torch.uint8)
    if bits == 8:
        return unsigned
    return (unsigned[..., 0::2] & 15) | (unsigned[..., 1::2] << 4)


def unpack_signed(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack_signed`: uint8 ``[..., d * bits / 8]`` → int8 ``[..., d]``."""
    signed = packed.contiguous().view(torch.int8)
    if bits == 8:
        return signed
    return torch.stack([(signed << 4) >> 4, signed >> 4], dim=-1).flatten(-2)

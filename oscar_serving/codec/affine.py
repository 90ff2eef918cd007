"""The asymmetric affine codec (INT2 and INT4), and Lloyd-Max levels as an option of the same codec.

For one row of a (token, KV head), group by group::

    lo = shrink * min(x)            hi = shrink * max(x)
    s  = store((hi - lo) / L)       m  = store(lo)              L = 2**bits - 1
    code = clamp(floor((x - m) * (1 / s) + 0.5), 0, L)          x^ = m + s * code

``store`` rounds to the 16-bit (or FP8) type in which scale and minimum are kept, *before* the codes are computed: the
codes are then the best ones for what the reader will see. All arithmetic is float32, with no fused multiply-add and
correctly rounded division, so that every kernel gives the same bytes.

Degenerate rows, defined once:

===================  ====================================================================================
row                  result
===================  ====================================================================================
constant             ``s = 0``, codes 0, reads back ``store(shrink * value)``
all zero, denormal   below the smallest stored scale: ``s = 0``, codes 0, reads back ``m``
NaN                  the element counts as 0
±inf, |x| > 65504    the element counts as ±65504, the largest float16; the row only
===================  ====================================================================================

With FP8, scale and minimum are stored in multiples of ``unit`` (a calibrated constant of layer and head) and clamped
to ±448 units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from oscar_serving.config import Levels, ScaleDtype

FLOAT16_MAX = 65504.0
FP8_MAX = 448.0

#: Lloyd-Max (minimum mean squared error) levels of the standard normal distribution; thresholds are the midpoints.
LLOYD_MAX_LEVELS: dict[int, tuple[float, ...]] = {
    2: (-1.510, -0.453, 0.453, 1.510),
    4: (
        -2.7326, -2.0690, -1.6180, -1.2562, -0.9423, -0.6568, -0.3880, -0.1284,
        0.1284, 0.3880, 0.6568, 0.9423, 1.2562, 1.6180, 2.0690, 2.7326,
    ),
}  # fmt: skip


class Quantized(NamedTuple):
    """Codes uint8 ``[..., d]`` and metadata ``[..., groups, 2]`` (scale, minimum) in the storage type."""

    codes: Tensor
    meta: Tensor


def meta_dtype(scale_dtype: ScaleDtype) -> torch.dtype:
    """Torch type in which scale and minimum are stored."""
    return torch.float16 if scale_dtype == "float16" else torch.float8_e4m3fn


def quantize(
    x: Tensor,
    bits: int,
    group_size: int,
    *,
    shrink: Tensor | float = 1.0,
    unit: Tensor | float = 1.0,
    scale_dtype: ScaleDtype = "float16",
    levels: Levels = "affine",
) -> Quantized:
    """Quantize rows.

    Parameters
    ----------
    x
        ``[..., d]``, any float type; already rotated.
    bits, group_size
        2 or 4; a divisor of ``d``.
    shrink, unit
        Clip factor and FP8 unit, broadcastable to ``x.shape[:-1]`` (e.g. ``[heads]`` for ``[tokens, heads, d]``).

    Returns
    -------
    Quantized
        See :func:`dequantize` for the way back.
    """
    x = torch.nan_to_num(x.float(), nan=0.0, posinf=FLOAT16_MAX, neginf=-FLOAT16_MAX)
    x = x.clamp(-FLOAT16_MAX, FLOAT16_MAX).unflatten(-1, (-1, group_size))
    unit = _per_row(unit, x)
    if levels == "lloyd_max":
        meta = torch.stack([x.std(-1, correction=0), x.mean(-1)], dim=-1)
        meta = _store(meta, unit, scale_dtype)
        scale, mean = load_meta(meta, unit)
        z = (x - mean) * _reciprocal(scale)
        level = torch.tensor(LLOYD_MAX_LEVELS[bits], device=x.device)
        codes = torch.bucketize(z, (level[1:] + level[:-1]) / 2).to(torch.uint8)
        return Quantized(codes.flatten(-2), meta)
    lo, hi = torch.aminmax(x, dim=-1)
    shrink = _per_row(shrink, x).squeeze(-1)
    lo, hi = lo * shrink, hi * shrink
    top = float((1 << bits) - 1)
    meta = _store(torch.stack([(hi - lo) * (1.0 / top), lo], dim=-1), unit, scale_dtype)
    scale, minimum = load_meta(meta, unit)
    codes = torch.floor((x - minimum) * _reciprocal(scale) + 0.5).clamp_(0.0, top).to(torch.uint8)
    return Quantized(codes.flatten(-2), meta)


def dequantize(
    codes: Tensor,
    meta: Tensor,
    *,
    unit: Tensor | float = 1.0,
    bits: int = 2,
    levels: Levels = "affine",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Read rows back: codes ``[..., d]``, meta ``[..., groups, 2]`` → ``dtype`` ``[..., d]`` (still rotated)."""
    groups = meta.shape[-2]
    code = codes.unflatten(-1, (groups, -1))
    scale, minimum = load_meta(meta, _per_row(unit, code))
    if levels == "lloyd_max":
        value = torch.tensor(LLOYD_MAX_LEVELS[bits], dtype=dtype, device=codes.device)[code.long()]
    else:
        value = code.to(dtype)
    return (minimum.to(dtype) + scale.to(dtype) * value).flatten(-2)


def load_meta(meta: Tensor, unit: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """Stored scale and minimum as float32 ``[..., groups, 1]``; ``unit`` broadcastable to that shape."""
    value = meta.float()
    return value[..., 0:1] * unit, value[..., 1:2] * unit


def _store(value: Tensor, unit: Tensor, scale_dtype: ScaleDtype) -> Tensor:
    if scale_dtype == "float16":
        return value.to(torch.float16)
    return (value / unit).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, 1.0 / scale, torch.zeros_like(scale))


def _per_row(value: Tensor | float, x: Tensor) -> Tensor:
    """Shape a per-row constant for ``x`` ``[..., groups, group_size]``."""
    value = torch.as_tensor(value, dtype=torch.float32, device=x.device)
    return value[..., None, None] if value.ndim else value.reshape([1] * x.ndim)

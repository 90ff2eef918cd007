"""Kernels as the executor runs them, and float64 references."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import oscar_kernels.metal
from oscar_serving.codec.signed import Signed, dequantize_signed, quantize_signed
from oscar_serving.rotation import roots_of_unity, signs
from tests.metal.executor import Library

METAL = Path(oscar_kernels.metal.__file__).parent
NAMES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="metal-")


def source(name: str) -> str:
    """Text of a shipped ``.metal`` file."""
    return (METAL / f"{name}.metal").read_text()


def library(text: str, **settings: object) -> Library:
    """Compile with ``OSCAR_`` settings."""
    return Library(text, {f"OSCAR_{key}": value for key, value in settings.items()}, Path(_folder().name))


def random(seed: int, *shape: int) -> Tensor:
    """float32 normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def encode(
    x: Tensor,
    factors: Tensor,
    *,
    bits: int = 4,
    group: int = 16,
    rotate: bool = True,
    text: str | None = None,
    schedule: int = 0,
    at_end: bool = True,
    capacity: int | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Codes ``[batch, heads, capacity, bytes]`` and scales of rows ``[batch, heads, tokens, d]``."""
    batch, heads, tokens, d = x.shape
    capacity = capacity or tokens
    kernels = library(text or source("encode"), D=d, T=NAMES[x.dtype], BITS=bits, GROUP=group, ROTATE=int(rotate))
    codes = torch.full((batch, heads, capacity, d * bits // 8), 0xEE, dtype=torch.uint8)
    scales = torch.full((batch, heads, capacity, d // group), -1.0, dtype=torch.float16)
    roots = torch.view_as_real(roots_of_unity(d)).float().contiguous()
    kernels.call(
        "oscar_encode", x.contiguous(), signs(d).float(), (1 / factors).float().contiguous(), roots, codes, scales,
        tokens, heads, capacity, first,
        threads=(batch * heads * tokens * d // 2,), group_size=(d // 2,), schedule=schedule, at_end=at_end,
    )  # fmt: skip
    return codes, scales


def pack(x: Tensor, bits: int, group: int) -> Signed:
    """Packed rows ``[batch, heads, tokens, d]`` as the CPU codec writes them."""
    return quantize_signed(x, bits, group)


def attend(
    q: Tensor,
    k: Signed,
    v: Signed,
    *,
    d: int,
    new_tokens: int = 1,
    first: int = 0,
    keys: int | None = None,
    window: int = 0,
    split_keys: int = 160,
    mask: Tensor | None = None,
    softcap: float = 0.0,
    text: str | None = None,
    schedule: int = 0,
    at_end: bool = True,
) -> Tensor:
    """Both attention kernels on ``q`` ``[batch, query heads, new tokens, d]``; scale and factors already in ``q``."""
    batch, heads, capacity, _ = k.codes.shape
    ratio = q.shape[1] // heads
    keys = keys or capacity - first
    rows = new_tokens * ratio
    settings = {
        "D": d, "T": NAMES[q.dtype], "K_BITS": k.codes.shape[-1] * 8 // d, "V_BITS": v.codes.shape[-1] * 8 // d,
        "GROUP": d // k.scales.shape[-1], "ROWS": 4,
    }  # fmt: skip
    kernels = library(text or source("attend"), **settings)
    folded = q.unflatten(1, (heads, ratio)).transpose(2, 3).reshape(batch * heads, rows, d).contiguous()
    splits = -(-keys // split_keys)
    partial = torch.full((batch * heads, splits, rows, d + 2), torch.nan)
    out = torch.empty(batch * heads, rows, d, dtype=q.dtype)
    seen = torch.zeros(1, dtype=torch.uint8) if mask is None else mask.to(torch.uint8).contiguous()
    kernels.call(
        "oscar_attend", folded, k.codes, k.scales, v.codes, v.scales, seen, partial,
        heads, ratio, new_tokens, keys, first, capacity, window, split_keys, int(mask is not None), softcap,
        threads=(-(-rows // 4) * 128, batch * heads, splits), group_size=(128,), schedule=schedule, at_end=at_end,
    )  # fmt: skip
    kernels.call(
        "oscar_merge", partial, out, splits, rows,
        threads=(d, rows, batch * heads), group_size=(d,), schedule=schedule, at_end=at_end,
    )  # fmt: skip
    return out.view(batch, heads, new_tokens, ratio, d).transpose(2, 3).flatten(1, 2)


def reference(
    q: Tensor,
    k: Signed,
    v: Signed,
    *,
    d: int,
    new_tokens: int = 1,
    first: int = 0,
    keys: int | None = None,
    window: int = 0,
    mask: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """The same in float64, key by key as written down: dequantize, mask, softmax."""
    keys = keys or k.codes.shape[2] - first
    bits = [x.codes.shape[-1] * 8 // d for x in (k, v)]
    ratio = q.shape[1] // k.codes.shape[1]
    k64, v64 = (
        dequantize_signed(x, b, torch.float64)[:, :, first : first + keys].repeat_interleave(ratio, 1)
        for x, b in zip((k, v), bits, strict=True)
    )
    scores = q.double() @ k64.mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position, key = torch.arange(keys - new_tokens, keys)[:, None], torch.arange(keys)
    seen = (key <= position) & ((key > position - window) if window else torch.tensor(True))
    seen = seen if mask is None else seen & mask[:, None].bool()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return weights @ v64


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest error, relative to the largest element expected."""
    return float((actual.double() - expected).abs().max() / expected.abs().max())

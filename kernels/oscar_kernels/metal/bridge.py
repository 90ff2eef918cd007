"""The Metal kernels as torch operators: compiled by ``torch.mps.compile_shader`` for the shape at hand, once each."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
#: Query rows of one KV head that a threadgroup computes together.
ROWS = 4
#: Keys of one split; a multiple of the 128 that a threadgroup reads at a time.
SPLIT_KEYS = 512
#: Query tokens computed at once, so that a prefill's partial results stay small.
QUERY_TOKENS = 256
ELEMENTS = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}


class MetalError(RuntimeError):
    """A kernel cannot run here or on these tensors: one line."""


def source(name: str, **settings: object) -> str:
    """Text of ``encode`` or ``attend`` with its compile-time settings in front."""
    defines = "".join(f"#define OSCAR_{key} {value}\n" for key, value in settings.items())
    return defines + (HERE / f"{name}.metal").read_text()


@functools.cache
def _library(name: str, settings: tuple[tuple[str, object], ...]) -> Any:
    if not torch.backends.mps.is_available():
        raise MetalError("the Metal kernels need an Apple GPU, and torch sees none: use tensors on the CPU")
    return torch.mps.compile_shader(source(name, **dict(settings)))


def _compiled(name: str, **settings: object) -> Any:
    return _library(name, tuple(settings.items()))


def _element(x: Tensor) -> str:
    if x.dtype not in ELEMENTS:
        raise MetalError(f"{x.dtype} tensors: the kernels take float32, float16 and bfloat16")
    return ELEMENTS[x.dtype]


@torch.library.custom_op("oscar::srft_encode", mutates_args=("codes", "scales"))
def encode(
    x: Tensor,
    signs: Tensor,
    inverse_factors: Tensor,
    roots: Tensor,
    codes: Tensor,
    scales: Tensor,
    first: int,
    bits: int,
    rotate: bool,
) -> None:
    """Write new rows into packed buffers.

    Parameters
    ----------
    x
        ``[batch, heads, tokens, d]``, float32, float16 or bfloat16; ``d`` even.
    signs, inverse_factors, roots
        float32 ``[d]``, ``[heads, d]`` and ``[d, 2]`` (``exp(-2 pi i j / d)``).
    codes, scales
        uint8 ``[batch, heads, capacity, d * bits / 8]`` and float16 ``[batch, heads, capacity, groups]``, contiguous.
    first
        Row of the first new token.
    rotate
        ``False`` where ``x`` is rotated already (every rotation but the SRFT).
    """
    batch, heads, tokens, d = x.shape
    capacity = codes.shape[2]
    if not (codes.is_contiguous() and scales.is_contiguous()) or first + tokens > capacity:
        raise MetalError(f"rows {first} to {first + tokens} do not fit in contiguous buffers of {capacity} rows")
    group = d // scales.shape[-1]
    if group not in (16, 32):
        raise MetalError(f"groups of {group} channels: the encode kernel takes 16 and 32")
    shader = _compiled("encode", D=d, T=_element(x), BITS=bits, GROUP=group, ROTATE=int(rotate))
    shader.oscar_encode(
        x.contiguous(), signs, inverse_factors, roots, codes, scales, tokens, heads, capacity, first,
        threads=batch * heads * tokens * d // 2, group_size=d // 2,
    )  # fmt: skip


@torch.library.custom_op("oscar::srft_attend", mutates_args=())
def attend(
    q: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    mask: Tensor | None,
    first: int,
    keys: int,
    window: int,
    softcap: float,
) -> Tensor:
    """Causal attention on packed codes.

    Parameters
    ----------
    q
        ``[batch, query heads, new tokens, d]``, rotated, factors and softmax scale applied; the new tokens are the last
        of the keys.
    k_codes, k_scales, v_codes, v_scales
        As :func:`encode` writes them.
    mask
        bool ``[batch, new tokens, keys]``, ``True`` where a query sees a key, besides the causal rule; or ``None``.
    first, keys
        The keys are rows ``first … first + keys`` of the buffers.
    window, softcap
        0 for none.

    Returns
    -------
    Tensor
        ``[batch, query heads, new tokens, d]`` in the type of ``q``, still rotated.
    """
    batch, query_heads, tokens, d = q.shape
    heads, capacity = k_codes.shape[1:3]
    ratio = query_heads // heads
    shader = _compiled(
        "attend", D=d, T=_element(q), K_BITS=k_codes.shape[-1] * 8 // d, V_BITS=v_codes.shape[-1] * 8 // d,
        GROUP=d // k_scales.shape[-1], ROWS=ROWS,
    )  # fmt: skip
    out = torch.empty_like(q)
    for start in range(0, tokens, QUERY_TOKENS):
        stop = min(start + QUERY_TOKENS, tokens)
        new, seen = stop - start, keys - tokens + stop  # later keys are in the future of this block
        folded = q[:, :, start:stop].unflatten(1, (heads, ratio)).transpose(2, 3).contiguous()
        block_mask = q.new_zeros(1, dtype=torch.uint8)
        if mask is not None:
            block_mask = mask[:, start:stop, :seen].to(torch.uint8).contiguous()
        splits, rows = -(-seen // SPLIT_KEYS), new * ratio
        partial = torch.empty(batch * heads, splits, rows, d + 2, dtype=torch.float32, device=q.device)
        merged = torch.empty(batch, heads, new, ratio, d, dtype=q.dtype, device=q.device)
        shader.oscar_attend(
            folded, k_codes, k_scales, v_codes, v_scales, block_mask, partial,
            heads, ratio, new, seen, first, capacity, window, SPLIT_KEYS, int(mask is not None), float(softcap),
            threads=(-(-rows // ROWS) * 128, batch * heads, splits), group_size=(128, 1, 1),
        )  # fmt: skip
        shader.oscar_merge(
            partial, merged, splits, rows, threads=(d, rows, batch * heads), group_size=(d, 1, 1)
        )  # fmt: skip
        out[:, :, start:stop] = merged.transpose(2, 3).flatten(1, 2)
    return out


@attend.register_fake
def _(
    q: Tensor,
    k_codes: Tensor,
    k_scales: Tensor,
    v_codes: Tensor,
    v_scales: Tensor,
    mask: Tensor | None,
    first: int,
    keys: int,
    window: int,
    softcap: float,
) -> Tensor:
    return torch.empty_like(q)

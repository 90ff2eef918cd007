"""Write new K and V of one layer to both stores in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from oscar_kernels.triton.decode import Windows, _words
from oscar_kernels.triton.store_kernel import slots_kernel, store_kernel


class Transform(NamedTuple):
    """Constants of one side (K or V), float32 but for the rotation.

    Attributes
    ----------
    rotation
        float32 ``[Hkv, d, d]``; or 16-bit ``[parts, Hkv, d, d]`` of :func:`split_rotation`, which is faster; ``None``
        for none.
    mean
        ``[Hkv, d]`` or ``None``.
    shrink, unit
        ``[Hkv]``: clip factor and FP8 unit.
    """

    rotation: Tensor | None
    mean: Tensor | None
    shrink: Tensor
    unit: Tensor


def split_rotation(rotation: Tensor, dtype: torch.dtype, parts: int = 2) -> Tensor:
    """``rotation`` float32 ``[Hkv, d, d]`` as a sum of 16-bit matrices ``[parts, Hkv, d, d]``, in the tokens' type.

    A product with each part is exact but for its float32 sum, so that two parts of bfloat16 (float16) leave an error of
    2^-17 (2^-22) of an entry; tf32 rounds entries and tokens to 2^-11.
    """
    first = rotation.to(dtype)
    both = [first, (rotation - first.float()).to(dtype)]
    return torch.stack(both[:parts])


def slots(
    query_start: Tensor, lengths: Tensor, page_table: Tensor, windows: Windows, *, out: Tensor, window_out: Tensor,
    page_size: int, sink: int, max_queries: int,
) -> None:  # fmt: skip
    """Fill ``out`` and ``window_out`` int64 ``[T]``: slot (page * page size + offset) of every new token, -1 for none.

    Once a step; all layers share the result. Rows of padding requests are not written: fill them with -1 once.
    """
    block = min(128, triton.next_power_of_2(max_queries))
    slots_kernel[(triton.cdiv(max_queries, block), lengths.shape[0])](
        query_start, lengths, page_table, windows.table, out, window_out, page_table.stride(0), windows.table.stride(0),
        SINK=sink, PAGE=page_size, WPAGE=windows.k.shape[2], RING=windows.ring, BT=block, num_warps=4,
    )  # fmt: skip


def store(
    k: Tensor,
    v: Tensor,
    codes: tuple[Tensor, Tensor, Tensor, Tensor],
    windows: Windows,
    slot: Tensor,
    window_slot: Tensor,
    k_transform: Transform,
    v_transform: Transform,
    *,
    precision: str = "tf32",
    block: int | None = None,
    tiles: int | None = None,
    warps: int | None = None,
    packed: bool | None = None,
) -> None:
    """Subtract the mean, rotate, quantize and pack K and V; write them to their slots.

    Parameters
    ----------
    k, v
        ``[T, Hkv, d]``, any float type, contiguous channels.
    codes, windows
        Views of both stores, as for decode; the window table is not read.
    slot, window_slot
        int64 ``[T]``: page * page size + offset in each store; -1 writes nothing. No two tokens share a slot.
    precision
        Of a float32 rotation: ``tf32`` or ``ieee``.
    block, tiles, warps
        Tokens a tile, tiles a program, warps a program.
    packed
        Inline assembly for the codes, and reductions of our own (the default on NVIDIA cards).
    """
    tokens, heads, d = k.shape
    if k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("k and v need contiguous channels")
    k_codes, k_meta, v_codes, v_meta = codes[0], _words(codes[1], True), codes[2], _words(codes[3], True)
    k_row, v_row = k_codes.shape[3], v_codes.shape[3]
    few = tokens <= 256
    block = block or (16 if few else 64 if d <= 128 else 128)
    # About two programs a place: the second loads its matrix while the first works.
    tiles = tiles or max(1, min(8, triton.cdiv(tokens, block) * heads * 2 // 512))
    if packed is None:
        packed = k.is_cuda and torch.version.cuda is not None
    store_kernel[(triton.cdiv(tokens, block * tiles), heads, 2)](
        k, v, k_transform.mean, v_transform.mean, k_transform.rotation, v_transform.rotation,
        k_transform.shrink, v_transform.shrink, k_transform.unit, v_transform.unit,
        k_codes, k_meta, v_codes, v_meta, windows.k, windows.v, slot, window_slot, tokens, tiles,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_codes.stride(0), k_codes.stride(1), k_meta.stride(0), k_meta.stride(1),
        v_codes.stride(0), v_codes.stride(1), v_meta.stride(0), v_meta.stride(1),
        windows.k.stride(0), windows.k.stride(1), windows.k.stride(2),
        HEAD=d, CHUNK=64 if d > 128 else max(16, triton.next_power_of_2(d)), KB=k_row * 8 // d, VB=v_row * 8 // d,
        KRP=max(16, triton.next_power_of_2(k_row)), VRP=max(16, triton.next_power_of_2(v_row)),
        GROUPS=codes[1].shape[3], META8=codes[1].element_size() == 1, PAGE=k_codes.shape[2], WPAGE=windows.k.shape[2],
        K_MEAN=k_transform.mean is not None, V_MEAN=v_transform.mean is not None,
        K_ROTATE=k_transform.rotation is not None, V_ROTATE=v_transform.rotation is not None,
        K_PARTS=_parts(k, k_transform.rotation), V_PARTS=_parts(v, v_transform.rotation), PRECISION=precision, BT=block,
        ASM=packed, num_warps=warps or (8 if d > 128 and not few else 4), num_stages=1, enable_fp_fusion=False,
    )  # fmt: skip


def _parts(x: Tensor, rotation: Tensor | None) -> int:
    """Parts of a 16-bit rotation, 0 for a float32 one."""
    if rotation is None or rotation.ndim == 3:
        return 0
    if x.dtype != rotation.dtype and (x.dtype, rotation.dtype) != (torch.bfloat16, torch.float16):
        raise ValueError(f"a rotation in {rotation.dtype} does not serve tokens in {x.dtype}: split it in their type")
    return rotation.shape[0]

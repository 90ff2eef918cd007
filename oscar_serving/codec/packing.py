"""Packing of 2- and 4-bit codes into bytes.

Planar order: with ``per = 8 // bits`` codes a byte and ``row = d // per`` bytes a row, plane ``p`` of byte ``j`` (bits
``p * bits … (p + 1) * bits``) holds channel ``p * row + j``. A plane is therefore a contiguous slice of the head, so
that a kernel multiplies one masked load with one contiguous slice of the query and never shuffles channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one packed row of ``head_dim`` codes."""
    per = 8 // bits
    if bits not in (2, 4) or head_dim % per:
        raise ValueError(f"cannot pack {head_dim} codes of {bits} bits into whole bytes")
    return head_dim // per


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack ``codes`` uint8 ``[..., d]`` (values below ``2**bits``) into uint8 ``[..., d * bits // 8]``."""
    row = row_bytes(codes.shape[-1], bits)
    planes = codes.unflatten(-1, (8 // bits, row))
    out = planes[..., 0, :].clone()
    for p in range(1, 8 // bits):
        out |= planes[..., p, :] << (p * bits)
    return out


def unpack(packed: Tensor, bits: int) -> Tensor:
    """Inverse of :func:`pack`: uint8 ``[..., d * bits // 8]`` → uint8 ``[..., d]``."""
    mask = (1 << bits) - 1
    return torch.cat([(packed >> (p * bits)) & mask for p in range(8 // bits)], dim=-1)

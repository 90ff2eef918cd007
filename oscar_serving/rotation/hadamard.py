"""Hadamard and bit-reversal matrices for every head size."""

from __future__ import annotations

import torch
from torch import Tensor


def factor(size: int) -> tuple[int, int]:
    """``(k, m)`` with ``size = 2**k * m`` and ``m`` odd."""
    if size < 1:
        raise ValueError(f"size must be positive, got {size}")
    k = (size & -size).bit_length() - 1
    return k, size >> k


def hadamard(size: int) -> Tensor:
    """Orthonormal flat matrix, float64 ``[size, size]``.

    The normalised Sylvester matrix for powers of two. Otherwise (80, 96, 192 …) its Kronecker product with the
    discrete Hartley transform of the odd factor: orthogonal, symmetric, and no entry exceeds ``sqrt(2 / size)``.
    """
    k, odd = factor(size)
    index = torch.arange(odd, dtype=torch.float64)
    angle = 2 * torch.pi * torch.outer(index, index) / odd
    result = (angle.cos() + angle.sin()) / odd**0.5
    half = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5
    for _ in range(k):
        result = torch.kron(half, result)
    return result


def bit_reversal(size: int) -> Tensor:
    """Permutation int64 ``[size]``: the digits of an index reversed in the mixed radix ``2, 2, …, odd factor``.

    For powers of two this is the usual bit reversal, an involution.
    """
    k, odd = factor(size)
    shape = [2] * k + ([odd] if odd > 1 else [])
    index = torch.arange(size).reshape(shape or [1])
    return index.permute(*reversed(range(index.ndim))).reshape(-1)

"""Rotations as products of Householder reflectors."""

from __future__ import annotations

import torch
from torch import Tensor


def householder(vectors: Tensor) -> Tensor:
    """``H_1 H_2 … H_k`` with ``H_i = I - 2 v_i v_i^T / |v_i|^2``.

    Parameters
    ----------
    vectors
        ``[k, d]``, any float type; the length of a vector does not matter. None may be zero.

    Returns
    -------
    Tensor
        float64 ``[d, d]``, orthogonal, for the row convention ``x' = x @ R``.

    Raises
    ------
    ValueError
        A vector is zero or not finite.
    """
    v = vectors.double()
    largest = v.abs().amax(-1, keepdim=True)
    if v.ndim != 2 or not torch.isfinite(v).all() or not (largest > 0).all():
        raise ValueError("vectors: expected [k, d] with finite, non-zero rows: a zero vector has no reflection")
    v = torch.nn.functional.normalize(v / largest, dim=-1)
    result = torch.eye(v.shape[-1], dtype=torch.float64, device=v.device)
    for row in v:
        result = result - 2 * torch.outer(result @ row, row)
    return result


def random_householder(size: int, reflectors: int | None = None, seed: int = 0) -> Tensor:
    """Product of ``reflectors`` (default ``size / 2``) seeded Gaussian reflectors, float64 ``[size, size]``."""
    generator = torch.Generator().manual_seed(seed)
    count = max(1, size // 2) if reflectors is None else reflectors
    return householder(torch.randn(count, size, dtype=torch.float64, generator=generator))

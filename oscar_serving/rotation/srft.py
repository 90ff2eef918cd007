"""Randomised transforms: fixed random signs, then a real Fourier (SRFT, arXiv 2605.05699) or Hadamard matrix (SRHT)."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_serving.rotation.hadamard import hadamard


def signs(size: int, seed: int = 0) -> Tensor:
    """Fixed pattern of ±1, float64 ``[size]``.

    Drawn with SplitMix64 and not with torch's generator, so that a pattern stays the same in every release: a cache
    that was written under one pattern cannot be read under another.
    """
    mask = (1 << 64) - 1
    state = seed & mask
    out = []
    for _ in range(size):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(1.0 - 2.0 * ((z ^ (z >> 31)) & 1))
    return torch.tensor(out, dtype=torch.float64)


def roots_of_unity(size: int) -> Tensor:
    """``exp(-2 pi i j / size)``, complex128 ``[size]``; quarter turns are exact."""
    j = torch.arange(size, dtype=torch.float64)
    angle = 2 * torch.pi * j / size
    result = torch.complex(angle.cos(), -angle.sin())
    for quarter, value in enumerate(torch.tensor([1, -1j, -1, 1j], dtype=torch.complex128)):
        if quarter * size % 4 == 0:
            result[quarter * size // 4] = value
    return result


def real_dft(size: int) -> Tensor:
    """Unitary DFT of a real row, its Hermitian half spectrum packed into ``size`` reals: float64 ``[size, size]``.

    Row convention ``y = x @ F``. Columns: ``X_0``; the Nyquist term ``X_(size/2)`` when ``size`` is even; then real and
    imaginary part of ``X_1, X_2, …``, each times ``sqrt(2)`` because the other half of the spectrum repeats it.
    Orthogonal for every ``size``.
    """
    if size < 1:
        raise ValueError(f"size must be positive, got {size}")
    n = torch.arange(size)
    k = torch.arange(1, (size + 1) // 2)
    spectrum = roots_of_unity(size)[torch.outer(n, k) % size] * (2 / size) ** 0.5
    edges = [torch.ones(size, 1, dtype=torch.float64)]
    if size % 2 == 0:
        edges.append((1.0 - 2.0 * (n % 2))[:, None].double())
    return torch.cat([torch.cat(edges, 1) / size**0.5, torch.view_as_real(spectrum).flatten(1)], dim=1)


def srft(size: int, seed: int = 0) -> Tensor:
    """``diag(signs) @ real_dft``, float64 ``[size, size]``, orthogonal."""
    return signs(size, seed)[:, None] * real_dft(size)


def srht(size: int, seed: int = 0) -> Tensor:
    """``diag(signs) @ hadamard``, float64 ``[size, size]``, orthogonal."""
    return signs(size, seed)[:, None] * hadamard(size)

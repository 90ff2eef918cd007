"""The SRFT codec (arXiv 2605.05699): one fixed rotation, per-channel factors, signed int4 or int8 groups.

With rotation ``R`` (orthogonal), calibrated per-channel factors ``lambda`` and the row convention::

    stored  y = (x @ R) / lambda          read back  x^ = (y^ * lambda) @ R^T
    score   q · x^ = ((q @ R) * lambda) · y^

so encoding is one matrix product with ``R diag(1 / lambda)``, and the query takes ``R diag(lambda)``, as does the
output (transposed): codes are never expanded to the model's space. Every rotation goes through the same matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from oscar_serving.codec.signed import FLOAT16_MAX, Signed, dequantize_signed, quantize_signed
from oscar_serving.config import ConfigError
from oscar_serving.rotation.householder import random_householder
from oscar_serving.rotation.spectral import check_orthogonal
from oscar_serving.rotation.srft import srft, srht

RotationName = Literal["srft", "srht", "householder", "none"]

#: Least factor of a channel, relative to the largest of its head: a channel that calibration saw as zero stays usable.
LEAST_FACTOR = 1e-4
#: Powers of a channel's root mean square that calibration tries as its factor.
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)


def _identity(size: int, seed: int) -> Tensor:
    del seed
    return torch.eye(size, dtype=torch.float64)


def _householder(size: int, seed: int) -> Tensor:
    return random_householder(size, seed=seed)


ROTATIONS: dict[RotationName, Callable[[int, int], Tensor]] = {
    "srft": srft,
    "srht": srht,
    "householder": _householder,
    "none": _identity,
}


@dataclass(frozen=True)
class SrftConfig:
    """Settings of the codec.

    Attributes
    ----------
    k_bits, v_bits
        4 or 8 each.
    group_size
        Channels that share a scale: 16, 32, or ``None`` for one scale a token and head (the published failure case,
        for comparison).
    rotation
        ``srft``, ``srht``, ``householder`` (half as many reflectors as channels) or ``none``.
    seed
        Of the signs or reflectors.
    """

    k_bits: int = 4
    v_bits: int = 4
    group_size: int | None = 32
    rotation: RotationName = "srft"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("k_bits", self.k_bits), ("v_bits", self.v_bits)):
            if value not in (4, 8):
                raise ConfigError(f"{name}={value!r}: allowed is 4, 8")
        if self.group_size not in (16, 32, None):
            raise ConfigError(f"group_size={self.group_size!r}: allowed is 16, 32, None (one scale a token)")
        if self.rotation not in get_args(RotationName):
            allowed = ", ".join(map(repr, get_args(RotationName)))
            raise ConfigError(f"rotation={self.rotation!r}: allowed is {allowed}")

    def groups(self, head_dim: int) -> int:
        """Scales of one row of ``head_dim`` channels."""
        size = self.group_size or head_dim
        if head_dim < 2 or head_dim % 2 or head_dim % size:
            raise ConfigError(f"group_size={size}: must divide the head size {head_dim}, which must be even; use 16")
        return head_dim // size

    def row_bytes(self, head_dim: int) -> tuple[int, int]:
        """Stored bytes of one token and head, scales included: of K and of V."""
        scales = 2 * self.groups(head_dim)
        return head_dim * self.k_bits // 8 + scales, head_dim * self.v_bits // 8 + scales

    def bits_per_value(self, head_dim: int) -> float:
        """Stored bits of one element, mean of K and V, scales included."""
        return sum(self.row_bytes(head_dim)) * 4 / head_dim

    def matrix(self, head_dim: int) -> Tensor:
        """The rotation, float64 ``[head_dim, head_dim]``."""
        return ROTATIONS[self.rotation](head_dim, self.seed)


#: ``--kv-cache-dtype`` name → (bits of K, bits of V).
SRFT_DTYPES: dict[str, tuple[int, int]] = {"srft_int4": (4, 4), "srft_k8v4": (8, 4)}


def served_config(kv_cache_dtype: str, head_dim: int) -> SrftConfig:
    """Settings that a ``--kv-cache-dtype`` name stands for: groups of 32 channels, of 16 where 32 does not divide."""
    k_bits, v_bits = SRFT_DTYPES[kv_cache_dtype]
    config = SrftConfig(k_bits, v_bits, 16 if head_dim % 32 else 32)
    config.groups(head_dim)
    return config


@dataclass(frozen=True)
class SideTransform:
    """Rotation and per-channel factors of K or of V in one layer.

    Attributes
    ----------
    rotation
        float64 ``[d, d]``, orthogonal.
    factors
        float64 ``[heads, d]``, positive.
    inverse_factors
        float32 ``[heads, d]``.
    encode_matrix, read_matrix
        float32 ``[heads, d, d]``: ``R diag(1 / lambda)`` for new rows, ``R diag(lambda)`` for queries; a cached output
        comes back through the transpose of the latter.
    """

    rotation: Tensor
    factors: Tensor
    inverse_factors: Tensor
    encode_matrix: Tensor
    read_matrix: Tensor

    @classmethod
    def build(cls, rotation: Tensor, factors: Tensor) -> SideTransform:
        """From ``rotation`` ``[d, d]`` and ``factors`` ``[heads, d]``.

        Raises
        ------
        ValueError
            The rotation is not orthogonal, or a factor is not positive and finite.
        """
        check_orthogonal(rotation, tolerance=1e-5)
        factors = factors.to(rotation.device).double()
        if factors.ndim != 2 or factors.shape[-1] != rotation.shape[-1]:
            raise ValueError(f"factors: expected [heads, {rotation.shape[-1]}], got {tuple(factors.shape)}")
        if not (torch.isfinite(factors) & (factors > 0)).all():
            raise ValueError("factors: must be positive and finite; calibrate on more tokens, or use ones")
        r = rotation.double()
        inverse = (1 / factors).float()
        return cls(r, factors, inverse, (r / factors[:, None]).float(), (r * factors[:, None]).float())

    def to(self, device: torch.device | str) -> SideTransform:
        """A copy whose float32 tensors are on ``device`` (the float64 ones stay: Apple GPUs have no such type)."""
        moved = (x.to(device) for x in (self.inverse_factors, self.encode_matrix, self.read_matrix))
        return SideTransform(self.rotation, self.factors, *moved)

    def encode(self, x: Tensor, bits: int, groups: int) -> Signed:
        """Quantize new rows ``[batch, heads, tokens, d]``."""
        return quantize_signed(clean(x) @ self.encode_matrix, bits, x.shape[-1] // groups)

    def decode(self, packed: Signed, bits: int) -> Tensor:
        """Rows in the model's space, float32 ``[batch, heads, tokens, d]``."""
        return dequantize_signed(packed, bits) @ self.read_matrix.mT


def clean(x: Tensor) -> Tensor:
    """float32 copy with NaN as 0 and values beyond ±65504 clamped there."""
    return torch.nan_to_num(x.float(), nan=0.0).clamp(-FLOAT16_MAX, FLOAT16_MAX)


def calibrate_factors(x: Tensor, rotation: Tensor, bits: int, group_size: int | None) -> Tensor:
    """Per-channel factors: a power of the rotated channels' root mean square, chosen for each head.

    The power is the one of :data:`POWERS` with the least squared error through the codec on the rows given. 1 gives
    every channel the same relative error, 0 switches the factors off; which is better depends on how loud the loudest
    channel is beside its group, so it is tried and not assumed.

    Parameters
    ----------
    x
        Calibration rows ``[..., heads, tokens, d]``.
    rotation
        ``[d, d]``.
    bits, group_size
        As the rows will be stored; ``None`` is one scale a row.

    Returns
    -------
    Tensor
        float64 ``[heads, d]``; a head without any signal gets ones.
    """
    y = clean(x).cpu().double() @ rotation.cpu().double()
    y = y.flatten(0, -4).transpose(0, 1).flatten(1, 2) if y.ndim > 3 else y  # [heads, rows, d]
    rms = y.square().mean(-2)
    largest = rms.amax(-1, keepdim=True).sqrt()
    rms = torch.where(largest > 0, torch.maximum(rms.sqrt(), LEAST_FACTOR * largest), torch.ones_like(rms))
    rms = rms / rms.log().mean(-1, keepdim=True).exp()
    best = torch.full(rms.shape[:1], torch.inf, dtype=torch.float64)
    chosen = torch.ones_like(rms)
    for power in POWERS:
        factors = rms**power
        stored = quantize_signed(y / factors[:, None], bits, group_size or y.shape[-1])
        error = (dequantize_signed(stored, bits, torch.float64) * factors[:, None] - y).square().mean((-2, -1))
        better = error < best
        best = torch.where(better, error, best)
        chosen = torch.where(better[:, None], factors, chosen)
    return chosen

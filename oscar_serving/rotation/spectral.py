"""Spectral rotations ``R = U · H · P_br`` (arXiv 2605.17757)."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_serving.rotation.hadamard import bit_reversal, hadamard


class NotOrthogonalError(ValueError):
    """A matrix that should be a rotation is not one."""


def check_orthogonal(rotation: Tensor, name: str = "rotation", tolerance: float = 1e-6) -> None:
    """Raise :class:`NotOrthogonalError` unless ``R^T R = I`` for every ``[..., d, d]`` matrix, computed in float64."""
    r = rotation.double()
    if r.ndim < 2 or r.shape[-1] != r.shape[-2]:
        raise NotOrthogonalError(f"{name}: expected square matrices, got shape {tuple(rotation.shape)}")
    error = (r.mT @ r - torch.eye(r.shape[-1], dtype=r.dtype, device=r.device)).abs().max().item()
    if not error <= tolerance:
        raise NotOrthogonalError(f"{name}: |R^T R - I| = {error:.3g} exceeds {tolerance:g}: not orthogonal")


def check_inverse(k_map: Tensor, q_map: Tensor, name: str = "maps", tolerance: float = 1e-4) -> None:
    """Raise :class:`NotOrthogonalError` unless ``K Q^T = I`` for every pair of ``[..., d, d]`` matrices."""
    if k_map.shape != q_map.shape or k_map.ndim < 2 or k_map.shape[-1] != k_map.shape[-2]:
        raise NotOrthogonalError(
            f"{name}: expected square matrices of one shape, got {tuple(k_map.shape)}, {tuple(q_map.shape)}"
        )
    product = k_map.double() @ q_map.double().mT
    error = (product - torch.eye(product.shape[-1], dtype=product.dtype, device=product.device)).abs().max().item()
    if not error <= tolerance:
        raise NotOrthogonalError(
            f"{name}: |K Q^T - I| = {error:.3g} exceeds {tolerance:g}: the maps of K and Q do not belong together"
        )


def balanced_maps(queries: Tensor, keys: Tensor, *, floor: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Maps of K and of Q that share the quantization error best between them.

    Rounding gives every channel of ``k' = k A`` an error of about one size, in proportion to the length of ``k'``; the
    error of a score is its product with ``q' = q A^-T``. ``tr(A^T C_K A) tr(A^-1 C_Q A^-T)`` is least where both second
    moments, seen through the maps, are equal: ``A A^T = C_K^-1 # C_Q`` (the geometric mean of the two), and
    ``A = (A A^T)^1/2 U H P_br``.

    Parameters
    ----------
    queries, keys
        ``[..., d, d]`` second moments of Q, and of K about its mean.
    floor
        Share of the mean eigenvalue that is added to every eigenvalue of both.

    Returns
    -------
    float64 ``(k_map, q_map)``, ``[..., d, d]``, with ``k_map @ q_map^T = I`` and the energy of ``k'`` that of ``k``.
    """
    d = queries.shape[-1]
    eye = torch.eye(d, dtype=torch.float64, device=queries.device)

    def regular(x: Tensor) -> Tensor:
        x = (x.double() + x.double().mT) / 2
        size = torch.diagonal(x, dim1=-2, dim2=-1).mean(-1).clamp_min(1e-30)[..., None, None]
        return x / size + floor * eye

    q, k = regular(queries), regular(keys)
    k_half, k_inverse = _power(k, 0.5), _power(k, -0.5)
    root = _power(k_inverse @ _power(k_half @ q @ k_half, 0.5) @ k_inverse, 0.5)
    turn = spectral_rotation(root @ k @ root)
    k_map = root @ turn
    energy = torch.diagonal(k_map.mT @ k @ k_map, dim1=-2, dim2=-1).sum(-1) / torch.diagonal(k, dim1=-2, dim2=-1).sum(
        -1
    )
    scale = energy.rsqrt()[..., None, None]
    return k_map * scale, _power(root, -1.0) @ turn / scale


def _power(matrix: Tensor, exponent: float) -> Tensor:
    """Power of symmetric positive definite matrices."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mT) / 2)
    least = values[..., -1:] * 1e-12
    return (vectors * torch.maximum(values, least).pow(exponent)[..., None, :]) @ vectors.mT


def spectral_rotation(
    target: Tensor, *, use_eigenvectors: bool = True, use_hadamard: bool = True, use_bit_reversal: bool = True
) -> Tensor:
    """Rotation of a symmetric target.

    Parameters
    ----------
    target
        ``[..., d, d]`` symmetric positive semidefinite, e.g. ``E[q^T q]``.
    use_eigenvectors, use_hadamard, use_bit_reversal
        Ablations of U, H and P_br.

    Returns
    -------
    Tensor
        float64 ``[..., d, d]``, orthogonal, for the row convention ``x' = x @ R``.
    """
    target = target.double()
    d = target.shape[-1]
    eye = torch.eye(d, dtype=torch.float64, device=target.device)
    result = eye.expand(target.shape)
    if use_eigenvectors:
        symmetric = (target + target.mT) / 2
        result = torch.linalg.eigh(symmetric).eigenvectors.flip(-1)  # eigenvalues descending
    if use_hadamard:
        result = result @ hadamard(d).to(target.device)
    if use_bit_reversal:
        result = result[..., bit_reversal(d).to(target.device)]
    return result.contiguous()

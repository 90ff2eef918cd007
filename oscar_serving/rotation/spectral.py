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

"""Candidate maps of K and of V, made from moments."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_serving.calibration.moments import Moments
from oscar_serving.calibration.recipe import Recipe
from oscar_serving.config import ScaleDtype
from oscar_serving.rotation import spectral_rotation
from oscar_serving.rotation.spectral import balanced_maps

#: FP8 metadata reaches this many standard deviations of the rotated channels before it saturates.
_REACH = 32.0
_FP8_MAX = 448.0


@dataclass(frozen=True)
class Candidate:
    """``x' = (x - mean) @ rotation`` and ``q' = q @ query`` for every KV head; ``query`` is ``rotation^-T``.

    float32 ``[heads, d, d]``, ``[heads, d]``, ``[heads]``.
    """

    name: str
    rotation: Tensor
    query: Tensor
    mean: Tensor
    unit: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """``[heads, tokens, d]`` → rotated float32."""
        return (x.float() - self.mean[:, None]) @ self.rotation


def k_candidates(moments: Moments, recipe: Recipe, scale_dtype: ScaleDtype) -> list[Candidate]:
    """Every combination of K target and mean in the recipe."""
    second = moments.kk / moments.tokens
    plain = moments.k_sum / moments.tokens
    read, read_mean = _weighted(moments.k_read, moments.k_read_sum, moments.k_weight, second, plain)
    queries = moments.qq / moments.queries
    weight = moments.k_weight.clamp_min(torch.finfo(torch.float64).tiny)[:, None, None]
    q_read = torch.where(moments.k_weight[:, None, None] > 0, moments.q_read / weight, queries)
    found = []
    for target in recipe.k_targets:
        for mean in recipe.means:
            center = {"none": torch.zeros_like(plain), "plain": plain, "read": read_mean}[mean]
            matrix = {
                "q": queries,
                "q_read": q_read,
                "k": _about(second, plain, center),
                "k_read": _about(read, read_mean, center),
                "balance": _about(read, read_mean, center),
                "balance_read": _about(read, read_mean, center),
                "none": torch.eye(second.shape[-1], dtype=second.dtype, device=second.device).expand_as(second),
            }[target]
            against = {"balance": queries, "balance_read": q_read}.get(target)
            about = _about(second, plain, center)
            found.append(_candidate(f"{target}, mean {mean}", matrix, center, about, recipe, scale_dtype, against))
    return found


def v_candidates(moments: Moments, recipe: Recipe, scale_dtype: ScaleDtype) -> list[Candidate]:
    """Every combination of V target and mean in the recipe."""
    second = moments.vv / moments.tokens
    plain = moments.v_sum / moments.tokens
    read, read_mean = _weighted(moments.v_read, moments.v_read_sum, moments.v_weight, second, plain)
    found = []
    for target in recipe.v_targets:
        for mean in recipe.means:
            center = {"none": torch.zeros_like(plain), "plain": plain, "read": read_mean}[mean]
            matrix = {
                "scores": moments.oo / moments.queries,
                "proxy": moments.proxy / moments.tokens,
                "v": _about(second, plain, center),
                "v_read": _about(read, read_mean, center),
                "none": torch.eye(second.shape[-1], dtype=second.dtype, device=second.device).expand_as(second),
            }[target]
            about = _about(second, plain, center)
            found.append(_candidate(f"{target}, mean {mean}", matrix, center, about, recipe, scale_dtype))
    return found


def _weighted(square: Tensor, total: Tensor, weight: Tensor, second: Tensor, plain: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted second moment and mean; the plain ones where nothing was read from INT2."""
    some = weight > 0
    safe = weight.clamp_min(torch.finfo(torch.float64).tiny)
    moment = torch.where(some[:, None, None], square / safe[:, None, None], second)
    mean = torch.where(some[:, None], total / safe[:, None], plain)
    return moment, mean


def _about(second: Tensor, mean: Tensor, center: Tensor) -> Tensor:
    """Second moment about ``center``, from the one about zero and the mean."""
    cross = mean[..., None] * center[..., None, :]
    return second - cross - cross.mT + center[..., None] * center[..., None, :]


def _candidate(
    name: str,
    target: Tensor,
    center: Tensor,
    second: Tensor,
    recipe: Recipe,
    scale_dtype: ScaleDtype,
    queries: Tensor | None = None,
) -> Candidate:
    """A map made from ``target``; balanced against the second moment of ``queries`` if given."""
    if not recipe.per_head:
        target = target.mean(0, keepdim=True).expand_as(target)
        queries = None if queries is None else queries.mean(0, keepdim=True).expand_as(queries)
    if queries is not None:
        rotation, query = balanced_maps(queries, target)
        unit = fp8_unit(rotation, second, scale_dtype)
        return Candidate(name, rotation.float(), query.float(), center.float(), unit)
    rotation = spectral_rotation(
        target,
        use_eigenvectors=recipe.use_eigenvectors,
        use_hadamard=recipe.use_hadamard,
        use_bit_reversal=recipe.use_bit_reversal,
    )
    unit = fp8_unit(rotation, second, scale_dtype)
    return Candidate(name, rotation.float(), rotation.float(), center.float(), unit)


def fp8_unit(rotation: Tensor, second: Tensor, scale_dtype: ScaleDtype) -> Tensor:
    """Unit of FP8 scale and minimum, float32 ``[heads]``, for rows of second moment ``second``; ones for float16."""
    spread = torch.diagonal(rotation.mT @ second @ rotation, dim1=-2, dim2=-1)
    sigma = spread.mean(-1).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    return (sigma * (_REACH / _FP8_MAX) if scale_dtype == "float8_e4m3" else torch.ones_like(sigma)).float()

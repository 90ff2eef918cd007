"""Spectral rotations: orthogonal for any target, and doing what they are for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_serving.rotation import bit_reversal, check_orthogonal, hadamard, spectral_rotation
from oscar_serving.rotation.spectral import NotOrthogonalError, balanced_maps, check_inverse
from tests.codec.heads import HEAD_DIMS

ABLATIONS = [
    {"use_eigenvectors": u, "use_hadamard": h, "use_bit_reversal": p}
    for u in (True, False)
    for h in (True, False)
    for p in (True, False)
]


def target(d: int, *, seed: int = 0, rank: int | None = None) -> Tensor:
    """A covariance with a few dominant directions, float64 ``[d, d]``."""
    x = torch.randn(4 * d if rank is None else rank, d, generator=torch.Generator().manual_seed(seed)).double()
    return x.mT @ x * torch.outer(*2 * [torch.logspace(1, -2, d, dtype=torch.float64)])


@pytest.mark.parametrize("options", ABLATIONS)
@pytest.mark.parametrize("d", HEAD_DIMS)
def test_orthogonal(d: int, options: dict[str, bool]) -> None:
    if d > 256 and options != ABLATIONS[0]:
        return
    rotation = spectral_rotation(target(d), **options)
    assert rotation.dtype == torch.float64
    check_orthogonal(rotation, tolerance=1e-6)
    check_orthogonal(rotation.float(), tolerance=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    d=st.sampled_from([16, 24, 64, 80, 96]),
    rank=st.sampled_from([0, 1, 3, None]),
    scale=st.sampled_from([1e-30, 1.0, 1e20]),
    seed=st.integers(0, 1000),
)
def test_degenerate_targets(d: int, rank: int | None, scale: float, seed: int) -> None:
    """All zero, of low rank, tiny, huge: orthogonal all the same."""
    check_orthogonal(spectral_rotation(scale * target(d, seed=seed, rank=rank)), tolerance=1e-6)


def test_heads_at_once_equal_heads_alone() -> None:
    targets = torch.stack([target(48, seed=s) for s in range(6)]).reshape(2, 3, 48, 48)
    together = spectral_rotation(targets)
    assert together.shape == targets.shape
    for i in range(2):
        for j in range(3):
            alone = spectral_rotation(targets[i, j])
            assert torch.allclose(together[i, j].mT @ alone, torch.eye(48, dtype=torch.float64), atol=1e-6)


def test_is_eigenvectors_then_hadamard_then_bit_reversal() -> None:
    c = target(32)
    u = spectral_rotation(c, use_hadamard=False, use_bit_reversal=False)
    diagonal = u.mT @ c @ u
    values = diagonal.diagonal()
    assert torch.allclose(diagonal, values.diag(), atol=1e-9 * values[0].item())
    assert (values.diff() <= 0).all(), "eigenvalues descend"
    assert torch.allclose(spectral_rotation(c), (u @ hadamard(32))[:, bit_reversal(32)], atol=1e-12)


@pytest.mark.parametrize("d", [16, 64, 80, 96, 128, 192])
def test_variance_is_spread_evenly(d: int) -> None:
    """After U and H each channel has the mean variance: exactly for powers of two, within a factor of two otherwise."""
    c = target(d)
    rotation = spectral_rotation(c)
    channels = (rotation.mT @ c @ rotation).diagonal() / (c.trace() / d)
    if d & (d - 1) == 0:
        assert torch.allclose(channels, torch.ones(d, dtype=torch.float64))
    else:
        assert channels.min() > 0
        assert channels.max() < 2 + 1e-9
    assert channels.max() < c.diagonal().max() / (c.trace() / d) / 2, "no better than not to rotate"


def test_only_the_symmetric_part_of_a_target_counts() -> None:
    c = target(16)
    noise = torch.randn(16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    skewed = c + noise - noise.mT
    assert torch.allclose(spectral_rotation(skewed), spectral_rotation(c), atol=1e-8)


class TestCheckOrthogonal:
    """Files checked for shape alone let wrong matrices through."""

    def test_accepts_rotations(self) -> None:
        check_orthogonal(hadamard(96).expand(2, 3, 96, 96))

    @pytest.mark.parametrize("factor", [1 + 1e-6, 0.0, -1.001, math.nan, math.inf])
    def test_refuses_scaled(self, factor: float) -> None:
        with pytest.raises(NotOrthogonalError, match=r"layer 3: \|R\^T R - I\| = .* exceeds 1e-06"):
            check_orthogonal(hadamard(64) * factor, "layer 3")

    def test_refuses_one_bad_head(self) -> None:
        rotation = hadamard(16).repeat(4, 1, 1)
        rotation[2, 5, 5] += 1e-4
        with pytest.raises(NotOrthogonalError):
            check_orthogonal(rotation)

    def test_refuses_a_duplicated_column(self) -> None:
        rotation = torch.eye(16)
        rotation[:, 3] = rotation[:, 4]
        with pytest.raises(NotOrthogonalError):
            check_orthogonal(rotation)

    @pytest.mark.parametrize("shape", [(16,), (16, 17), (2, 16, 8)])
    def test_refuses_what_is_not_square(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(NotOrthogonalError, match="expected square matrices"):
            check_orthogonal(torch.zeros(shape))

    def test_reflections_are_welcome(self) -> None:
        check_orthogonal(-torch.eye(3)[[1, 0, 2]])


@settings(deadline=None, max_examples=40)
@given(d=st.sampled_from([8, 16, 24, 64]), rank=st.sampled_from([None, 1, 3]), seed=st.integers(0, 9))
def test_balanced_maps_belong_together(d: int, rank: int | None, seed: int) -> None:
    """Scores survive, the energy of K too, and a moment that is singular or zero does no harm."""
    keys, queries = target(d, seed=seed, rank=rank), target(d, seed=seed + 100).flip(0, 1)
    k_map, q_map = balanced_maps(queries[None], keys[None])
    check_inverse(k_map, q_map, tolerance=1e-6)
    check_inverse(k_map.float(), q_map.float())
    energy = torch.trace(k_map[0].mT @ keys @ k_map[0]) / torch.trace(keys)
    assert rank or 0.3 < energy < 3
    zero = torch.zeros(1, d, d)
    check_inverse(*balanced_maps(zero, zero))


@pytest.mark.parametrize("d", [16, 24, 64])
def test_balanced_maps_err_least(d: int) -> None:
    """``tr(A^T C_K A) tr(A^-1 C_Q A^-T)`` is below that of any rotation, and does not fall when the map is changed."""
    keys, queries = target(d), target(d, seed=1).flip(0, 1)
    g = torch.Generator().manual_seed(2)

    def error(k_map: Tensor, q_map: Tensor) -> float:
        return float(torch.trace(k_map.mT @ keys @ k_map) * torch.trace(q_map.mT @ queries @ q_map))

    k_map, q_map = (m[0] for m in balanced_maps(queries[None], keys[None], floor=1e-9))
    least = error(k_map, q_map)
    rotation = spectral_rotation(keys)
    assert least < error(rotation, rotation) / 1.5
    for _ in range(20):
        change = torch.eye(d, dtype=torch.float64) + 0.02 * torch.randn(d, d, generator=g, dtype=torch.float64)
        assert error(change @ k_map, torch.linalg.inv(change).mT @ q_map) > least * (1 - 1e-9)
    # Every channel then carries about the same of both.
    for moment, m in ((keys, k_map), (queries, q_map)):
        diagonal = torch.diagonal(m.mT @ moment @ m)
        assert diagonal.max() < 1.5 * diagonal.mean()

"""SRFT, SRHT and Householder matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.rotation import check_orthogonal, householder, random_householder, real_dft, signs, srft, srht

SIZES = st.integers(1, 160)


@given(SIZES, st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_orthogonal_for_every_size_and_seed(size: int, seed: int) -> None:
    check_orthogonal(srft(size, seed), tolerance=1e-12)
    check_orthogonal(srht(size, seed), tolerance=1e-12)
    check_orthogonal(random_householder(size, seed=seed % 2**63), tolerance=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 15, 64, 80, 96, 128, 192, 256])
def test_real_dft_is_the_packed_half_spectrum(size: int) -> None:
    x = torch.randn(7, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    spectrum = torch.fft.rfft(x, norm="ortho")
    inner = spectrum[:, 1 : (size + 1) // 2] * 2**0.5
    edges = [spectrum[:, :1].real] + ([spectrum[:, size // 2 :].real] if size % 2 == 0 else [])
    packed = torch.cat([*edges, torch.view_as_real(inner.resolve_conj().contiguous()).flatten(1)], 1)
    torch.testing.assert_close(x @ real_dft(size), packed, rtol=0, atol=1e-12)


def test_signs_are_fixed() -> None:
    # A change here makes every stored cache and artifact unreadable.
    assert "".join("+" if s > 0 else "-" for s in signs(32, 0)) == SEED_0
    assert signs(4096, 1).sum().abs() < 4 * 4096**0.5
    assert not torch.equal(signs(64, 0), signs(64, 1))


SEED_0 = "-+-+-+-+-+-+-----+++--++--++++--"


def test_householder_reflects() -> None:
    v = torch.tensor([[3.0, 0.0, 4.0]])
    reflection = householder(v)
    torch.testing.assert_close(v.double() @ reflection, -v.double())
    torch.testing.assert_close(householder(v.repeat(2, 1)), torch.eye(3, dtype=torch.float64))
    assert torch.linalg.det(random_householder(16, 5)) < 0  # an odd number of reflections


@pytest.mark.parametrize("vector", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_householder_refuses_what_has_no_reflection(vector: list[float]) -> None:
    with pytest.raises(ValueError, match="non-zero"):
        householder(torch.tensor([vector]))


def test_householder_of_tiny_vectors() -> None:
    check_orthogonal(householder(torch.full((1, 4), 1e-300, dtype=torch.float64)))

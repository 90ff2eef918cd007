"""Hadamard matrices and bit reversal for every head size."""

from __future__ import annotations

import pytest
import torch

from oscar_serving.rotation import bit_reversal, check_orthogonal, hadamard
from oscar_serving.rotation.hadamard import factor
from tests.codec.heads import GROUPS, HEAD_DIMS

POWERS = [d for d in HEAD_DIMS if d & (d - 1) == 0]


@pytest.mark.parametrize("size", [*range(1, 40), *HEAD_DIMS])
def test_orthogonal_symmetric_and_flat(size: int) -> None:
    h = hadamard(size)
    assert h.dtype == torch.float64
    assert h.shape == (size, size)
    check_orthogonal(h, tolerance=1e-12)
    assert torch.allclose(h, h.mT, atol=1e-12)
    assert h.abs().max() <= (2 / size) ** 0.5 + 1e-12, "an entry takes more of a channel than a Hadamard matrix may"
    assert torch.allclose(h[0], torch.full((size,), size**-0.5, dtype=torch.float64))


@pytest.mark.parametrize("size", POWERS)
def test_powers_of_two_are_sylvester(size: int) -> None:
    """Entry (i, j) is ``(-1)**popcount(i & j) / sqrt(size)``."""
    signs = torch.tensor([[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)])
    assert torch.allclose(hadamard(size) * size**0.5, signs.double())


@pytest.mark.parametrize("size", HEAD_DIMS)
def test_an_outlier_is_spread(size: int) -> None:
    """What it is for: one large channel becomes many small ones."""
    x = torch.zeros(size, dtype=torch.float64)
    for channel in (0, 1, size // 2, size - 1):
        x.zero_()
        x[channel] = 1.0
        spread = x @ hadamard(size)
        assert spread.norm().item() == pytest.approx(1)
        assert spread.abs().max() <= (2 / size) ** 0.5 + 1e-12


@pytest.mark.parametrize("size", HEAD_DIMS)
def test_bit_reversal_is_a_permutation(size: int) -> None:
    assert sorted(bit_reversal(size).tolist()) == list(range(size))


@pytest.mark.parametrize("size", POWERS)
def test_bit_reversal_of_powers_of_two(size: int) -> None:
    width = size.bit_length() - 1
    expected = [int(f"{i:0{width}b}"[::-1], 2) for i in range(size)]
    assert bit_reversal(size).tolist() == expected
    assert torch.equal(bit_reversal(size)[bit_reversal(size)], torch.arange(size))


@pytest.mark.parametrize(("size", "group"), GROUPS)
def test_groups_get_an_even_share(size: int, group: int) -> None:
    """Channels in order of importance: no group gets a run of them, and all get about the same mean rank."""
    ranks = bit_reversal(size).reshape(-1, group).double()
    spread = ranks.mean(1) - (size - 1) / 2
    assert spread.abs().max() <= size / group / 2 + 0.05 * size
    halves = (ranks < size / 2).double().mean(1)
    assert ((halves - 0.5).abs() <= 0.5 / group + 0.13).all()


@pytest.mark.parametrize("size", [0, -4])
def test_sizes_that_make_no_sense(size: int) -> None:
    with pytest.raises(ValueError, match=f"size must be positive, got {size}"):
        factor(size)

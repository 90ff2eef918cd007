"""The symmetric codec and the SRFT codec around it."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.codec.signed import dequantize_signed, pack_signed, quantize_signed, unpack_signed
from oscar_serving.codec.srft_int4 import SideTransform, SrftConfig, calibrate_factors
from oscar_serving.config import ConfigError

FLOATS = st.floats(-60000, 60000, width=32)


def rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(st.lists(st.integers(-7, 7), min_size=2, max_size=64).filter(lambda x: len(x) % 2 == 0))
@settings(max_examples=50, deadline=None)
def test_nibbles_round_trip_low_nibble_first(values: list[int]) -> None:
    codes = torch.tensor(values, dtype=torch.int8)
    packed = pack_signed(codes, 4)
    assert packed.tolist() == [(a & 15) + 16 * (b & 15) for a, b in zip(values[::2], values[1::2], strict=True)]
    assert torch.equal(unpack_signed(packed, 4), codes)
    assert torch.equal(unpack_signed(pack_signed(codes, 8), 8), codes)


@given(st.lists(FLOATS, min_size=16, max_size=16), st.sampled_from([4, 8]))
@settings(max_examples=100, deadline=None)
def test_error_is_at_most_half_a_step(values: list[float], bits: int) -> None:
    y = torch.tensor(values)
    packed = quantize_signed(y, bits, 16)
    top = 2 ** (bits - 1) - 1
    scale = float(packed.scales[0])
    codes = unpack_signed(packed.codes, bits)
    assert int(codes.abs().max()) <= top
    for value, code in zip(y.tolist(), codes.tolist(), strict=True):
        error = abs(Fraction(value) - code * Fraction(scale))
        # Half a step, plus what rounding the scale down to float16 cuts off the largest value.
        slack = Fraction(scale) / 2 + Fraction(abs(value)) / 2000
        assert error <= slack or scale == 0


@pytest.mark.parametrize("bits", [4, 8])
def test_degenerate_groups_stay_in_their_group(bits: int) -> None:
    y = rows(0, 1, 48)
    clean = quantize_signed(y, bits, 16)
    y[0, 16:32] = 0
    zero = quantize_signed(y, bits, 16)
    assert zero.scales[0, 1] == 0
    assert dequantize_signed(zero, bits)[0, 16:32].abs().max() == 0
    y[0, 16:32] = 1e-30
    assert dequantize_signed(quantize_signed(y, bits, 16), bits)[0, 16:32].abs().max() == 0
    y[0, 16:32] = 3e38
    assert torch.isfinite(dequantize_signed(quantize_signed(y, bits, 16), bits)).all()
    keep = [*range(16), *range(32, 48)]
    assert torch.equal(dequantize_signed(zero, bits)[0, keep], dequantize_signed(clean, bits)[0, keep])


@pytest.mark.parametrize("rotation", ["srft", "srht", "householder", "none"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_scores_in_cache_space_are_scores_of_what_is_read_back(rotation: str, head_dim: int) -> None:
    config = SrftConfig(rotation=rotation, group_size=16)  # type: ignore[arg-type]
    x, q = rows(1, 1, 2, 40, head_dim), rows(2, 1, 2, 3, head_dim)
    matrix = config.matrix(head_dim)
    side = SideTransform.build(matrix, calibrate_factors(x, matrix, 4, 16))
    packed = side.encode(x, 4, config.groups(head_dim))
    scores = (q @ side.read_matrix) @ dequantize_signed(packed, 4).mT
    torch.testing.assert_close(scores, q @ side.decode(packed, 4).mT, rtol=1e-4, atol=1e-3)
    error = (side.decode(packed, 4) - x).square().mean() / x.square().mean()
    assert error < 0.012  # int4 with groups of 16 on Gaussian rows
    eight = (side.decode(side.encode(x, 8, config.groups(head_dim)), 8) - x).square().mean() / x.square().mean()
    assert eight < error / 200


def test_nan_and_inf_harm_their_row_only() -> None:
    matrix = SrftConfig().matrix(64)
    side = SideTransform.build(matrix, torch.ones(1, 64))
    x = rows(3, 1, 1, 3, 64)
    bad = x.clone()
    bad[0, 0, 1, 5], bad[0, 0, 1, 6] = float("nan"), float("inf")
    good, harmed = side.decode(side.encode(x, 4, 2), 4), side.decode(side.encode(bad, 4, 2), 4)
    assert torch.isfinite(harmed).all()
    torch.testing.assert_close(harmed[0, 0, [0, 2]], good[0, 0, [0, 2]], rtol=0, atol=1e-6)


def test_a_scale_a_token_fails_where_groups_and_factors_do_not() -> None:
    """One loud rotated channel, and quiet channels of very different variance beside it."""
    matrix = SrftConfig().matrix(128)
    spread = torch.logspace(0, 2, 128)
    spread[0] = 3000
    x = (rows(4, 1, 1, 512, 128) * spread) @ matrix.float().mT

    def error(group_size: int | None, *, factors: bool) -> float:
        """Mean over the quiet rotated channels of error by variance."""
        found = calibrate_factors(x, matrix, 4, group_size) if factors else torch.ones(1, 128)
        side = SideTransform.build(matrix, found)
        back = side.decode(side.encode(x, 4, SrftConfig(group_size=group_size).groups(128)), 4)
        rotated = ((back - x) @ matrix.float()).square().mean((0, 1, 2)) / spread.square()
        return float(rotated[1:].mean())

    per_token, groups, both = error(None, factors=False), error(32, factors=False), error(32, factors=True)
    assert per_token > 0.9
    assert groups < per_token / 3
    assert both < 0.8 * groups


def test_factors_never_lose_to_none_on_the_calibration_rows() -> None:
    x = rows(6, 2, 3, 100, 64) + 20 * rows(7, 1, 3, 1, 64)
    matrix = SrftConfig().matrix(64)

    def error(factors: torch.Tensor) -> torch.Tensor:
        side = SideTransform.build(matrix, factors)
        return (side.decode(side.encode(x, 4, 2), 4) - x).square().mean((0, 2, 3))

    found = calibrate_factors(x, matrix, 4, 32)
    assert found.shape == (3, 64)
    assert (error(found) <= error(torch.ones(3, 64)) * 1.0001).all()


@pytest.mark.parametrize(
    ("config", "head_dim", "bits"),
    [
        (SrftConfig(group_size=16), 128, 5.0),
        (SrftConfig(group_size=32), 128, 4.5),
        (SrftConfig(group_size=32), 256, 4.5),
        (SrftConfig(k_bits=8, group_size=32), 64, 6.5),
        (SrftConfig(group_size=None), 128, 4.125),
    ],
)
def test_bits_as_stored(config: SrftConfig, head_dim: int, bits: float) -> None:
    assert config.bits_per_value(head_dim) == bits
    side = SideTransform.build(config.matrix(head_dim), torch.ones(2, head_dim))
    x, groups = rows(5, 1, 2, 8, head_dim), config.groups(head_dim)
    k, v = side.encode(x, config.k_bits, groups), side.encode(x, config.v_bits, groups)
    stored = sum(t.nbytes for packed in (k, v) for t in packed)
    assert stored * 8 / (2 * x.numel()) == bits
    assert (k.codes.shape[-1] + 2 * groups, v.codes.shape[-1] + 2 * groups) == config.row_bytes(head_dim)


@pytest.mark.parametrize("options", [{"k_bits": 2}, {"v_bits": 16}, {"group_size": 8}, {"rotation": "fft"}])
def test_config_names_what_is_allowed(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="allowed is"):
        SrftConfig(**options)  # type: ignore[arg-type]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="must divide the head size 80"):
        SrftConfig(group_size=32).groups(80)
    with pytest.raises(ValueError, match="not orthogonal"):
        SideTransform.build(torch.ones(4, 4), torch.ones(1, 4))
    with pytest.raises(ValueError, match="positive"):
        SideTransform.build(torch.eye(4), torch.zeros(1, 4))
    assert torch.equal(calibrate_factors(torch.zeros(1, 2, 5, 4), torch.eye(4), 4, None), torch.ones(2, 4).double())

"""The affine codec: error bounds, degenerate rows, equality with its definition, Lloyd-Max levels."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_serving.codec import dequantize, quantize
from oscar_serving.codec.affine import FP8_MAX, LLOYD_MAX_LEVELS, load_meta
from oscar_serving.config import ScaleDtype

from .heads import GROUPS, bits, groups, scale_dtypes

FLOAT16_TINY = 2.0**-24  # smallest positive float16
#: Half a unit in the last place, relative, and smallest step, absolute, of each storage type.
ROUNDING = {"float16": (2.0**-11, 2.0**-25), "float8_e4m3": (2.0**-4, 2.0**-10)}

SPECIAL = {
    "zero": 0.0,
    "one": 1.0,
    "negative": -3.7,
    "denormal": 1e-40,
    "below the smallest scale": 1e-9,
    "largest float16": 65504.0,
    "beyond float16": 1e30,
    "inf": math.inf,
    "-inf": -math.inf,
    "nan": math.nan,
}


def rows(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def definition(
    x: Tensor, n: int, size: int, shrink: float, unit: float, scale_dtype: ScaleDtype
) -> tuple[Tensor, Tensor]:
    """The docstring of the codec, element by element in float32, for one row."""
    f = np.float32
    store = torch.float16 if scale_dtype == "float16" else torch.float8_e4m3fn
    factor = f(1.0) if scale_dtype == "float16" else f(unit)
    top = f(2**n - 1)

    def stored(value: np.float32) -> tuple[Tensor, np.float32]:
        scaled = f(np.clip(value / factor, -FP8_MAX, FP8_MAX)) if scale_dtype != "float16" else value
        kept = torch.tensor(float(scaled)).to(store)
        return kept, f(kept.float().item()) * f(unit)

    codes, meta = [], []
    for group in x.float().split(size):
        values = [f(0) if math.isnan(v) else f(min(max(v, -65504.0), 65504.0)) for v in group.tolist()]
        lo, hi = min(values) * f(shrink), max(values) * f(shrink)
        s_kept, s = stored((hi - lo) * f(1.0 / float(top)))
        m_kept, m = stored(lo)
        inverse = f(1.0) / s if s > 0 else f(0.0)
        codes += [min(max(float(np.floor((v - m) * inverse + f(0.5))), 0.0), float(top)) for v in values]
        meta.append(torch.stack([s_kept, m_kept]))
    return torch.tensor(codes).to(torch.uint8), torch.stack(meta)


@settings(deadline=None, max_examples=150)
@given(
    layout=groups,
    n=bits,
    scale_dtype=scale_dtypes,
    shrink=st.sampled_from([1.0, 0.95, 0.6]),
    unit=st.sampled_from([1.0, 2.0**-6, 0.013]),
    spread=st.sampled_from([1e-30, 1e-6, 1.0, 1e3, 1e6]),
    special=st.lists(st.tuples(st.integers(0, 15), st.sampled_from(list(SPECIAL.values()))), max_size=3),
    seed=st.integers(0, 1000),
)
def test_equals_its_definition(
    layout: tuple[int, int],
    n: int,
    scale_dtype: ScaleDtype,
    shrink: float,
    unit: float,
    spread: float,
    special: list[tuple[int, float]],
    seed: int,
) -> None:
    d, size = layout
    unit = unit if scale_dtype == "float8_e4m3" else 1.0
    x = rows(d, seed=seed, scale=spread)
    for channel, value in special:
        x[channel] = value
    codes, meta = quantize(x, n, size, shrink=shrink, unit=unit, scale_dtype=scale_dtype)
    expected_codes, expected_meta = definition(x, n, size, shrink, unit, scale_dtype)
    assert torch.equal(meta.float(), expected_meta.float())
    assert torch.equal(codes, expected_codes)


@settings(deadline=None, max_examples=150)
@given(layout=groups, n=bits, scale_dtype=scale_dtypes, seed=st.integers(0, 1000))
def test_error_is_at_most_half_a_step(layout: tuple[int, int], n: int, scale_dtype: ScaleDtype, seed: int) -> None:
    d, size = layout
    x = rows(3, 2, d, seed=seed)
    unit = torch.tensor([2.0**-6, 2.0**-5]) if scale_dtype == "float8_e4m3" else torch.ones(2)
    q = quantize(x, n, size, unit=unit, scale_dtype=scale_dtype)
    back = dequantize(*q, unit=unit, bits=n)
    assert q.codes.dtype == torch.uint8
    assert q.codes.shape == x.shape
    assert q.meta.shape == (3, 2, d // size, 2)
    assert q.codes.max() < 2**n
    relative, absolute = ROUNDING[scale_dtype]
    lo, hi = torch.aminmax(x.unflatten(-1, (-1, size)), dim=-1, keepdim=True)
    step = (hi - lo) / (2**n - 1)
    # Half a step, and what rounding scale and minimum moves the ends of the range by.
    moved = relative * (step * (2**n - 1) + lo.abs()) + absolute * 2**n
    error = (back - x).abs().unflatten(-1, (-1, size))
    assert (error <= step * (1 + relative) / 2 + moved + 1e-6).all()


@pytest.mark.parametrize(("d", "size"), GROUPS)
def test_more_bits_and_smaller_groups_err_less(d: int, size: int) -> None:
    x = rows(64, d, seed=d)

    def error(n: int, group: int) -> float:
        return (dequantize(*quantize(x, n, group), bits=n) - x).square().mean().item()

    assert error(4, size) < error(2, size) / 8
    assert size == d or error(2, size) < error(2, d)


@pytest.mark.parametrize("scale_dtype", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("levels", ["affine", "lloyd_max"])
@pytest.mark.parametrize("name", SPECIAL)
def test_constant_rows(name: str, levels: str, scale_dtype: ScaleDtype) -> None:
    """A constant row reads back as the stored constant."""
    value = SPECIAL[name]
    unit = 256.0 if scale_dtype == "float8_e4m3" and abs(value) > 448 else 1.0
    q = quantize(torch.full((2, 96), value), 2, 48, unit=unit, scale_dtype=scale_dtype, levels=levels)  # type: ignore[arg-type]
    back = dequantize(*q, bits=2, unit=unit, levels=levels)  # type: ignore[arg-type]
    finite = 0.0 if math.isnan(value) else min(max(value, -65504.0), 65504.0)
    relative, absolute = ROUNDING[scale_dtype]
    assert (load_meta(q.meta)[0] == 0).all()
    if levels == "affine":
        assert (q.codes == 0).all()
    assert ((back - finite).abs() <= relative * abs(finite) + absolute * unit).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-45])
@pytest.mark.parametrize("scale_dtype", ["float16", "float8_e4m3"])
@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("whole_row", [False, True])
def test_a_bad_row_stays_alone(n: int, scale_dtype: ScaleDtype, bad: float, whole_row: bool) -> None:
    """Codes, scales and minima of every other row, head and group are the same bytes as without it."""
    x = rows(5, 3, 64)
    unit = torch.tensor([1.0, 0.5, 0.02])
    clean = quantize(x, n, 16, unit=unit, scale_dtype=scale_dtype)
    x[2, 1, 16:32] = bad if whole_row else x[2, 1, 16:32]
    x[2, 1, 20] = bad
    dirty = quantize(x, n, 16, unit=unit, scale_dtype=scale_dtype)
    others = torch.ones(5, 3, 4, dtype=torch.bool)
    others[2, 1, 1] = False
    assert torch.equal(dirty.codes.unflatten(-1, (4, 16))[others], clean.codes.unflatten(-1, (4, 16))[others])
    assert torch.equal(dirty.meta.view(torch.uint8)[others], clean.meta.view(torch.uint8)[others])
    back = dequantize(*dirty, unit=unit, bits=n)
    assert torch.isfinite(back).all()
    assert (back.abs() <= 1.01 * 65504).all()


def test_nan_counts_as_zero_and_inf_as_the_largest() -> None:
    x = torch.tensor([math.nan, 1.0, -1.0, math.inf, -math.inf, 7e4, 0.0, 2.0])
    same = torch.tensor([0.0, 1.0, -1.0, 65504.0, -65504.0, 65504.0, 0.0, 2.0])
    for n in (2, 4):
        for a, b in zip(quantize(x, n, 8), quantize(same, n, 8), strict=True):
            assert torch.equal(a, b)


@settings(deadline=None, max_examples=60)
@given(power=st.integers(-40, 0), n=bits)
def test_the_smallest_scales(power: int, n: int) -> None:
    """Down to where the scale vanishes: finite codes, an error of no more than the range."""
    x = 2.0**power * torch.linspace(-1, 1, 16)
    back = dequantize(*quantize(x, n, 16), bits=n)
    assert ((back - x).abs() <= 2.0**power * 2 / (2**n - 1) + 2**n * FLOAT16_TINY).all()


@settings(deadline=None, max_examples=60)
@given(dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float16]), n=bits, seed=st.integers(0, 100))
def test_any_float_type(dtype: torch.dtype, n: int, seed: int) -> None:
    x = rows(4, 32, seed=seed).to(dtype)
    for a, b in zip(quantize(x, n, 32), quantize(x.float(), n, 32), strict=True):
        assert torch.equal(a, b)


@settings(deadline=None, max_examples=60)
@given(n=bits, seed=st.integers(0, 100), scale_dtype=scale_dtypes)
def test_per_head_constants_apply_to_their_head(n: int, seed: int, scale_dtype: ScaleDtype) -> None:
    x = rows(4, 3, 32, seed=seed)
    shrink = torch.tensor([1.0, 0.7, 0.5])
    unit = torch.tensor([0.01, 0.02, 0.5]) if scale_dtype == "float8_e4m3" else torch.ones(3)
    together = quantize(x, n, 16, shrink=shrink, unit=unit, scale_dtype=scale_dtype)
    for head in range(3):
        alone = quantize(x[:, head], n, 16, shrink=shrink[head].item(), unit=unit[head].item(), scale_dtype=scale_dtype)
        assert torch.equal(together.codes[:, head], alone.codes)
        assert torch.equal(together.meta[:, head].float(), alone.meta.float())
    back = dequantize(*together, bits=n, unit=unit)
    for head in range(3):
        one = dequantize(together.codes[:, head], together.meta[:, head], bits=n, unit=unit[head].item())
        assert torch.equal(back[:, head], one)


def test_fp8_saturates() -> None:
    """Beyond 448 units scale and minimum stop; they never become NaN."""
    back = dequantize(*quantize(torch.linspace(-1e4, 1e4, 16), 2, 16, scale_dtype="float8_e4m3"), bits=2)
    assert torch.isfinite(back).all()
    assert back.min() == -448
    assert back.max() == -448 + 3 * 448


def test_shrink_clips_the_ends() -> None:
    x = torch.linspace(-1, 1, 64)
    back = dequantize(*quantize(x, 4, 64, shrink=0.5), bits=4)
    assert back.min() == -0.5
    assert back.max().item() == pytest.approx(0.5, rel=1e-3)


class TestLloydMax:
    """The same codec with the levels of the normal distribution."""

    @pytest.mark.parametrize("n", [2, 4])
    def test_levels_are_optimal(self, n: int) -> None:
        """Each level is the mean of the normal distribution between the midpoints to its neighbours."""
        levels = LLOYD_MAX_LEVELS[n]
        assert len(levels) == 2**n
        assert levels == tuple(-x for x in reversed(levels))
        edges = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(levels)), math.inf]
        density = [math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in edges]
        mass = [math.erf(e / math.sqrt(2)) / 2 for e in edges]
        for i, level in enumerate(levels):
            centroid = (density[i] - density[i + 1]) / (mass[i + 1] - mass[i])
            assert level == pytest.approx(centroid, abs=2e-3)

    def test_scale_and_minimum_are_deviation_and_mean(self) -> None:
        meta = quantize(torch.tensor([2.0, 4.0] * 4), 2, 8, levels="lloyd_max").meta
        assert meta.tolist() == [[1.0, 3.0]]

    def test_thresholds(self) -> None:
        x = torch.tensor([-0.9825, -0.9805, -1e-3, 1e-3, 0.9805, 0.9825])
        pad = rows(4000)
        pad = (pad - pad.mean()) / pad.std(correction=0)
        row = torch.cat([x, pad])
        codes, meta = quantize(row, 2, len(row), levels="lloyd_max")
        assert load_meta(meta)[0].item() == pytest.approx(1, abs=2e-3)
        assert codes[:6].tolist() == [0, 1, 1, 2, 2, 3]

    @pytest.mark.parametrize(("n", "distortion"), [(2, 0.1175), (4, 0.0095)])
    def test_distortion_of_normal_rows(self, n: int, distortion: float) -> None:
        """The known mean squared error of the optimal quantizer of a normal distribution."""
        x = rows(200, 512)
        back = dequantize(*quantize(x, n, 512, levels="lloyd_max"), bits=n, levels="lloyd_max")
        assert (back - x).square().mean().item() == pytest.approx(distortion, rel=0.02)

    @settings(deadline=None, max_examples=50)
    @given(layout=groups, n=bits, seed=st.integers(0, 100))
    def test_nearest_level_is_chosen(self, layout: tuple[int, int], n: int, seed: int) -> None:
        d, size = layout
        x = rows(d, seed=seed)
        q = quantize(x, n, size, levels="lloyd_max")
        scale, mean = load_meta(q.meta)
        assume((scale > 0).all())
        candidates = mean + scale * torch.tensor(LLOYD_MAX_LEVELS[n])
        distance = (x.unflatten(-1, (-1, size))[..., None] - candidates[:, None]).abs()
        chosen = distance.gather(-1, q.codes.unflatten(-1, (-1, size)).long()[..., None]).squeeze(-1)
        assert torch.allclose(chosen, distance.amin(-1), atol=1e-5)

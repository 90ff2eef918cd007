"""The shipped encode.metal, run on the CPU, against float64."""

from __future__ import annotations

import pytest
import torch

from oscar_serving.codec.signed import unpack_signed
from oscar_serving.rotation import srft
from tests.metal.cases import encode, random
from tests.metal.executor import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="g++ is not installed: apt-get install g++")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEAD_DIMS = [64, 80, 96, 128, 256]
HEADS = 2


#: Error of the float32 transform, relative to the largest channel of a group.
FLOAT32_ERROR = 2e-6


def check(y: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bits: int, group: int) -> None:
    """Hold codes and scales against rotated float64 rows ``y``.

    A scale is the float16 nearest to the float64 abs-max over ``L``; where that lies within float32 error of the middle
    between two float16 numbers, either is right. Given the scale, no int4 code differs from the one computed in
    float64, and an int8 code only where the value lies within float32 error of the middle between two codes.
    """
    grouped = y.unflatten(-1, (-1, group))
    top = 2 ** (bits - 1) - 1
    ideal = grouped.abs().amax(-1) / top
    below, above = (ideal * (1 - FLOAT32_ERROR)).half(), (ideal * (1 + FLOAT32_ERROR)).half()
    assert ((scales == below) | (scales == above)).all()
    assert (below != above).double().mean() < 0.02
    shifted = (grouped / scales.double().unsqueeze(-1) + 0.5).flatten(-2)
    differ = shifted.floor().clamp(-top, top).to(torch.int8) != unpack_signed(codes, bits)
    tie = (shifted - shifted.round()).abs() < FLOAT32_ERROR * top
    assert not (differ & ~tie).any()
    assert int(differ.sum()) <= (0 if bits == 4 else 2)


@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_code_differs_from_float64_over_1000_vectors(dtype: torch.dtype, d: int) -> None:
    x = (random(d, 1, HEADS, 500, d) * 3).to(dtype)
    factors = random(d + 1, HEADS, d).exp().float()
    codes, scales = encode(x, factors)
    y = (x.double() @ srft(d)) / factors.double()[:, None]
    check(y, codes, scales, 4, 16)


@pytest.mark.parametrize(("bits", "group", "d"), [(8, 16, 80), (8, 32, 128), (4, 32, 96), (4, 32, 256)])
def test_int8_and_groups_of_32(bits: int, group: int, d: int) -> None:
    x = random(d, 1, HEADS, 100, d)
    codes, scales = encode(x, torch.ones(HEADS, d), bits=bits, group=group)
    check(x.double() @ srft(d), codes, scales, bits, group)


def test_rotated_input_needs_no_transform() -> None:
    y = random(9, 1, 1, 50, 64)
    codes, scales = encode(y, torch.ones(1, 64), rotate=False)
    check(y.double(), codes, scales, 4, 16)


@pytest.mark.parametrize("d", [64, 80, 256])
def test_every_schedule_gives_the_same_bytes(d: int) -> None:
    x, factors = random(3, 2, HEADS, 5, d), torch.ones(HEADS, d)
    first = encode(x, factors)
    for schedule in (1, 2, 3):
        for at_end in (True, False):
            other = encode(x, factors, schedule=schedule, at_end=at_end)
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_writes_its_rows_and_no_others() -> None:
    x, factors = random(4, 2, HEADS, 3, 64), random(5, HEADS, 64).exp()
    whole = encode(x, factors)
    placed = encode(x, factors, capacity=8, first=4)
    for rows, buffer in zip(whole, placed, strict=True):
        assert torch.equal(buffer[:, :, 4:7], rows)
    assert (placed[0][:, :, [0, 1, 2, 3, 7]] == 0xEE).all()
    assert (placed[1][:, :, [0, 1, 2, 3, 7]] == -1).all()


def test_degenerate_rows() -> None:
    x = torch.zeros(1, 1, 4, 64)
    x[0, 0, 1] = torch.nan
    x[0, 0, 2] = torch.inf
    x[0, 0, 3] = 1e-30
    codes, scales = encode(x, torch.ones(1, 64))
    assert codes[0, 0, [0, 1, 3]].eq(0).all()
    assert scales[0, 0, [0, 1, 3]].eq(0).all()
    assert torch.isfinite(scales).all()
    assert unpack_signed(codes[0, 0, 2], 4).abs().max() == 7

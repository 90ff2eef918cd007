"""The shipped attend.metal, run on the CPU, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oscar_serving.codec.signed import Signed
from tests.metal.cases import attend, pack, random, reference, relative_error
from tests.metal.executor import compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="g++ is not installed: apt-get install g++")

LIMIT = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-3 * 2}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def case(
    seed: int, d: int, *, batch: int = 2, heads: int = 2, ratio: int = 3, new: int = 1, keys: int = 300,
    k_bits: int = 4, v_bits: int = 4, group: int = 16, dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, Signed, Signed]:  # fmt: skip
    """Query, packed K, packed V; scores spread over several units."""
    q = (random(seed, batch, heads * ratio, new, d) * 2 / d**0.5).to(dtype)
    k = pack(random(seed + 1, batch, heads, keys, d), k_bits, group)
    return q, k, pack(random(seed + 2, batch, heads, keys, d), v_bits, group)


@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_float64(dtype: torch.dtype, d: int) -> None:
    q, k, v = case(d, d, dtype=dtype)
    actual, exact = attend(q, k, v, d=d), reference(q, k, v, d=d)
    # The output is rounded to the query's type once: 2^-8 for bfloat16, which no kernel can undercut.
    rounding = {torch.bfloat16: 2**-8}.get(dtype, 0)
    assert relative_error(actual, exact) <= max(LIMIT[dtype], rounding)
    if dtype != torch.float32:
        unrounded = attend(q.float(), k, v, d=d)
        assert relative_error(unrounded, exact) <= 1e-5
        assert torch.equal(unrounded.to(dtype), actual)


SHAPES: dict[str, dict[str, Any]] = {
    "int8 keys": {"k_bits": 8},
    "int8 both, groups of 32": {"k_bits": 8, "v_bits": 8, "group": 32},
    "one query head": {"ratio": 1},
    "seven query heads": {"ratio": 7, "heads": 1},
    "one key": {"keys": 1},
    "a tile exactly": {"keys": 32},
    "a tile and one": {"keys": 33},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str) -> None:
    q, k, v = case(1, 64, **SHAPES[shape])
    assert relative_error(attend(q, k, v, d=64), reference(q, k, v, d=64)) <= 1e-5


OPTIONS: dict[str, dict[str, Any]] = {
    "sliding window": {"window": 40},
    "window of one": {"window": 1},
    "part of the buffer": {"first": 17, "keys": 90},
    "softcap": {"softcap": 1.5},
    "one split": {"split_keys": 4096},
    "many splits": {"split_keys": 7},
}


@pytest.mark.parametrize("new", [1, 5])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option: str, new: int) -> None:
    q, k, v = case(2, 64, new=new)
    options = {"new_tokens": new, **OPTIONS[option]}
    actual = attend(q, k, v, d=64, **options)
    options.pop("split_keys", None)
    assert relative_error(actual, reference(q, k, v, d=64, **options)) <= 1e-5


def test_mask_of_a_padded_batch_and_a_row_that_sees_nothing() -> None:
    q, k, v = case(3, 64, new=4, keys=70)
    mask = torch.ones(2, 4, 70, dtype=torch.bool)
    mask[0, :, :20] = False
    mask[1, 2] = False
    actual = attend(q, k, v, d=64, new_tokens=4, mask=mask)
    assert relative_error(actual, reference(q, k, v, d=64, new_tokens=4, mask=mask)) <= 1e-5
    assert actual[1, :, 2].eq(0).all()


def test_every_schedule_gives_the_same_bits() -> None:
    q, k, v = case(4, 80, new=2)
    first = attend(q, k, v, d=80, new_tokens=2)
    for schedule in (1, 2):
        for at_end in (True, False):
            assert torch.equal(first, attend(q, k, v, d=80, new_tokens=2, schedule=schedule, at_end=at_end))

"""The compiled CPU path of a packed layer against the torch path, on the same codes."""

from __future__ import annotations

import pytest
import torch

from oscar_serving.codec.srft_int4 import SrftConfig
from oscar_serving.engines.apple.attention import attend_in_blocks, per_head
from oscar_serving.engines.apple.layer import PackedLayer
from tests.metal.cases import random, relative_error

BATCH, HEADS, RATIO = 3, 2, 3


def filled(d: int, config: SrftConfig, tokens: int, window: int | None = None) -> PackedLayer:
    """A layer that got ``tokens`` tokens in three calls."""
    factors = random(1, HEADS, d).exp(), random(2, HEADS, d).exp()
    layer = PackedLayer(config, factors, window)
    k, v = random(3, BATCH, HEADS, tokens, d), random(4, BATCH, HEADS, tokens, d)
    layer.update(k[:, :, :-65], v[:, :, :-65])
    layer.update(k[:, :, -65:-5], v[:, :, -65:-5])
    layer.update(k[:, :, -5:], v[:, :, -5:])
    return layer


@pytest.mark.parametrize(
    ("d", "config"),
    [
        (64, SrftConfig()),
        (80, SrftConfig(group_size=16)),
        (256, SrftConfig(k_bits=8)),
        (64, SrftConfig(group_size=None)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [None, 300])
def test_attention_equals_the_torch_path(d: int, config: SrftConfig, masked: bool, window: int | None) -> None:
    tokens, new = 700, 5
    layer = filled(d, config, tokens, window)
    compiled = layer.compiled
    assert compiled is not None
    first, keys = layer.start, layer.end - layer.start
    assert (first > 0) == (window is not None)  # a sliding layer's keys do not begin at row 0
    mask = None
    if masked:
        mask = torch.rand(BATCH, new, keys, generator=torch.Generator().manual_seed(5)) < 0.7
        mask[1, :, :40] = False  # left padding
        mask[2, 0] = False  # a row that sees nothing gives zeros
    q = random(6, BATCH, HEADS * RATIO, new, d)
    ours = compiled.attend(q, mask, first, keys, scale=0.1, window=window or 0, softcap=3.0)
    rotated = per_head(q * 0.1, layer.k_side.read_matrix, HEADS)
    bits = config.k_bits, config.v_bits
    right = attend_in_blocks(rotated, layer.k, layer.v, mask, first, keys, window or 0, 3.0, bits)
    right = per_head(right, layer.v_side.read_matrix.mT, HEADS).transpose(1, 2)
    assert relative_error(ours, right) <= 1e-5
    if masked:
        assert not ours[2, 0].any()


def test_codes_do_not_depend_on_how_tokens_arrive() -> None:
    k, v = random(7, BATCH, HEADS, 90, 64), random(8, BATCH, HEADS, 90, 64)
    whole, pieces = PackedLayer(SrftConfig()), PackedLayer(SrftConfig())
    whole.update(k, v)
    for part in zip(k.split([60, 1, 29], 2), v.split([60, 1, 29], 2), strict=True):
        pieces.update(*part)
    for a, b in zip((*whole.k, *whole.v), (*pieces.k, *pieces.v), strict=True):
        assert torch.equal(a[:, :, :90], b[:, :, :90])


def test_new_buffers_are_described_anew() -> None:
    layer = filled(64, SrftConfig(), 40)
    before = layer.compiled
    assert layer.compiled is before
    layer.reorder_cache(torch.tensor([2, 0, 1]))
    assert layer.compiled is not before


def test_rows_that_the_kernels_do_not_know_stay_on_the_torch_path() -> None:
    layer = PackedLayer(SrftConfig(group_size=None))
    layer.update(random(9, 1, 1, 4, 40), random(10, 1, 1, 4, 40))
    assert layer.compiled is None

"""Decode attention against the float64 reference."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from oscar_kernels.triton.config import DecodeConfig
from tests.kernels_triton.cache import DEVICE, Case, attend

PACKED = DEVICE.type == "cuda"


def check(case: Case, seed: int = 0, tolerance: float = 6e-3) -> None:
    for (out, lse), want in zip(*attend(case, seed), strict=True):
        error = (out.double() - want.output).norm() / want.output.norm()
        assert error < tolerance, f"relative error {error:.2e}"
        assert (lse.double() - want.lse).abs().max() < 2e-2


NAMED = {
    "one query": Case(),
    "ragged batch, padding row": Case(lengths=(150, 0, 5, 33)),
    "speculative": Case(queries=5, lengths=(90, 3)),
    "GQA 24": Case(ratio=24, heads=1, lengths=(70,)),
    "GQA 71": Case(ratio=71, heads=1, lengths=(50,)),
    "d 80, many groups": Case(head_dim=80, groups=5, page=16),
    "d 96": Case(head_dim=96, window_page=16),
    "d 192, 4-bit K": Case(head_dim=192, heads=1, k_bits=4),
    "d 256": Case(head_dim=256, heads=1, groups=2),
    "d 128, G 32, FP8": Case(head_dim=128, groups=4, scale_dtype="float8_e4m3"),
    "4 bits, groups inside a plane": Case(k_bits=4, v_bits=4, groups=4),
    "softcap": Case(softcap=3.0),
    "learned sinks": Case(sinks=True),
    "sliding window": Case(sliding=70, queries=2),
    "sliding window within recent": Case(sliding=10),
    "window pages gone": Case(missing=True, queries=2),
    "ring row": Case(ring=True, queries=3, lengths=(150, 20)),
    "ring row after a prefix hit": Case(ring=True, missing=True, lengths=(150, 40)),
    "two warps, two window splits": Case(
        lengths=(210,), win_splits=2, config=DecodeConfig(warps=2, keys=32, packed=PACKED, registers=0)
    ),
    "tile wider than a page": Case(
        lengths=(200,), page=16, config=DecodeConfig(warps=2, keys=32, packed=PACKED, registers=0)
    ),
    "no sink": Case(sink=0),
    "fp16 windows": Case(window_dtype="float16"),
    "fp32 windows": Case(window_dtype="float32"),
}


@pytest.mark.parametrize("name", NAMED)
def test_matches_reference(name: str) -> None:
    check(NAMED[name])


@settings(
    max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate)
)  # the interpreter is slow to shrink in
@given(st.data())
def test_matches_reference_over_drawn_shapes(data: st.DataObject) -> None:
    draw = data.draw
    head_dim = draw(st.sampled_from([64, 80, 96, 128]))
    check(
        Case(
            head_dim=head_dim,
            heads=draw(st.sampled_from([1, 2, 3])),
            ratio=draw(st.sampled_from([1, 2, 3, 5, 6, 7, 8, 16])),
            queries=draw(st.integers(1, 4)),
            lengths=tuple(draw(st.lists(st.integers(1, 120), min_size=1, max_size=2))),
            page=draw(st.sampled_from([16, 32, 64])),
            window_page=draw(st.sampled_from([16, 32])),
            sink=draw(st.integers(0, 40)),
            recent=draw(st.integers(1, 40)),
            k_bits=draw(st.sampled_from([2, 4])),
            v_bits=draw(st.sampled_from([2, 4])),
            groups=draw(st.sampled_from([g for g in (1, 2, 4) if head_dim // g % 8 == 0])),
            scale_dtype=draw(st.sampled_from(["float16", "float8_e4m3"])),
            softcap=draw(st.sampled_from([None, 5.0])),
            sliding=draw(st.sampled_from([None, 30])),
            missing=draw(st.booleans()),
            splits=draw(st.integers(1, 4)),
        ),
        seed=draw(st.integers(0, 1000)),
    )

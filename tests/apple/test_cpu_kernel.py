"""The compiled SRFT functions against the torch codec and the float64 reference."""

from __future__ import annotations

import pytest
import torch

from oscar_kernels.cpu.srft import PagedRows, srft_kernels
from oscar_serving.codec.signed import Signed, dequantize_signed
from oscar_serving.codec.srft_int4 import SideTransform, SrftConfig
from tests.metal.cases import random, reference, relative_error

HEADS, KEYS = 2, 1500


@pytest.mark.parametrize(
    ("d", "k_bits", "v_bits", "group"), [(64, 4, 4, 16), (80, 4, 4, 16), (96, 8, 8, 32), (128, 8, 4, 32)]
)
def test_store_and_attend(d: int, k_bits: int, v_bits: int, group: int) -> None:
    config = SrftConfig(k_bits, v_bits, group)
    sides = [SideTransform.build(config.matrix(d), random(s, HEADS, d).exp()) for s in (1, 2)]
    states = [random(s, 1, HEADS, KEYS, d) for s in (3, 4)]
    expected = [s.encode(x, b, config.groups(d)) for s, x, b in zip(sides, states, (k_bits, v_bits), strict=True)]
    k, v = (Signed(*(torch.zeros_like(t) for t in packed)) for packed in expected)
    rows, page, slots = PagedRows(*k, *v, d), torch.zeros(KEYS, dtype=torch.int64), torch.arange(KEYS)
    for value, (side, x) in enumerate(zip(sides, states, strict=True)):
        matrix = side.encode_matrix.contiguous()
        srft_kernels().store(rows, x[0].transpose(0, 1), matrix, page, slots, value=bool(value))
    for got, right, bits in zip((k, v), expected, (k_bits, v_bits), strict=True):
        # The product is summed in another order: a code next to a rounding threshold may fall on the other side.
        different = dequantize_signed(got, bits) != dequantize_signed(right, bits)
        assert different.float().mean() < 1e-3
    for new, window, softcap in ((1, 0, 0.0), (3, 0, 0.0), (2, 700, 2.0)):
        q = random(5, 1, HEADS * 3, new, d) / d**0.5
        rotated = (q.unflatten(1, (HEADS, 3)).double() @ sides[0].read_matrix.double()[:, None]).flatten(1, 2)
        exact = reference(rotated, k, v, d=d, new_tokens=new, window=window, softcap=softcap)
        exact = (exact.unflatten(1, (HEADS, 3)) @ sides[1].read_matrix.double().mT[:, None]).flatten(1, 2)
        matrices = sides[0].read_matrix.contiguous(), sides[1].read_matrix.mT.contiguous()
        tables = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([KEYS]), torch.tensor([0, new]), torch.tensor([0])
        out = srft_kernels().attend(
            rows, q[0].transpose(0, 1), *matrices, *tables, scale=1.0, window=window, softcap=softcap
        )
        assert relative_error(out.transpose(0, 1)[None], exact) <= 1e-5

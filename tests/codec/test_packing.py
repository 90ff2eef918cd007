"""Packing of codes into bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.codec import pack, unpack
from oscar_serving.codec.packing import row_bytes

from .heads import HEAD_DIMS


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_round_trip(head_dim: int, bits: int) -> None:
    codes = torch.randint(0, 2**bits, (3, 5, head_dim), generator=torch.Generator().manual_seed(head_dim))
    packed = pack(codes.to(torch.uint8), bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 5, row_bytes(head_dim, bits)) == (3, 5, head_dim * bits // 8)
    assert torch.equal(unpack(packed, bits), codes.to(torch.uint8))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 80, 96, 512])
def test_every_byte_is_some_row(head_dim: int, bits: int) -> None:
    """No bit of a byte is unused: unpacking and packing any bytes gives them back."""
    packed = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, row_bytes(head_dim, bits))
    assert torch.equal(pack(unpack(packed, bits), bits), packed)


@settings(deadline=None, max_examples=100)
@given(head_dim=st.sampled_from(HEAD_DIMS), bits=st.sampled_from([2, 4]), data=st.data())
def test_planar_order(head_dim: int, bits: int, data: st.DataObject) -> None:
    """Channel ``p * row + j`` is plane ``p`` of byte ``j``, and nowhere else."""
    channel, code = data.draw(st.integers(0, head_dim - 1)), data.draw(st.integers(1, 2**bits - 1))
    codes = torch.zeros(head_dim, dtype=torch.uint8)
    codes[channel] = code
    row = row_bytes(head_dim, bits)
    expected = torch.zeros(row, dtype=torch.uint8)
    expected[channel % row] = code << (channel // row * bits)
    assert torch.equal(pack(codes, bits), expected)


def test_packing_leaves_its_argument_alone() -> None:
    codes = torch.full((2, 16), 3, dtype=torch.uint8)
    pack(codes, 2)
    assert (codes == 3).all()


@pytest.mark.parametrize(("head_dim", "bits"), [(18, 2), (17, 4), (16, 3), (16, 8)])
def test_what_does_not_fill_bytes_is_refused(head_dim: int, bits: int) -> None:
    with pytest.raises(ValueError, match=f"cannot pack {head_dim} codes of {bits} bits"):
        row_bytes(head_dim, bits)

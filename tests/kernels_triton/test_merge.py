"""Merging partial attention results."""

from __future__ import annotations

import os

import pytest
import torch

from oscar_kernels.triton.merge import merge_into

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available(),
    reason="needs TRITON_INTERPRET=1 or a GPU",
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("d", [64, 80])
def test_merge_is_attention_over_both(d: int) -> None:
    torch.manual_seed(0)
    tokens, heads = 37, 3
    score, v = torch.randn(heads, tokens, 20), torch.randn(20, heads, d)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.einsum("hqk,khd->qhd", score[..., keys].softmax(-1), v[keys])
        return out.to(DEVICE), score[..., keys].logsumexp(-1).to(DEVICE)

    out, lse = part(slice(0, 12))
    other, other_lse = part(slice(12, 20))
    whole, whole_lse = part(slice(0, 20))
    for empty, value in ((other_lse, torch.inf), (other_lse, -torch.inf), (lse, -torch.inf)):
        empty[0, 5] = value  # saw no key: counts for nothing, whatever its output holds
    other[5, 0] = torch.nan
    lse[1, 6] = other_lse[1, 6] = -torch.inf
    merge_into(out, lse, other, other_lse)
    keep = torch.ones(tokens, heads, dtype=torch.bool)
    keep[5, 0] = keep[6, 1] = False
    torch.testing.assert_close(out[keep].cpu(), whole[keep].cpu())
    torch.testing.assert_close(lse.mT[keep].cpu(), whole_lse.mT[keep].cpu())
    assert out[6, 1].eq(0).all()
    assert lse[1, 6] == -torch.inf

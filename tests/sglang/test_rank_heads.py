"""A tensor-parallel rank stores its own KV heads with their own rotations, means and clips."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from transformers import LlamaConfig

from oscar_serving.calibration import Artifact
from oscar_serving.codec import PageLayout
from oscar_serving.config import OscarConfig
from oscar_serving.engines.sglang import transforms
from oscar_serving.engines.sglang.options import PAGE
from oscar_serving.rotation import LayerTransform


def calibrated(heads: int) -> transforms.Calibration:
    """Nothing is the same in two heads."""
    model = LlamaConfig(
        num_hidden_layers=1, hidden_size=32 * heads, num_attention_heads=heads, num_key_value_heads=heads, head_dim=32
    )
    plain = Artifact.plain(model, config=OscarConfig(page_size=PAGE))
    g = torch.Generator().manual_seed(1)
    k, v = (torch.linalg.qr(torch.randn(heads, 32, 32, generator=g)).Q for _ in range(2))
    shrink = torch.linspace(0.3, 1.0, heads)
    layer = replace(plain.layers[0], k_rotation=k, q_rotation=k, v_rotation=v, k_shrink=shrink, v_shrink=shrink.flip(0))
    return transforms.Calibration(plain.config, replace(plain, layers={0: layer}))


def same(a: LayerTransform, b: LayerTransform) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(LayerTransform))


@pytest.mark.parametrize(
    ("heads", "ranks", "slices"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (2, 2, [(0, 1), (1, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (1, 2, [(0, 1)] * 2),
    ],
)
def test_a_rank_takes_its_heads(heads: int, ranks: int, slices: list[tuple[int, int]]) -> None:
    known = calibrated(heads)
    assert known.artifact is not None
    whole = known.artifact.layers[0]
    for rank, (first, last) in enumerate(slices):
        mine = transforms.layer_transform(known, 0, last - first, 32, ranks=ranks, rank=rank)
        assert torch.equal(mine.k_rotation, whole.k_rotation[first:last])
        assert same(mine, whole.head_slice(first, last))
        others = [s for s in slices if s != (first, last)]
        assert not any(same(mine, whole.head_slice(*s)) for s in others)


def test_heads_that_the_artifact_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="2 KV heads of size 32 on rank 1 of 4, the artifact has 4"):
        transforms.layer_transform(calibrated(4), 0, 2, 32, ranks=4, rank=1)


def test_a_token_of_a_rank_takes_its_share_of_the_bytes() -> None:
    """Capacity: half the heads, half the bytes a token; a replicated head takes all of its bytes on each rank."""
    layout = PageLayout(128, OscarConfig(page_size=PAGE))
    assert layout.page_bytes(8) == 2 * layout.page_bytes(4) == 8 * layout.page_bytes(1)

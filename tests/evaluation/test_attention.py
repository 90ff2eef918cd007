"""The evaluator's attention against the float64 reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.attention.reference import reference_attention
from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.calibration import Artifact
from oscar_serving.config import OscarConfig
from oscar_serving.evaluation import attention as module
from oscar_serving.evaluation.attention import Tiers, rule_attention
from oscar_serving.evaluation.storage import OscarStorage
from oscar_serving.rotation import LayerTransform
from tests.engine.tiny import CONFIGS
from tests.maps import apart


def transform(heads: int, d: int, seed: int) -> LayerTransform:
    """Rotations, means, clips and units that differ by head and between K and V."""
    g = torch.Generator().manual_seed(seed)
    plain = LayerTransform.plain(heads, d)
    turn = [torch.linalg.qr(torch.randn(heads, d, d, generator=g, dtype=torch.float64)).Q.float() for _ in range(2)]
    k_map, q_map = apart(turn[0])
    mean = [torch.randn(heads, d, generator=g) for _ in range(2)]
    shrink = [0.5 + 0.5 * torch.rand(heads, generator=g) for _ in range(2)]
    return replace(
        plain, k_rotation=k_map, q_rotation=q_map, v_rotation=turn[1],
        k_mean=mean[0], v_mean=mean[1],
        k_shrink=shrink[0], v_shrink=shrink[1], k_unit=torch.full((heads,), 0.02), v_unit=torch.full((heads,), 0.03),
    )  # fmt: skip


def storage(heads: int, d: int, config: OscarConfig, seed: int) -> OscarStorage:
    """A storage with :func:`transform` in layer 0."""
    artifact = Artifact.plain(CONFIGS["llama"], config=config)
    return OscarStorage(replace(artifact, layers={0: transform(heads, d, seed)}, config=config), config)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 150),
    queries=st.integers(1, 150),
    heads=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1, 2, 3]),
    sink=st.sampled_from([0, 1, 4, 16, 200]),
    recent=st.sampled_from([1, 2, 8, 40, 200]),
    window=st.sampled_from([None, 1, 5, 30, 400]),
    softcap=st.sampled_from([None, 2.0]),
    learned=st.booleans(),
    scale_dtype=st.sampled_from(["float16", "float8_e4m3"]),
    levels=st.sampled_from(["affine", "lloyd_max"]),
    bits=st.sampled_from([(2, 2), (4, 2), (2, 4)]),
    block=st.sampled_from([16, 33, 256]),
    seed=st.integers(0, 999),
)
def test_equals_the_reference(
    tokens, queries, heads, ratio, sink, recent, window, softcap, learned, scale_dtype, levels, bits, block, seed
):
    queries = min(queries, tokens)
    d = 16
    config = OscarConfig(
        k_bits=bits[0], v_bits=bits[1], sink=sink, recent=recent, group_size=8, scale_dtype=scale_dtype, levels=levels
    )
    cache = storage(heads, d, config, seed)
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(queries, heads * ratio, d, generator=g)
    k, v = (torch.randn(tokens, heads, d, generator=g) + 0.5 for _ in range(2))
    sinks = torch.randn(heads * ratio, generator=g) if learned else None
    spec = AttentionSpec(0.3, softcap, window)

    expected = reference_attention(
        q, k, v, transform=cache.artifact.layers[0], config=config, spec=spec, sink_logits=sinks
    ).output
    tiers = cache.read_back(0, k.transpose(0, 1).double(), v.transpose(0, 1).double())
    before = module._MOST_QUERIES
    module._MOST_QUERIES = block
    try:
        got = rule_attention(
            q.transpose(0, 1).double(), tiers, spec, sink=sink, recent=recent,
            sink_logits=None if sinks is None else sinks.double(),
        )  # fmt: skip
    finally:
        module._MOST_QUERIES = before
    # What the codec decodes is the same to the bit; the rest is computed in float64.
    assert torch.allclose(got.transpose(0, 1), expected, rtol=1e-4, atol=1e-5)


def test_memory_bound_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OscarConfig(sink=4, recent=20)
    cache = storage(2, 16, config, 0)
    q, k, v = torch.randn(3, 4, 300, 16).unbind()
    tiers = cache.read_back(0, k[:2], v[:2])
    spec = AttentionSpec(0.25)
    whole = rule_attention(q, tiers, spec, sink=4, recent=20)
    monkeypatch.setattr(module, "_SCORE_ELEMENTS", 1)
    assert torch.allclose(rule_attention(q, tiers, spec, sink=4, recent=20), whole, atol=1e-5)


def test_a_single_key_beyond_the_sliding_window_is_not_seen() -> None:
    config = OscarConfig(sink=0, recent=64)
    cache = storage(1, 16, config, 0)
    q, k, v = torch.randn(3, 1, 31, 16).unbind()
    tiers = cache.read_back(0, k, v)
    got = rule_attention(q, tiers, AttentionSpec(0.25, sliding_window=30), sink=0, recent=64)
    without = rule_attention(q[:, -1:], Tiers(*(t[:, 1:] for t in tiers)), AttentionSpec(0.25), sink=0, recent=64)
    assert torch.allclose(got[:, -1:], without, atol=1e-6)

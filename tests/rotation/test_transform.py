"""What a layer does to K and V leaves attention as it is; and the reference against plain attention."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscar_serving.attention import AttentionSpec
from oscar_serving.attention.reference import Reference, reference_attention, stored
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform, spectral_rotation
from tests.maps import apart

EXACT = OscarConfig(sink=0, recent=1000, window_dtype="float32")
SPECS = {
    "plain": AttentionSpec(0.2),
    "softcap": AttentionSpec(0.3, softcap=5.0),
    "sliding": AttentionSpec(0.2, sliding_window=7),
    "both": AttentionSpec(0.3, softcap=4.0, sliding_window=5),
}


def transform(heads: int, d: int, seed: int = 0, mean: float = 1.0) -> LayerTransform:
    """Random rotations and means, one a head."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, heads, 4 * d, d, generator=g)
    k, v = spectral_rotation(x.mT @ x).float()
    k_map, q_map = apart(k)
    means = mean * torch.randn(2, heads, d, generator=g)
    return replace(
        LayerTransform.plain(heads, d),
        k_rotation=k_map,
        q_rotation=q_map,
        v_rotation=v.contiguous(),
        k_mean=means[0],
        v_mean=means[1],
    )


def qkv(tokens: int, queries: int, heads: int, ratio: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (
        torch.randn(queries, heads * ratio, d, generator=g),
        torch.randn(tokens, heads, d, generator=g) + 0.5,
        torch.randn(tokens, heads, d, generator=g) - 0.5,
    )


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, sink_logits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax attention as in a textbook, query by query and head by head, float64."""
    tokens, heads, _ = k.shape
    queries, query_heads, _ = q.shape
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.zeros(queries, query_heads, dtype=torch.float64)
    for i, h in product(range(queries), range(query_heads)):
        position, kv = tokens - queries + i, h // (query_heads // heads)
        first = 0 if spec.sliding_window is None else max(0, position - spec.sliding_window + 1)
        score = k[first : position + 1, kv].double() @ q[i, h].double() * spec.scale
        if spec.softcap is not None:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        weight = score.exp()
        total = weight.sum() + (sink_logits[h].double().exp() if sink_logits is not None else 0)
        out[i, h] = weight @ v[first : position + 1, kv].double() / total
        lse[i, h] = total.log()
    return out, lse


def close(result: Reference, expected: tuple[Tensor, Tensor], tolerance: float = 2e-5) -> None:
    assert (result.output - expected[0]).abs().max() < tolerance
    assert (result.lse - expected[1]).abs().max() < tolerance


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 24])
@pytest.mark.parametrize("spec", SPECS)
def test_reference_is_plain_attention_within_the_window(spec: str, ratio: int) -> None:
    q, k, v = qkv(20, 6, 2, ratio, 16)
    result = reference_attention(q, k, v, transform=transform(2, 16), config=EXACT, spec=SPECS[spec])
    close(result, plain_attention(q, k, v, SPECS[spec]))


@settings(deadline=None, max_examples=60)
@given(
    d=st.sampled_from([16, 24, 64, 80, 96]),
    spec=st.sampled_from(list(SPECS.values())),
    tokens=st.integers(1, 24),
    data=st.data(),
)
def test_reference_is_plain_attention_when_raw(d: int, spec: AttentionSpec, tokens: int, data: st.DataObject) -> None:
    """Keys from ``chunk_start`` on are read as they are; those before it, here, from the window or the sink."""
    queries = data.draw(st.integers(1, tokens))
    chunk_start = data.draw(st.integers(0, tokens))
    sinks = torch.randn(4) if data.draw(st.booleans()) else None
    config = EXACT if data.draw(st.booleans()) else EXACT.with_(sink=1000, recent=1)
    q, k, v = qkv(tokens, queries, 2, 2, d, seed=tokens)
    result = reference_attention(
        q, k, v, transform=transform(2, d), config=config, spec=spec, chunk_start=chunk_start, sink_logits=sinks
    )
    close(result, plain_attention(q, k, v, spec, sinks))


def test_reference_reads_each_key_where_the_rule_says() -> None:
    """Key by key: the tier it is read from is the only one whose change moves the output."""
    config = OscarConfig(sink=3, recent=4, page_size=16, window_dtype="float32")
    layer, spec = transform(1, 16), SPECS["plain"]
    q, k, v = qkv(16, 3, 1, 2, 16)
    k_int, v_int, k_win, v_win = stored(k, v, layer, config)
    present = torch.ones(16, dtype=torch.bool)
    present[1] = present[14] = False
    result = reference_attention(q, k, v, transform=layer, config=config, spec=spec, window_present=present)
    rotation = layer.q_rotation[0].double(), layer.v_rotation[0].double()
    for i in range(3):
        position = 13 + i
        exact = [(p < 3 or p > position - 4) and p not in (1, 14) for p in range(position + 1)]
        keys = torch.stack([(k_win if e else k_int)[p, 0] for p, e in enumerate(exact)])
        values = torch.stack([(v_win if e else v_int)[p, 0] for p, e in enumerate(exact)])
        # Back in model space both tiers are plain keys and values.
        keys, values = keys @ rotation[0].mT + layer.k_mean[0], values @ rotation[1].mT + layer.v_mean[0]
        padded = torch.zeros(position + 1, 1, 16, dtype=torch.float64)
        expected = plain_attention(q[i : i + 1], padded + keys[:, None], padded + values[:, None], spec)
        close(Reference(result.output[i : i + 1], result.lse[i : i + 1]), expected, tolerance=1e-6)


@settings(deadline=None, max_examples=60)
@given(d=st.sampled_from([16, 32, 64, 80, 96, 128]), heads=st.sampled_from([1, 2, 5]), ratio=st.sampled_from([1, 3, 7]))
def test_scores_and_outputs_are_invariant(d: int, heads: int, ratio: int) -> None:
    """``q' k'^T = q k^T - q k_mean^T``, and ``o' R_V^T + v_mean`` undoes what was done to V."""
    layer = transform(heads, d, seed=d)
    q, k, v = qkv(9, 9, heads, ratio, d)
    assert layer.rotate_k(k).dtype == layer.rotate_q(q).dtype == torch.float32
    wide = [x.repeat_interleave(ratio, 1) for x in (k, layer.rotate_k(k))]
    score = torch.einsum("qhd,khd->hqk", q, wide[0])
    rotated = torch.einsum("qhd,khd->hqk", layer.rotate_q(q), wide[1])
    constant = torch.einsum("qhd,hd->hq", q, layer.k_mean.repeat_interleave(ratio, 0))
    assert torch.allclose(score - constant[..., None], rotated, atol=3e-4)
    weights = torch.softmax(rotated, -1)
    out = torch.einsum("hqk,khd->qhd", weights, layer.rotate_v(v).repeat_interleave(ratio, 1))
    expected = torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(ratio, 1))
    assert torch.allclose(layer.unrotate_o(out), expected, atol=1e-4)


@pytest.mark.parametrize("rotate", [True, False])
def test_plain_transforms(rotate: bool) -> None:
    layer = LayerTransform.plain(3, 80, rotate=rotate, shrink=0.8)
    layer.validate("layer 0")
    assert (layer.heads, layer.head_dim) == (3, 80)
    assert (layer.k_shrink == layer.v_shrink).all()
    x = torch.randn(2, 3, 80)
    assert torch.equal(layer.rotate_k(x), x) != rotate


def test_head_slices_are_those_heads() -> None:
    """Tensor parallelism: a rank's transform is its heads' part of the whole."""
    layer = transform(4, 16)
    part = layer.head_slice(1, 3)
    part.validate("part")
    q, k, v = qkv(5, 5, 4, 3, 16)
    assert torch.equal(part.rotate_k(k[:, 1:3]), layer.rotate_k(k)[:, 1:3])
    assert torch.equal(part.rotate_v(v[:, 1:3]), layer.rotate_v(v)[:, 1:3])
    assert torch.equal(part.rotate_q(q[:, 3:9]), layer.rotate_q(q)[:, 3:9])
    assert torch.equal(part.unrotate_o(q[:, 3:9]), layer.unrotate_o(q)[:, 3:9])


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("k_rotation", lambda x: x.double(), "expected float32"),
        ("v_rotation", lambda x: x[:, :, :-1], "expected float32"),
        ("q_rotation", lambda x: x.mT, "k_rotation, q_rotation: .* do not belong together"),
        ("v_rotation", lambda x: x * 1.01, "not orthogonal"),
        ("v_rotation", lambda x: x * math.nan, "not finite"),
        ("v_mean", lambda x: x[:1], r"expected float32 \(2, 16\), got torch.float32 \(1, 16\)"),
        ("k_mean", lambda x: x + math.inf, "not finite"),
        ("k_shrink", lambda x: x * 0, r"must lie in \(0, 1\], got 0 … 0"),
        ("v_shrink", lambda x: x * 1.5, r"must lie in \(0, 1\], got 1.5"),
        ("k_unit", lambda x: x * 0, "must be positive, from"),
        ("v_unit", lambda x: -x, "must be positive, from"),
        ("v_unit", lambda x: x * 1e-38, "must be positive, from"),
        ("k_unit", lambda x: x * 1e36, "must be positive, from"),
    ],
)
def test_validation_names_the_field(field: str, change: object, message: str) -> None:
    layer = transform(2, 16)
    layer.validate("layer 7")
    assert callable(change)
    with pytest.raises(ValueError, match=message) as caught:
        replace(layer, **{field: change(getattr(layer, field))}).validate("layer 7")
    assert str(caught.value).startswith("layer 7.")
    assert f"{field}: " in str(caught.value)

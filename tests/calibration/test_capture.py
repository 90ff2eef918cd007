"""Captured Q, K and V are what the attention sees, and the sums are what the formulas say (brute force, float64)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oscar_serving.calibration.capture import CaptureError, LayerCall, capturing, forward
from oscar_serving.calibration.moments import READ_STRIDE, Moments
from oscar_serving.config import OscarConfig
from tests.calibration.tiny import CONFIGS, tiny_model, tiny_tokens

WINDOWS = OscarConfig(sink=2, recent=5)


def captured(model, tokens: Tensor) -> list[LayerCall]:  # type: ignore[no-untyped-def]
    calls: list[LayerCall] = []
    with capturing(model, calls.append):
        forward(model, tokens)
    return calls


def brute_force(call: LayerCall) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Q, K, V repeated to query heads, probabilities and outputs, float64, by one plain loop."""
    ratio = call.q.shape[0] // call.k.shape[0]
    q, k, v = call.q.double(), call.k.double().repeat_interleave(ratio, 0), call.v.double().repeat_interleave(ratio, 0)
    score = torch.einsum("hid,hjd->hij", q, k) * call.spec.scale
    for i in range(call.tokens):
        for j in range(call.tokens):
            hidden = call.spec.sliding_window is not None and j <= i - call.spec.sliding_window
            if j > i or hidden:
                score[:, i, j] = -math.inf
    probability = score.softmax(-1)
    return q, k, v, probability, probability @ v


@pytest.mark.parametrize("name", CONFIGS)
def test_captured_attention_gives_the_models_logits(name: str) -> None:
    model = tiny_model(name)
    tokens = tiny_tokens(1, 70)[0]
    expected = model(input_ids=tokens[None]).logits
    before = model.config._attn_implementation
    with capturing(model, lambda call: None):
        seen = model(input_ids=tokens[None], use_cache=False).logits
    torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-3)
    assert model.config._attn_implementation == before
    torch.testing.assert_close(model(input_ids=tokens[None]).logits, expected)
    with capturing(model, lambda call: call.output() * 0):
        assert (model(input_ids=tokens[None], use_cache=False).logits - expected).abs().max() > 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_sums_equal_a_brute_force_computation(name: str) -> None:
    model = tiny_model(name)
    sequences = tiny_tokens(2, 50, seed=1)
    calls = [call for tokens in sequences for call in captured(model, tokens) if call.layer == 1]
    sums = Moments.empty(calls[0].heads, calls[0].k.shape[-1])
    wanted = {n: torch.zeros_like(t) for n, t in sums.state().items()}
    for call in calls:
        sums.update(call, WINDOWS)
        q, k, v, probability, output = brute_force(call)
        ratio = call.q.shape[0] // call.heads
        for i in range(call.q.shape[0]):
            h = i // ratio
            wanted["qq"][h] += q[i].mT @ q[i]
            wanted["oo"][h] += output[i].mT @ output[i]  # V^T S^T S V
            for t in range(0, call.tokens, READ_STRIDE):
                for j in range(call.tokens):
                    if j <= t and j >= 2 and j <= t - 5:
                        p2 = probability[i, t, j] ** 2
                        w = p2 * (v[i, j] - output[i, t]).square().sum()
                        wanted["q_read"][h] += w * torch.outer(q[i, t], q[i, t])
                        wanted["k_read"][h] += w * torch.outer(k[i, j], k[i, j])
                        wanted["k_read_sum"][h] += w * k[i, j]
                        wanted["k_weight"][h] += w
                        wanted["v_read"][h] += p2 * torch.outer(v[i, j], v[i, j])
                        wanted["v_read_sum"][h] += p2 * v[i, j]
                        wanted["v_weight"][h] += p2
        for h in range(call.heads):
            kh, vh = call.k[h].double(), call.v[h].double()
            wanted["kk"][h] += kh.mT @ kh
            wanted["vv"][h] += vh.mT @ vh
            wanted["k_sum"][h] += kh.sum(0)
            wanted["v_sum"][h] += vh.sum(0)
        wanted["tokens"] += call.tokens
        wanted["queries"] += call.tokens * ratio
        for h in range(call.heads):
            kh, vh = call.k[h].double(), call.v[h].double()
            weight = torch.einsum("td,de,te->t", kh, wanted["qq"][h] / wanted["queries"], kh)
            wanted["proxy"][h] += torch.einsum("t,td,te->de", weight, vh, vh)
    for field, value in sums.state().items():
        scale = wanted[field].abs().max().clamp_min(1e-12)
        assert (value - wanted[field]).abs().max() <= 2e-4 * scale, field


def test_softcap_and_learned_sinks() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, 20, 16, generator=generator) * 3 for heads in (4, 2, 2))
    spec = captured(tiny_model("llama"), tiny_tokens(1, 8)[0])[0].spec
    call = LayerCall(0, q, k, v, replace(spec, softcap=2.0), torch.randn(4, generator=generator))
    score = torch.einsum("hid,hjd->hij", q.double(), k.double().repeat_interleave(2, 0)) * spec.scale
    score = (2 * torch.tanh(score / 2)).masked_fill(torch.ones(20, 20).triu(1).bool(), -math.inf)
    assert call.sinks is not None
    score = torch.cat([score, call.sinks.double()[:, None, None].expand(-1, 20, 1)], -1)
    wanted = score.softmax(-1)[..., :-1] @ v.double().repeat_interleave(2, 0)
    torch.testing.assert_close(call.output().double(), wanted, rtol=1e-5, atol=1e-5)


def test_batches_and_foreign_attention_are_refused() -> None:
    model = tiny_model("llama")
    with capturing(model, lambda call: None), pytest.raises(CaptureError, match="one whole sequence"):
        model(input_ids=torch.ones(2, 4, dtype=torch.long), use_cache=False)
    assert model.config._attn_implementation != "oscar_capture"
    with pytest.raises(CaptureError, match="attention code of its own"), capturing(object(), lambda call: None):
        pass

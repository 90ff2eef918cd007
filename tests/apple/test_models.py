"""Real weights."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.apple_quality import log_probabilities
from oscar_serving.codec.srft_int4 import SrftConfig
from oscar_serving.engines.apple import SRFTInt4Cache, calibrate, use_packed_attention
from oscar_serving.evaluation.texts import read_texts
from oscar_serving.models import get_model


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_divergence_falls_with_bits_and_a_scale_a_token_is_worst() -> None:
    folder = get_model("smollm2")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = read_texts([])[0][1]
    ids = AutoTokenizer.from_pretrained(folder)(text[:20_000], return_tensors="pt").input_ids[0]
    calibration, evaluated = ids[None, :256], ids[-193:]
    exact = log_probabilities(model, evaluated, DynamicCache(config=model.config))
    use_packed_attention(model)

    def divergence(config: SrftConfig, *, calibrated: bool = True) -> float:
        factors = calibrate(model, calibration, config) if calibrated else None
        predicted = log_probabilities(model, evaluated, SRFTInt4Cache(model.config, config, factors))
        return float((exact.exp() * (exact - predicted)).sum(-1).mean())

    eight = divergence(SrftConfig(k_bits=8, v_bits=8))
    four = divergence(SrftConfig())
    per_token = divergence(SrftConfig(group_size=None), calibrated=False)
    assert eight < 1e-3
    assert 10 * eight < four < per_token
    assert four < 0.15

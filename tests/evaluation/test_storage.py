"""What storages give back."""

from __future__ import annotations

import pytest
import torch

from oscar_serving.calibration import Artifact
from oscar_serving.config import ConfigError, OscarConfig
from oscar_serving.evaluation.storage import ExactStorage, Fp8Storage, OscarStorage, clamp_to_quantile
from tests.engine.tiny import CONFIGS

HEADS, TOKENS, D = 2, 50, 16


def values(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(HEADS, TOKENS, D, generator=g), torch.randn(HEADS, TOKENS, D, generator=g)


def oscar(**options) -> OscarStorage:
    config = OscarConfig(**options)
    artifact = Artifact.plain(CONFIGS["llama"], "hadamard", config=config)
    return OscarStorage(artifact, artifact.config)


def test_exact_float32_changes_nothing_and_bfloat16_rounds():
    k, v = values()
    tiers = ExactStorage(torch.float32).read_back(0, k, v)
    assert torch.equal(tiers.k_history, k)
    assert torch.equal(tiers.v_window, v)
    assert torch.equal(ExactStorage().read_back(0, k, v).k_history, k.bfloat16().float())


def test_fp8_rows_keep_their_largest_value_and_zero_rows_stay_zero():
    k, v = values()
    k[0, 3] = 0
    tiers = Fp8Storage(D).read_back(0, k, v)
    error = (tiers.k_history - k).abs().amax(-1) / k.abs().amax(-1).clamp(min=1e-9)
    assert float(error.max()) < 0.04
    assert float(error.max()) > 0.001  # it does round
    assert torch.equal(tiers.k_history[0, 3], torch.zeros(D))


def test_more_bits_are_closer_and_windows_are_closest():
    k, v = values()
    two, four = (oscar(k_bits=bits, v_bits=bits).read_back(0, k, v) for bits in (2, 4))
    error = [float((x - k).square().mean()) for x in (two.k_history, four.k_history, two.k_window)]
    assert error[0] > 10 * error[1] > 100 * error[2]


def test_tokens_do_not_depend_on_each_other():
    k, v = values()
    storage = oscar()
    whole = storage.read_back(0, k, v)
    parts = [storage.read_back(0, k[:, a:b], v[:, a:b]) for a, b in ((0, 7), (7, 50))]
    for i, tier in enumerate(whole):
        assert torch.allclose(torch.cat([p[i] for p in parts], 1), tier, atol=1e-5)


def test_layers_with_other_bits():
    storage = oscar()
    config = storage.config
    mixed = OscarStorage(storage.artifact, config, layer_bits={1: (4, 4)})
    k, v = values()
    assert torch.equal(mixed.read_back(0, k, v).k_history, storage.read_back(0, k, v).k_history)
    expected = oscar(k_bits=4, v_bits=4).read_back(1, k, v)
    assert torch.equal(mixed.read_back(1, k, v).v_history, expected.v_history)
    two, four = storage.bits_per_element(), oscar(k_bits=4, v_bits=4).bits_per_element()
    assert mixed.bits_per_element() == pytest.approx((two + four) / 2)
    with pytest.raises(ConfigError, match="layer 7"):
        OscarStorage(storage.artifact, config, layer_bits={7: (4, 4)})


def test_quantile_clamp_is_torch_quantile():
    x, _ = values()
    for quantile in (0.5, 0.92, 0.96, 1.0):
        limit = torch.quantile(x.abs(), quantile, dim=-1, keepdim=True)
        assert torch.allclose(clamp_to_quantile(x, quantile), x.clamp(-limit, limit), atol=1e-6)


def test_quantile_clip_reaches_the_codes():
    storage = oscar()
    clipped = OscarStorage(storage.artifact, storage.config, quantile_clip=(0.8, 1.0))
    k, v = values()
    assert not torch.equal(clipped.read_back(0, k, v).k_history, storage.read_back(0, k, v).k_history)
    assert torch.equal(clipped.read_back(0, k, v).v_history, storage.read_back(0, k, v).v_history)
    assert torch.equal(clipped.read_back(0, k, v).k_window, storage.read_back(0, k, v).k_window)

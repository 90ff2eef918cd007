"""With every token in the windows the engine computes what the plain model computes, for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from .helpers import Collected, make_engine, model_of, prompt_of, run
from .tiny import CONFIGS

ALL_IN_WINDOWS = {"sink": 4096, "page_size": 16, "window_dtype": "float32"}
#: Largest difference of a log-probability between two float32 computations of the same thing.
TOLERANCE = 2e-4


def assert_as_plain(family: str, prompt: list[int], result: Collected) -> None:
    """Log-probabilities of prompt and output are those of one plain run, and each token is its most likely one."""
    tokens = prompt + result.token_ids
    model = model_of(family)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        plain = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    expected = plain.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
    assert torch.allclose(result.logprobs, expected, rtol=0, atol=TOLERANCE)
    assert plain[len(prompt) - 1 :].argmax(-1).tolist() == result.token_ids


@pytest.mark.parametrize("mode", ["raw", "rule"])
@pytest.mark.parametrize("family", CONFIGS)
def test_every_family(family: str, mode: str) -> None:
    engine = make_engine(family, ALL_IN_WINDOWS, prefill_mode=mode)
    prompts = [prompt_of(length, seed=length) for length in (150, 3, 64, 1)]
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
    for prompt, result in zip(prompts, run(engine, prompts, **options), strict=True):
        assert result.last.finish_reason == "length"
        assert_as_plain(family, prompt, result)


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap"])
def test_the_bf16_baseline_is_the_plain_model_but_for_rounding(family: str) -> None:
    engine = make_engine(family, kv_cache_dtype="bf16", prefill_mode="raw")
    assert engine.config is None
    prompt = prompt_of(150)
    (result,) = run(engine, [prompt], max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    model = model_of(family)
    model.set_attn_implementation("eager")
    tokens = prompt + result.token_ids
    with torch.inference_mode():
        plain = model(torch.tensor([tokens[:-1]])).logits[0].log_softmax(-1)
    expected = plain.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)
    assert (result.logprobs - expected).abs().mean() < 0.02
    stats = engine.stats()
    assert stats.quantized.total == 0
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    assert stats.bytes_per_token == layers * heads * model.config.head_dim * 2 * 2  # K and V, two bytes each

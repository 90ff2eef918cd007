"""With INT2 history the engine computes what the float64 reference of attention computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from oscar_serving.attention.reference import reference_attention
from oscar_serving.engines.hf import Engine

from .helpers import SMALL_WINDOWS, make_engine, model_of, prompt_of, run

#: Largest mean difference from the reference, as a share of what quantization does to the log-probabilities: a code
#: next to a rounding threshold may fall on the other side when K differs in its last bit.
TOLERANCE = 0.03


def reference_logprobs(family: str, engine: Engine, tokens: list[int], chunk: int | None) -> Tensor:
    """Log-probabilities of ``tokens[1:]`` when every layer attends by the reference, raw in chunks or by the rule."""

    def attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, _mask: Any, **_: Any) -> tuple[Tensor, None]:
        cache = engine.stores.layers[module.layer_idx]  # type: ignore[index]
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        output = [
            reference_attention(
                q[start : start + (chunk or len(q))],
                k[: start + (chunk or len(q))],
                v[: start + (chunk or len(q))],
                transform=cache.transform,
                config=cache.layout.config,
                spec=cache.spec,
                chunk_start=start if chunk else None,
            ).output
            for start in range(0, len(q), chunk or len(q))
        ]
        return torch.cat(output).to(q.dtype)[None], None

    AttentionInterface.register("oscar_test_reference", attend)
    model = model_of(family)
    model.set_attn_implementation("oscar_test_reference")
    with torch.inference_mode():
        logits = model(torch.tensor([tokens[:-1]]), use_cache=False).logits[0].log_softmax(-1)
    model.set_attn_implementation("oscar")
    return logits.gather(-1, torch.tensor(tokens[1:])[:, None]).squeeze(-1)


def exact_logprobs(family: str, prompt: list[int]) -> Tensor:
    """Log-probabilities of the prompt when nothing is quantized."""
    (plain,) = run(make_engine(family, {**SMALL_WINDOWS, "sink": 4096}), [prompt], max_tokens=0, prompt_logprobs=0)
    return plain.logprobs


def assert_close(got: Tensor, expected: Tensor, exact: Tensor) -> None:
    """``got`` is ``expected``, and far from ``exact`` (a prefix of the same positions), where quantization matters."""
    effect = (expected[: len(exact)] - exact).abs().mean()
    assert effect > 1e-4
    assert (got - expected).abs().mean() < TOLERANCE * effect


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral-sliding", "gemma2-softcap", "gemma3", "llama-mha-80"])
@pytest.mark.parametrize("bits", [(2, 2), (4, 2)])
def test_rule_mode_is_the_reference(family: str, bits: tuple[int, int]) -> None:
    k_bits, v_bits = bits
    engine = make_engine(family, {**SMALL_WINDOWS, "k_bits": k_bits, "v_bits": v_bits})
    prompt = prompt_of(150)
    (result,) = run(engine, [prompt], max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    expected = reference_logprobs(family, engine, prompt + result.token_ids, None)
    assert_close(result.logprobs, expected, exact_logprobs(family, prompt))


@pytest.mark.parametrize("chunk", [64, 200])
def test_raw_mode_reads_its_chunk_unquantized(chunk: int) -> None:
    prompt = prompt_of(200)
    engine = make_engine(prefill_mode="raw", max_batched_tokens=chunk)
    (result,) = run(engine, [prompt], max_tokens=0, prompt_logprobs=0)
    expected = reference_logprobs("llama", engine, prompt, chunk)
    assert_close(result.logprobs, expected, reference_logprobs("llama", engine, prompt, None))


def test_fp8_scales_and_groups() -> None:
    family = "llama-mha-80"
    engine = make_engine(family, {**SMALL_WINDOWS, "scale_dtype": "float8_e4m3", "group_size": 40})
    prompt = prompt_of(120)
    (result,) = run(engine, [prompt], max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    expected = reference_logprobs(family, engine, prompt + result.token_ids, None)
    assert_close(result.logprobs, expected, exact_logprobs(family, prompt))


def test_the_artifact_given_is_the_one_used() -> None:
    prompt = prompt_of(150)
    engine = make_engine()
    assert engine.artifact is not None
    halved = {
        index: replace(layer, k_shrink=layer.k_shrink / 2, v_shrink=layer.v_shrink / 2)
        for index, layer in engine.artifact.layers.items()
    }
    other = make_engine(artifact_layers=halved)
    (result,) = run(other, [prompt], max_tokens=0, prompt_logprobs=0)
    expected = reference_logprobs("llama", other, prompt, None)
    assert_close(result.logprobs, expected, reference_logprobs("llama", engine, prompt, None))

"""The SRFT codec in the embedded engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oscar_serving.config import ConfigError
from oscar_serving.engines.apple import SRFTInt4Cache, compiled, paged, use_packed_attention
from oscar_serving.engines.apple.paged import SrftLayer
from oscar_serving.engines.hf import Engine, EngineOptions, SamplingParams
from oscar_serving.engines.hf.model import prepare_model
from tests.apple.tiny import gemma, llama, tokens
from tests.engine.helpers import Collected
from tests.engine.tiny import byte_tokenizer

MODELS = {"llama": llama, "gemma": gemma}


def engine_on(model: Any, **options: Any) -> Engine:
    """An engine whose pages hold K8 V4."""
    settings = {"kv_cache_dtype": "srft_k8v4", "page_size": 16, "max_batched_tokens": 64, "device": "cpu"} | options
    return Engine(prepare_model(model, max_model_len=512), byte_tokenizer(), EngineOptions(**settings), artifact=None)


def run(engine: Engine, prompts: list[list[int]], new_tokens: int = 12) -> list[Collected]:
    """All prompts at once, greedily, with the logprobs of prompt and answer."""
    found = [Collected() for _ in prompts]
    for i, (prompt, collected) in enumerate(zip(prompts, found, strict=True)):
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        engine.submit(str(i), prompt, params, collected)
    while engine.step():
        pass
    engine.stores.pool.check_integrity()
    return found


def prompts_of(*lengths: int) -> list[list[int]]:
    return [tokens(50 + n, n).tolist() for n in lengths]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kernels", ["compiled", "torch"])
def test_the_engine_gives_what_the_cache_gives(family: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, batches and pages against one ``SRFTInt4Cache`` a prompt."""
    if kernels == "torch":
        for module in (paged, compiled):
            monkeypatch.setattr(module, "cpu_kernels", lambda: None)
    prompts = prompts_of(5, 100, 150)
    engine = engine_on(MODELS[family]())
    assert engine.backend.name == {"compiled": "srft cpu", "torch": "srft torch"}[kernels]
    ours = run(engine, prompts)
    model = MODELS[family]()
    use_packed_attention(model)
    for prompt, collected in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt + collected.token_ids])
        cache = SRFTInt4Cache(model.config, paged_config(engine))
        with torch.no_grad():
            logits = model(ids, past_key_values=cache, use_cache=True).logits[0]
        expected = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        assert (collected.logprobs - expected).abs().max() < 2e-3


def paged_config(engine: Engine) -> Any:
    layer = engine.stores.layers[0]
    assert isinstance(layer, SrftLayer)
    return layer.config


def test_chunks_batches_and_prefix_hits_do_not_change_an_answer() -> None:
    prompts = prompts_of(40, 130, 131)
    together = run(engine_on(llama()), prompts)
    engine = engine_on(llama(), max_batched_tokens=23, max_num_seqs=1)
    for prompt, expected in zip(prompts, together, strict=True):
        for _ in range(2):  # the second time from the prefix cache
            collected = Collected()
            params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
            engine.submit("one", prompt, params, collected)
            while engine.step():
                pass
            assert collected.token_ids == expected.token_ids
    assert engine.stats().prefix_hit_tokens >= 32 + 128 + 128


def test_requests_that_do_not_fit_together_take_turns() -> None:
    page = engine_on(llama()).stores.sizes.page
    prompts = prompts_of(200, 201, 202, 203)
    tight = engine_on(llama(), kv_cache_memory=40 * page)
    expected = run(engine_on(llama()), prompts, 40)
    assert [c.token_ids for c in run(tight, prompts, 40)] == [c.token_ids for c in expected]


def test_bytes_a_token_are_those_of_the_tensors() -> None:
    engine = engine_on(llama(64), kv_cache_memory=1 << 20, kv_cache_dtype="srft_int4")
    stats = engine.stats()
    layers = engine.stores.layers
    held = sum(t.nbytes for layer in layers for side in (layer.k, layer.v) for t in side)  # type: ignore[union-attr]
    assert held == stats.quantized.bytes <= 1 << 20
    assert stats.windows.bytes == 0
    plain = sum(2 * 2 * layer.k.codes.shape[1] * 64 for layer in layers)  # type: ignore[union-attr]
    assert plain / stats.bytes_per_token == pytest.approx(32 / 9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink": 4}, "keeps no unquantized tokens"),
        ({"recent": 32}, "keeps no unquantized tokens"),
        ({"artifact": "hadamard"}, "reads no artifact"),
        ({"device": "cuda"}, "Apple GPUs and CPUs"),
    ],
)
def test_refused_at_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**{"kv_cache_dtype": "srft_int4", **options})


def test_a_head_that_groups_do_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="must divide the head size 40"):
        engine_on(llama(40))

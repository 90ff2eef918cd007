"""SRFTInt4Cache in whole models, on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from oscar_serving.codec.srft_int4 import SrftConfig
from oscar_serving.config import ConfigError
from oscar_serving.engines.apple import SRFTInt4Cache, calibrate, use_packed_attention
from tests.apple.tiny import gemma, llama, tokens

K8V8 = SrftConfig(k_bits=8, v_bits=8, group_size=16)
MODELS: dict[str, Callable[[], PreTrainedModel]] = {"llama": llama, "gemma": gemma}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = MODELS[request.param]()
    use_packed_attention(made)
    return made


@torch.no_grad()
def logits(
    model: PreTrainedModel, ids: torch.Tensor, cache: object, pieces: tuple[int, ...] | None = None
) -> torch.Tensor:
    """Logits of all tokens, fed in pieces of these lengths."""
    parts = ids.split(list(pieces), dim=1) if pieces else (ids,)
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], 1)


def drift(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean KL divergence in nats."""
    a, e = actual.double().log_softmax(-1), expected.double().log_softmax(-1)
    return float((e.exp() * (e - a)).sum(-1).mean())


def test_follows_the_exact_model_the_closer_the_more_bits(model: PreTrainedModel) -> None:
    ids = tokens(1, 2, 90)
    exact = logits(model, ids, DynamicCache(config=model.config))
    drifts = [
        drift(logits(model, ids, SRFTInt4Cache(model.config, config)), exact)
        for config in (SrftConfig(), SrftConfig(k_bits=8), K8V8)
    ]
    assert drifts[2] < 1e-3
    assert 10 * drifts[2] < drifts[1] < drifts[0] < 0.5


def test_the_result_does_not_depend_on_how_the_prompt_is_cut(model: PreTrainedModel) -> None:
    ids = tokens(2, 2, 120)
    whole = logits(model, ids, SRFTInt4Cache(model.config, K8V8))
    for pieces in ((119, 1), (1,) * 120, (50, 3, 67), (23, 24, 25, 48)):
        assert drift(logits(model, ids, SRFTInt4Cache(model.config, K8V8), pieces), whole) < 1e-5


def test_generate_with_a_padded_batch_equals_each_prompt_alone(model: PreTrainedModel) -> None:
    short, long = tokens(3, 1, 11), tokens(4, 1, 40)
    padded = torch.cat([torch.cat([torch.zeros(1, 29, dtype=torch.long), short], 1), long])
    options = {"max_new_tokens": 12, "do_sample": False}
    both = model.generate(
        padded, attention_mask=(padded != 0).long(), past_key_values=SRFTInt4Cache(model.config, K8V8), **options
    )
    for row, prompt in enumerate((short, long)):
        alone = model.generate(prompt, past_key_values=SRFTInt4Cache(model.config, K8V8), **options)
        assert both[row, 40:].tolist() == alone[0, prompt.shape[1] :].tolist()


def test_generate_agrees_with_the_exact_cache(model: PreTrainedModel) -> None:
    ids = tokens(5, 1, 30)
    exact = model.generate(ids, max_new_tokens=8, do_sample=False)
    ours = model.generate(ids, past_key_values=SRFTInt4Cache(model.config, K8V8), max_new_tokens=8, do_sample=False)
    assert ours.tolist() == exact.tolist()


def test_beam_search_reorders_packed_rows(model: PreTrainedModel) -> None:
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 3}
    ids = tokens(6, 2, 20)
    ours = model.generate(ids, past_key_values=SRFTInt4Cache(model.config, K8V8), **options)
    assert ours.tolist() == model.generate(ids, **options).tolist()


@pytest.mark.parametrize("length", [15, 60])
def test_crop_takes_the_last_tokens_back(model: PreTrainedModel, length: int) -> None:
    ids, other = tokens(7, 1, length), tokens(8, 1, 6)
    cache = SRFTInt4Cache(model.config, K8V8)
    logits(model, ids, cache)
    logits(model, other[:, :5], cache)
    cache.crop(-5)
    assert cache.get_seq_length() == length
    again = logits(model, other, cache)
    straight = logits(model, torch.cat([ids, other], 1), SRFTInt4Cache(model.config, K8V8))[:, length:]
    assert drift(again, straight) < 1e-6


def test_select_repeat_and_reset(model: PreTrainedModel) -> None:
    ids, follow = tokens(9, 3, 40), tokens(10, 2, 1)
    cache = SRFTInt4Cache(model.config, K8V8)
    logits(model, ids, cache)
    cache.batch_select_indices(torch.tensor([2]))
    cache.batch_repeat_interleave(2)
    selected = logits(model, follow, cache)
    direct = SRFTInt4Cache(model.config, K8V8)
    logits(model, ids[[2, 2]], direct)
    assert drift(selected, logits(model, follow, direct)) < 1e-9
    cache.reset()
    assert cache.get_seq_length() == 0
    assert drift(logits(model, ids, cache), logits(model, ids, SRFTInt4Cache(model.config, K8V8))) < 1e-9


@pytest.mark.parametrize(("config", "ratio"), [(SrftConfig(group_size=16), 3.2), (SrftConfig(group_size=32), 32 / 9)])
def test_stored_bytes_counted_on_the_buffers(config: SrftConfig, ratio: float) -> None:
    model = llama()
    cache = SRFTInt4Cache.for_model(model, config)
    logits(model, tokens(11, 2, 300), cache)
    size = cache.bytes()
    assert size.float16 / size.live == pytest.approx(ratio)
    assert size.allocated == size.live  # a prompt gets the rows it needs
    logits(model, tokens(12, 2, 1), cache)
    assert cache.bytes().allocated <= 2.1 * size.live


def test_a_sliding_layer_holds_its_window_only() -> None:
    model = gemma(window=24)
    cache = SRFTInt4Cache.for_model(model)
    ids = tokens(13, 1, 700)
    logits(model, ids, cache, (1,) * 700)
    sliding, full = cache.layers[0], cache.layers[3]
    assert full.end - full.start == 700
    assert sliding.end - sliding.start == 24
    assert sliding.k.codes.shape[2] <= 2 * 24 + 256
    assert cache.get_mask_sizes(1, 0) == (24, 677)


def test_max_tokens_allocates_once() -> None:
    model = llama()
    cache = SRFTInt4Cache.for_model(model, max_tokens=600)
    logits(model, tokens(14, 1, 10), cache)
    before = cache.layers[0].k.codes.data_ptr()
    logits(model, tokens(15, 1, 590), cache, (295, 295))
    assert cache.layers[0].k.codes.data_ptr() == before


def test_calibrated_factors_help_where_channels_differ() -> None:
    model = llama()
    with torch.no_grad():  # make a few K channels of every head loud
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight[::16] *= 8
    config = SrftConfig(rotation="none")
    factors = calibrate(model, tokens(16, 2, 200), config)
    use_packed_attention(model)
    ids = tokens(17, 2, 200)
    exact = logits(model, ids, DynamicCache(config=model.config))
    plain, calibrated = (
        drift(logits(model, ids, SRFTInt4Cache(model.config, config, f)), exact) for f in (None, factors)
    )
    assert calibrated < plain


def test_refusals() -> None:
    model = llama()
    with pytest.raises(AttributeError, match="use_packed_attention"):
        logits(model, tokens(18, 1, 4), SRFTInt4Cache(model.config))
    use_packed_attention(model)
    with pytest.raises(ConfigError, match="factors of 1 layers"):
        SRFTInt4Cache(model.config, factors=[(torch.ones(2, 32), torch.ones(2, 32))])
    cache = SRFTInt4Cache(model.config)
    logits(model, tokens(19, 2, 4), cache)
    with pytest.raises(ValueError, match="reset"):
        logits(model, tokens(19, 3, 4), cache)
    with pytest.raises(ValueError, match="holds 4 tokens"):
        cache.crop(-5)
    with pytest.raises(ConfigError, match="must divide the head size"):
        logits(llama_48(), tokens(20, 1, 4), SRFTInt4Cache(llama_48().config))
    windowed = gemma()
    cache = SRFTInt4Cache.for_model(windowed)
    logits(windowed, tokens(21, 1, 60), cache, (40, 10, 10))
    with pytest.raises(RuntimeError, match="its last call only"):
        cache.crop(-30)


def llama_48() -> PreTrainedModel:
    model = llama(48)
    use_packed_attention(model)
    return model

"""Prefill mode ``rule``: the same result however a prompt was cut, batched, found in the prefix cache or preempted.

The tolerance is that of float32 sums in another order, with INT2 codes between: a code next to a rounding threshold may
fall on the other side. Stated as the mean and the largest difference of a log-probability.
"""

from __future__ import annotations

from typing import Any

import pytest

from oscar_serving import models
from oscar_serving.calibration import Artifact
from oscar_serving.config import OscarConfig
from oscar_serving.engines.hf import Engine, EngineOptions
from oscar_serving.engines.hf.model import LoadedModel

from .helpers import Collected, finish, make_engine, prompt_of, run, submit

MEAN_TOLERANCE = 1e-3
LARGEST_TOLERANCE = 2e-2
OPTIONS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "logprobs": 0}


def assert_equal(got: Collected, expected: Collected) -> None:
    """Equal tokens, and log-probabilities within the tolerance (of those that both have)."""
    assert got.token_ids == expected.token_ids
    count = min(len(got.logprobs), len(expected.logprobs))
    difference = (got.logprobs[-count:] - expected.logprobs[-count:]).abs()
    assert difference.mean() <= MEAN_TOLERANCE
    assert difference.max() <= LARGEST_TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("chunk", [16, 100, 512])
def test_chunks(family: str, chunk: int) -> None:
    prompt = prompt_of(300)
    (expected,) = run(make_engine(family, max_batched_tokens=64), [prompt], **OPTIONS, prompt_logprobs=0)
    (got,) = run(make_engine(family, max_batched_tokens=chunk, max_num_seqs=8), [prompt], **OPTIONS, prompt_logprobs=0)
    assert_equal(got, expected)


def test_alone_or_in_a_batch_of_eight() -> None:
    prompts = [prompt_of(100 + 37 * i, seed=i) for i in range(8)]
    together = run(make_engine(), prompts, **OPTIONS, prompt_logprobs=0)
    for prompt, got in zip(prompts, together, strict=True):
        assert_equal(got, run(make_engine(), [prompt], **OPTIONS, prompt_logprobs=0)[0])


@pytest.mark.parametrize("shared", [16, 40, 200, 299, 300])
def test_cold_or_on_a_prefix_hit(shared: int) -> None:
    prompt = prompt_of(300)
    (cold,) = run(make_engine(), [prompt], **OPTIONS)
    engine = make_engine()
    other = prompt[:shared] + prompt_of(60, seed=9)
    run(engine, [other], max_tokens=1)
    run(engine, [prompt], max_tokens=1)  # where the two depart is known from now on
    warm = submit(engine, "warm", prompt, **OPTIONS)
    finish(engine)
    assert warm.last.cached_tokens >= 288
    assert_equal(warm, cold)
    again = submit(engine, "other", other, **OPTIONS)
    finish(engine)
    assert again.last.cached_tokens >= shared // 16 * 16
    assert_equal(again, run(make_engine(), [other], **OPTIONS)[0])
    assert engine.stats().prefix_hit_tokens == engine.stats().cached_prompt_tokens > 288


def test_the_next_turn_finds_the_previous_answer() -> None:
    engine = make_engine()
    prompt = prompt_of(100)
    (first,) = run(engine, [prompt], max_tokens=50, ignore_eos=True)
    conversation = prompt + first.token_ids + prompt_of(30, seed=5)
    second = submit(engine, "second", conversation, **OPTIONS)
    finish(engine)
    assert second.last.cached_tokens == 144  # 149 tokens were computed, nine pages of them full
    assert_equal(second, run(make_engine(prefix_caching=False), [conversation], **OPTIONS)[0])


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_before_and_after_preemption(prefix_caching: bool) -> None:
    prompts = [prompt_of(180 + 11 * i, seed=i) for i in range(4)]
    options = OPTIONS | {"max_tokens": 60}
    roomy = make_engine(max_num_seqs=4, prefix_caching=False)
    reference = run(roomy, prompts, **options)
    stores = roomy.stores
    memory = stores.window_pages * stores.sizes.window_page + 42 * stores.sizes.page
    tight = make_engine(max_num_seqs=4, prefix_caching=prefix_caching, kv_cache_memory=memory)
    crowded = run(tight, prompts, **options)
    assert tight.stats().preemptions > 0
    for got, expected in zip(crowded, reference, strict=True):
        assert_equal(got, expected)


def test_a_preempted_scoring_request_scores_each_position_once() -> None:
    prompts = [prompt_of(180 + 11 * i, seed=i) for i in range(4)]
    options: dict[str, Any] = {"max_tokens": 70, "ignore_eos": True, "logprobs": 0, "prompt_logprobs": 0}
    roomy = make_engine(max_num_seqs=4, prefix_caching=False)
    reference = run(roomy, prompts, **options)
    stores = roomy.stores
    memory = stores.window_pages * stores.sizes.window_page + 42 * stores.sizes.page
    tight = make_engine(max_num_seqs=4, kv_cache_memory=memory)
    crowded = run(tight, prompts, **options)
    assert tight.stats().preemptions > 0
    for prompt, got, expected in zip(prompts, crowded, reference, strict=True):
        assert len(got.logprobs) == len(prompt) - 1 + 70
        assert_equal(got, expected)


def test_raw_mode_does_depend_on_the_chunks() -> None:
    """The tests above can fail: in mode ``raw`` the same comparison does."""
    results = [
        run(make_engine(prefill_mode="raw", max_batched_tokens=chunk), [prompt_of(300)], **OPTIONS)[0]
        for chunk in (64, 512)
    ]
    with pytest.raises(AssertionError):
        assert_equal(results[0], results[1])


@pytest.fixture(scope="module")
def smollm2() -> tuple[LoadedModel, Any, list[int]]:
    """SmolLM2 in float32 with its tokenizer, and a text of 960 tokens."""
    path = models.get_model("smollm2")
    engine = Engine.load(path, EngineOptions(artifact="hadamard", dtype="float32", kv_cache_memory=512 << 20))
    text = "\n".join(
        f"{n}. The square of {n} is {n * n}, its cube {n**3}; {n} hens laid {7 * n % 31} eggs." for n in range(1, 60)
    )
    return engine.loaded, engine.tokenizer, engine.tokenizer(text)["input_ids"][:960]


@pytest.mark.model
@pytest.mark.slow
def test_smollm2(smollm2: tuple[LoadedModel, Any, list[int]]) -> None:
    loaded, tokenizer, tokens = smollm2
    assert len(tokens) == 960
    options = OPTIONS | {"max_tokens": 8}

    def engine(**settings: Any) -> Engine:
        artifact = Artifact.plain(loaded.config, config=OscarConfig(scale_dtype="float16"))
        settings = {"prefill_mode": "rule", "kv_cache_memory": 512 << 20} | settings
        return Engine(loaded, tokenizer, EngineOptions(**settings), artifact=artifact)

    whole = engine(max_batched_tokens=1024)
    (expected,) = run(whole, [tokens], **options)
    warm = submit(whole, "warm", tokens, **options)
    finish(whole)
    assert warm.last.cached_tokens == 928
    assert_equal(warm, expected)
    (got,) = run(engine(max_batched_tokens=128), [tokens], **options)
    assert_equal(got, expected)
    batch = [tokens, *(tokens[i : i + 25 * i] for i in range(1, 8))]  # in chunks of 512
    assert_equal(run(engine(), batch, **options)[0], expected)

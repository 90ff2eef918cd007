"""What a request can ask for, and what it is told: stops, text, seeds, log-probabilities, refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from oscar_serving.config import ConfigError
from oscar_serving.engines.hf import Engine, EngineOptions, RequestError, SamplingParams

from .helpers import finish, make_engine, model_of, prompt_of, run, submit
from .tiny import EOS


@pytest.fixture
def engine() -> Engine:
    return make_engine()


def forced(text: str | bytes, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, then_eos: bool = False) -> None:
    """Make the model's head give ``text`` byte by byte, whatever the state of the request, restarting with each one."""
    data = list(text.encode() if isinstance(text, str) else text) + ([EOS] if then_eos else [])
    original = engine.core._runner.forward

    def forward(chunks: Any, pool: Any, rows: list[int]) -> torch.Tensor:
        logits = original(chunks, pool, rows).clone()
        at = [c.sequence.generated for c in chunks if c.samples]
        for row, generated in zip(range(len(rows))[-len(at) :] if at else (), at, strict=True):
            logits[row] = 0.0
            logits[row, data[generated]] = 50.0
        return logits

    monkeypatch.setattr(engine.core._runner, "forward", forward)


def test_text_and_end_of_sequence(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forced("naïve 😀 end", engine, monkeypatch, then_eos=True)
    (result,) = run(engine, [prompt_of(20)], max_tokens=100)
    assert result.text == "naïve 😀 end"
    assert "\ufffd" not in "".join(output.text for output in result.outputs)
    assert result.token_ids == [*"naïve 😀 end".encode(), EOS]
    assert (result.last.finish_reason, result.last.stop_reason) == ("stop", None)
    assert [output.finish_reason for output in result.outputs[:-1]] == [None] * (len(result.outputs) - 1)
    assert {output.prompt_tokens for output in result.outputs} == {20}


def test_ignore_eos(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"ab"
    forced(data, engine, monkeypatch, then_eos=True)
    result = submit(engine, "a", prompt_of(5), max_tokens=3, ignore_eos=True)
    finish(engine)
    assert (result.last.finish_reason, result.text) == ("length", "ab")


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (("end",), "naive 😀 ", "end"),
        (("zzz", "e 😀"), "naiv", "e 😀"),
        (("end!",), "naive 😀 end", None),  # what was held back is released
        (("n", "na"), "", "na"),
    ],
)
def test_stop_strings(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, stop: tuple[str, ...], text: str, reason: str | None
) -> None:
    forced("naive 😀 end", engine, monkeypatch, then_eos=True)
    (result,) = run(engine, [prompt_of(20)], max_tokens=100, stop=stop)
    assert (result.text, result.last.finish_reason) == (text, "stop")
    assert result.last.stop_reason == (reason if reason != "na" else "n")


def test_stop_text_goes_out_as_early_as_it_can(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forced("abcabd", engine, monkeypatch)
    (result,) = run(engine, [prompt_of(20)], max_tokens=6, stop=("abd",))
    assert [output.text for output in result.outputs] == ["", "", "abc", "", "", ""]
    assert result.token_ids == list(b"abcabd")


def test_stop_token_ids(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forced("abc", engine, monkeypatch)
    (result,) = run(engine, [prompt_of(20)], max_tokens=3, stop_token_ids=(ord("b"),))
    assert (result.token_ids, result.text) == ([97, 98], "ab")
    assert (result.last.finish_reason, result.last.stop_reason) == ("stop", ord("b"))


def test_a_seed_gives_the_same_alone_and_in_a_batch() -> None:
    prompts = [prompt_of(30 + i, seed=i) for i in range(5)]
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "max_tokens": 12, "ignore_eos": True}
    alone = []
    for i, prompt in enumerate(prompts):
        (result,) = run(make_engine(), [prompt], seed=i, **options)
        alone.append(result.token_ids)
    engine = make_engine()
    together = [submit(engine, str(i), prompt, seed=i, **options) for i, prompt in enumerate(prompts)]
    finish(engine)
    assert [result.token_ids for result in together] == alone


def test_without_a_seed_requests_differ_and_the_engines_seed_repeats_them() -> None:
    def texts(seed: int) -> list[list[int]]:
        engine = make_engine(seed=seed)
        results = run(engine, [prompt_of(30)] * 3, temperature=1.0, max_tokens=10, ignore_eos=True)
        return [result.token_ids for result in results]

    first = texts(0)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert texts(0) == first
    assert texts(1) != first


def test_the_same_prompt_many_times_is_computed_once() -> None:
    prompt = prompt_of(200)
    (alone,) = run(make_engine(), [prompt], temperature=1.0, seed=2, ignore_eos=True)
    engine = make_engine(max_batched_tokens=150)
    results = [submit(engine, str(i), prompt, temperature=1.0, seed=i, ignore_eos=True) for i in range(4)]
    finish(engine)
    assert [result.last.cached_tokens for result in results] == [0, 192, 192, 192]
    assert results[2].token_ids == alone.token_ids
    different = [submit(engine, str(i), prompt_of(70, seed=i), max_tokens=1) for i in (5, 6)]
    engine.step()
    assert all(result.done for result in different)  # others do not wait


def test_logprobs_of_prompt_and_output(engine: Engine) -> None:
    prompt = prompt_of(150)
    (result,) = run(engine, [prompt], max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True, temperature=0.7)
    first = result.outputs[0]
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert len(first.prompt_logprobs) == len(prompt)
    for token, entry in zip(prompt[1:], first.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert (entry.token_id, len(entry.top)) == (token, 2)
        assert entry.logprob <= entry.top[0][1]
        assert entry.token_id != entry.top[0][0] or entry.logprob == entry.top[0][1]
    for output in result.outputs:
        assert output.logprobs is not None
        (entry,) = output.logprobs
        assert [entry.token_id] == output.token_ids
        assert len(entry.top) == 3
    assert all(output.prompt_logprobs is None for output in result.outputs[1:])


def test_scoring_a_prompt_without_generating(engine: Engine) -> None:
    prompt = prompt_of(150)
    (result,) = run(engine, [prompt], max_tokens=0, prompt_logprobs=0, logprobs=1)
    assert len(result.outputs) == 1
    assert (result.token_ids, result.text, result.last.finish_reason) == ([], "", "length")
    assert result.last.logprobs == []
    assert len(result.last.prompt_logprobs or ()) == 150
    (again,) = run(engine, [prompt], max_tokens=0, prompt_logprobs=0)  # the prompt is in the prefix cache by now
    assert torch.equal(again.logprobs, result.logprobs)


def test_penalties_reach_the_request(engine: Engine) -> None:
    (plain,) = run(engine, [prompt_of(40)], max_tokens=6, ignore_eos=True)
    (banned,) = run(engine, [prompt_of(40)], max_tokens=6, ignore_eos=True, logit_bias={plain.token_ids[0]: -100.0})
    assert banned.token_ids[0] != plain.token_ids[0]
    (never_twice,) = run(engine, [prompt_of(40)], max_tokens=60, ignore_eos=True, repetition_penalty=1e6)
    assert len(set(never_twice.token_ids)) == 60


@pytest.mark.parametrize(
    ("prompt", "params", "code", "message"),
    [
        ([], {}, "empty_prompt", "empty"),
        ([1, 2, 257], {}, "invalid_token", "257"),
        ([1, -1], {}, "invalid_token", "-1"),
        ([1] * 513, {}, "context_length_exceeded", "512 tokens, the prompt has 513"),
        ([1] * 512, {"max_tokens": None}, "context_length_exceeded", "512"),
        ([1] * 500, {"max_tokens": 13}, "context_length_exceeded", "500 and 13 for the output"),
        ([1], {"stop_token_ids": (300,)}, "invalid_parameter", "stop_token_ids"),
        ([1], {"logit_bias": {257: 1.0}}, "invalid_parameter", "logit_bias"),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    engine: Engine, prompt: list[int], params: dict[str, Any], code: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        submit(engine, "a", prompt, **params)
    assert caught.value.code == code
    assert engine.stats().waiting == 0
    assert not engine.step()


def test_the_context_can_be_filled_to_the_last_token(engine: Engine) -> None:
    full, rest, scored = (
        submit(engine, "a", [1] * 500, max_tokens=12, ignore_eos=True),
        submit(engine, "b", [1] * 510, max_tokens=None, ignore_eos=True),
        submit(engine, "c", [1] * 512, max_tokens=0, prompt_logprobs=0),
    )
    finish(engine)
    assert [len(r.token_ids) for r in (full, rest, scored)] == [12, 2, 0]
    assert {r.last.finish_reason for r in (full, rest, scored)} == {"length"}


def test_an_id_in_use_and_a_full_queue_are_refused() -> None:
    engine = make_engine(max_num_seqs=1, max_waiting=2)
    results = [submit(engine, str(i), [1, 2, 3]) for i in range(3)]
    with pytest.raises(RequestError) as caught:
        submit(engine, "3", [1, 2, 3])
    assert caught.value.code == "queue_full"
    finish(engine)
    assert all(r.done for r in results)
    submit(engine, "0", [1])  # ended, so its id is free again
    with pytest.raises(RequestError) as caught:
        submit(engine, "0", [1])
    assert caught.value.code == "duplicate_request"
    finish(engine)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"device": "tpu"}, "device"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 64, "max_batched_tokens": 32}, "max_batched_tokens"),
        ({"kv_cache_memory": "1GiB"}, "kv_cache_memory"),
        ({"page_size": 40}, "page_size"),
        ({"sink": 2**31}, "sink"),
        ({"recent": 0}, "recent"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineOptions(**options)


@pytest.mark.parametrize("dtype", ["oscar_int2", "bf16"])
def test_too_little_memory_says_what_would_do(dtype: str) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory=0\.1 MiB") as caught:
        make_engine(kv_cache_memory=100_000, kv_cache_dtype=dtype)
    assert "\n" not in str(caught.value)
    (asked,) = re.findall(r"give ([\d.]+) MiB" if dtype != "bf16" else r"takes ([\d.]+) MiB", str(caught.value))
    engine = make_engine(kv_cache_memory=int((float(asked) + 0.05) * 2**20), kv_cache_dtype=dtype)
    (result,) = run(engine, [prompt_of(500)], max_tokens=12, ignore_eos=True)
    assert result.last.finish_reason == "length"


def test_memory_is_what_was_given() -> None:
    for dtype in ("oscar_int2", "bf16"):
        engine = make_engine(kv_cache_memory=5 << 20, kv_cache_dtype=dtype)
        tensors = sum(t.nbytes for cache in engine.stores.layers for t in (cache.pages, cache.windows))
        stats = engine.stats()
        assert 0.98 * (5 << 20) <= stats.quantized.bytes + stats.windows.bytes <= 5 << 20
        slack = sum(cache.pages.nbytes for cache in engine.stores.layers) if dtype == "bf16" else 0
        assert tensors - slack == stats.quantized.bytes + stats.windows.bytes


def test_stats_count(engine: Engine) -> None:
    run(engine, [prompt_of(100)], max_tokens=5, ignore_eos=True)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.requests_finished) == (100, 5, 1)
    submit(engine, "a", prompt_of(100, seed=3), max_tokens=50, ignore_eos=True)
    for _ in range(5):
        engine.step()
    stats = engine.stats()
    assert stats.running == 1
    assert stats.quantized.used == 7  # 103 tokens, the last of them in its page
    assert stats.cache_usage == 7 / stats.quantized.total
    assert stats.bf16_bytes - stats.cached_bytes == stats.saved_bytes
    finish(engine)


def test_warmup_runs_and_is_not_counted() -> None:
    engine = make_engine()
    engine.warmup()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.requests_finished) == (0, 0, 0)
    assert model_of("llama") is not None


def test_params_are_frozen() -> None:
    params = SamplingParams(stop="x")  # type: ignore[arg-type]
    assert params.stop == ("x",)
    assert params.with_(seed=3).seed == 3

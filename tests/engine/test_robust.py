"""Load, aborts, failures, threads: nothing is lost and the pool stays as it should be."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from oscar_serving.attention.torch_backend import TorchBackend
from oscar_serving.engines.hf import Engine, RequestError, RequestOutput, SamplingParams

from .helpers import Collected, assert_clean, finish, make_engine, model_of, prompt_of, run, submit


def small_pool(**options: Any) -> Engine:
    """Room for little more than one request of full length."""
    options = {"max_num_seqs": 6, "prefix_caching": False} | options
    stores = make_engine(**options).stores
    memory = stores.window_pages * stores.sizes.window_page + 45 * stores.sizes.page
    engine = make_engine(**options, kv_cache_memory=memory)
    assert engine.max_model_len <= engine.stores.capacity_tokens < 1.5 * engine.max_model_len
    return engine


def test_fifty_long_requests_on_a_tiny_pool_are_all_right() -> None:
    prompts = [prompt_of(40 + 3 * i, seed=i) for i in range(50)]
    options: dict[str, Any] = {"max_tokens": 50, "ignore_eos": True, "logprobs": 0}
    expected = [run(make_engine(), [prompt], **options)[0] for prompt in prompts[::7]]
    engine = small_pool()
    results = run(engine, prompts, **options)
    assert engine.stats().preemptions >= 5
    assert all(len(result.token_ids) == 50 for result in results)
    for alone, crowded in zip(expected, results[::7], strict=True):
        assert alone.token_ids == crowded.token_ids
        assert (alone.logprobs - crowded.logprobs).abs().mean() < 1e-3


def test_first_come_first_served_and_nobody_starves() -> None:
    engine = small_pool(max_num_seqs=3)
    order: list[str] = []
    for i in range(12):

        def note(output: RequestOutput) -> None:
            if output.finish_reason is not None:
                order.append(output.request_id)

        engine.submit(f"{i:02}", prompt_of(300, seed=i), SamplingParams(temperature=0.0, max_tokens=5), note)
    finish(engine)
    assert order == sorted(order)


def test_the_youngest_is_preempted_and_comes_back_in_its_place() -> None:
    engine = small_pool(max_num_seqs=4)
    results = [submit(engine, str(i), prompt_of(150, seed=i), max_tokens=150, ignore_eos=True) for i in range(4)]
    scheduler, preemptions = engine.core.scheduler, 0
    while engine.step():
        if scheduler.preemptions > preemptions and scheduler.waiting:
            preemptions = scheduler.preemptions
            assert max(s.arrival for s in scheduler.running) < min(s.arrival for s in scheduler.waiting)
            assert [s.arrival for s in scheduler.waiting] == sorted(s.arrival for s in scheduler.waiting)
    assert preemptions > 0
    assert [len(result.token_ids) for result in results] == [150] * 4


def test_long_chunks_end_where_blocks_of_queries_do() -> None:
    engine = make_engine(max_batched_tokens=150)
    submit(engine, "a", prompt_of(400), max_tokens=1)
    ends = []
    while engine.step():
        ends += [sequence.computed for sequence in engine.core.scheduler.running]
    assert ends == [128, 256]  # and the rest at once


def test_prefill_is_mixed_with_decoding() -> None:
    engine = make_engine(max_batched_tokens=32)
    first = submit(engine, "first", prompt_of(20), max_tokens=30, ignore_eos=True)
    engine.step()
    long = submit(engine, "long", prompt_of(300), max_tokens=2, ignore_eos=True)
    steps = 0
    while not long.outputs:
        before = len(first.token_ids)
        engine.step()
        steps += 1
        assert len(first.token_ids) == before + 1  # a long prompt does not stop the others
    assert steps == 10  # 31 tokens of the prompt a step
    finish(engine)


@pytest.mark.parametrize("seed", range(3))
def test_abort_storm_leaves_the_pool_clean(seed: int) -> None:
    draw = random.Random(seed)
    engine = small_pool()
    live: dict[str, Collected] = {}
    for i in range(80):
        if draw.random() < 0.6:
            live[str(i)] = submit(engine, str(i), prompt_of(draw.randint(1, 300), seed=i), max_tokens=20)
        for _ in range(draw.randint(0, 3)):
            engine.step()
        engine.stores.pool.check_integrity()
        for name in draw.sample(sorted(live), min(len(live), draw.randint(0, 2))):
            engine.abort(name)
        engine.abort("never heard of")
    finish(engine)
    assert all(result.done for result in live.values())
    assert {"abort", "length"} <= {result.last.finish_reason for result in live.values()} <= {"abort", "length", "stop"}


def test_a_failing_step_fails_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(max_num_seqs=2)
    attend, calls = engine.backend.attend, 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise RuntimeError("out of memory\nand luck")
        return attend(*args)

    monkeypatch.setattr(engine.backend, "attend", broken)
    results = [submit(engine, str(i), prompt_of(100, seed=i), max_tokens=10) for i in range(4)]
    finish(engine)
    reasons = [result.last.finish_reason for result in results]
    assert reasons.count("error") in (1, 2)
    assert reasons[2:] == ["length", "length"]
    failed = results[reasons.index("error")].last
    assert failed.error is not None
    assert failed.error.code == "internal_error"
    assert "out of memory and luck" in str(failed.error)
    assert engine.stats().requests_failed == reasons.count("error")
    (after,) = run(engine, [prompt_of(100)])
    assert after.last.finish_reason == "length"


def test_logits_that_are_not_numbers_fail_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    forward = engine.core._runner.forward

    def spoiled(chunks: Any, pool: Any, rows: list[int]) -> Any:
        logits = forward(chunks, pool, rows).clone()
        if len(rows) == 2:
            logits[1] = float("nan")
        return logits

    monkeypatch.setattr(engine.core._runner, "forward", spoiled)
    good, bad = run(engine, [prompt_of(10), prompt_of(12)])
    assert good.last.finish_reason == "length"
    assert bad.last.finish_reason == "error"


@pytest.mark.parametrize("prefill_mode", ["raw", "rule"])
@pytest.mark.parametrize("portable", [False, True])
def test_a_request_that_fails_spoils_no_prefix(
    prefill_mode: str, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token whose embedding is no number: a prompt that begins alike must not find what it left in the cache."""
    weight = model_of("llama").get_input_embeddings().weight
    begin, end = (prompt_of(length, seed=length) for length in (100, 30))
    token = next(t for t in range(200, 256) if t not in begin + end)
    if portable:
        monkeypatch.setattr("oscar_serving.engines.hf.engine.select_backend", lambda _: TorchBackend())
    (expected,) = run(make_engine(prefill_mode=prefill_mode, max_batched_tokens=256), [begin + end])
    monkeypatch.setattr(weight, "data", weight.data.clone())
    weight.data[token] = float("nan")
    engine = make_engine(prefill_mode=prefill_mode, max_batched_tokens=256)
    for _ in range(2):
        (bad,) = run(engine, [[*begin, token, *end]])
        assert bad.last.finish_reason == "error"
        (good,) = run(engine, [begin + end])
        assert good.token_ids == expected.token_ids


def test_a_callback_that_raises_ends_its_request_only() -> None:
    engine = make_engine()

    def on_output(_: RequestOutput) -> None:
        raise ValueError("client gone")

    engine.submit("bad", prompt_of(10), SamplingParams(max_tokens=50), on_output)
    good = submit(engine, "good", prompt_of(10), max_tokens=10)
    finish(engine)
    assert good.last.finish_reason == "length"
    assert engine.stats().generated_tokens < 15


def test_worker_thread_serves_many_submitters_and_drains() -> None:
    engine = make_engine(max_num_seqs=4)
    others = set(threading.enumerate())  # engines of other tests
    engine.start()
    with pytest.raises(RuntimeError, match="already started"):
        engine.start()
    results: list[Collected] = []

    def client(number: int) -> None:
        for i in range(4):
            results.append(submit(engine, f"{number}-{i}", prompt_of(40 + number), max_tokens=6, ignore_eos=True))
            engine.stats()

    clients = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in clients:
        thread.start()
    for thread in clients:
        thread.join()
    engine.shutdown(drain=True, timeout=60)
    assert len(results) == 24
    assert {(r.last.finish_reason, len(r.token_ids)) for r in results} == {("length", 6)}
    assert_clean(engine)
    with pytest.raises(RequestError) as caught:
        submit(engine, "late", [1])
    assert caught.value.code == "shutting_down"
    assert "oscar-engine" not in {thread.name for thread in set(threading.enumerate()) - others}


@pytest.mark.parametrize("started", [True, False])
def test_shutdown_without_drain_aborts(started: bool) -> None:
    engine = make_engine()
    if started:
        engine.start()
    results = [submit(engine, str(i), prompt_of(50), max_tokens=400, ignore_eos=True) for i in range(3)]
    if started:
        while not results[0].outputs:
            time.sleep(0.001)
    engine.shutdown(drain=False, timeout=10)
    assert {result.last.finish_reason for result in results} == {"abort"}
    assert_clean(engine)


def test_shutdown_without_a_worker_drains_too() -> None:
    engine = make_engine()
    result = submit(engine, "a", prompt_of(50), max_tokens=10, ignore_eos=True)
    engine.shutdown(drain=True, timeout=60)
    assert (result.last.finish_reason, len(result.token_ids)) == ("length", 10)
    late = make_engine()
    result = submit(late, "a", prompt_of(50), max_tokens=400, ignore_eos=True)
    late.shutdown(drain=True, timeout=0)
    assert result.last.finish_reason == "abort"


def test_warmup_with_the_worker_running() -> None:
    engine = make_engine()
    engine.start()
    engine.warmup()
    engine.shutdown(drain=True, timeout=10)
    assert_clean(engine)


def test_warmup_reports_a_broken_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(engine.backend, "store", broken)
    with pytest.raises(RuntimeError, match="no such kernel"):
        engine.warmup()

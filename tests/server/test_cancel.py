"""Clients that go away, full queues, failing steps, shutdown."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from oscar_serving.engines.hf import Engine

from .conftest import Served, serve
from .test_errors import error_of

LONG = {"prompt": "tell me everything", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def wait_for(condition: Callable[[], bool]) -> None:
    """Until ``condition`` holds; half a minute is for slow machines."""
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    pytest.fail("it never happened")


def test_stream_left_by_its_client_frees_its_pages(served: Served) -> None:
    before = served.engine.stats().generated_tokens
    with served.client.stream("POST", "/v1/completions", json={**LONG, "stream": True, "n": 2}) as response:
        lines = response.iter_lines()
        next(lines)
        assert served.engine.stats().quantized.used
    served.wait_until_idle()
    assert served.engine.stats().generated_tokens - before < 3000


def test_whole_answer_left_by_its_client_frees_its_pages(served: Served) -> None:
    before = served.engine.stats().generated_tokens
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/v1/completions", json=LONG, timeout=httpx.Timeout(30, read=0.3))
    served.wait_until_idle()
    assert served.engine.stats().generated_tokens - before < 2000


def test_aborted_requests_are_counted(served: Served) -> None:
    def aborted() -> float:
        text = served.client.get("/metrics").text
        return float(text.split('vllm:request_success_total{finished_reason="abort",model_name="tiny"} ')[1].split()[0])

    before = aborted()
    with served.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = response.iter_lines()
        next(lines)
    wait_for(lambda: aborted() == before + 1)


def test_full_queue_says_when_to_come_back(load: Callable[..., Engine]) -> None:
    with serve(load(max_num_seqs=1, max_waiting=1)) as served:
        with served.client.stream("POST", "/v1/completions", json={**LONG, "n": 2, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            refused = served.client.post("/v1/completions", json={"prompt": "x"})
            error = error_of(refused, 429)
            assert error["code"] == "queue_full"
            assert int(refused.headers["retry-after"]) > 0
            assert served.client.get("/health").status_code == 200
        served.wait_until_idle()
        assert served.complete(prompt="x", max_tokens=1)


def test_answers_under_load_equal_those_given_alone(load: Callable[..., Engine]) -> None:
    """A pool that does not hold all that run: some wait, some are preempted, and no answer differs."""
    with serve(load(kv_cache_memory=400_000, prefill_mode="rule")) as served:
        prompts = [f"request number {index}: " * (8 + index % 5) for index in range(12)]

        def ask(prompt: str) -> str:
            return str(served.complete(prompt=prompt, max_tokens=200, ignore_eos=True)["choices"][0]["text"])

        alone = [ask(prompt) for prompt in prompts]
        assert served.engine.stats().preemptions == 0
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(ask, prompts))
        assert together == alone
        assert served.engine.stats().preemptions > 0
        served.wait_until_idle()


def test_failing_step_fails_its_requests_and_the_server_lives(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    with serve(engine) as served:
        with monkeypatch.context() as patch:

            def broken(*args: Any, **kwargs: Any) -> Any:
                raise RuntimeError("out of memory, say")

            patch.setattr(engine.backend, "attend", broken, raising=True)
            error = error_of(served.client.post("/v1/completions", json={"prompt": "x"}), 500)
            assert (error["type"], error["code"]) == ("server_error", "internal_error")
            body = {"prompt": "x", "stream": True}
            with served.client.stream("POST", "/v1/completions", json=body) as response:
                lines = [line for line in response.iter_lines() if line]
            assert '"internal_error"' in lines[-2]
            assert lines[-1] == "data: [DONE]"
        served.wait_until_idle()
        assert served.complete(prompt="x", max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


def test_stop_lets_running_requests_finish(load: Callable[..., Engine]) -> None:
    body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with serve(load()) as served:
            answer = pool.submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=60)
            wait_for(lambda: served.engine.stats().running == 1)
        assert answer.result().json()["usage"]["completion_tokens"] == 300

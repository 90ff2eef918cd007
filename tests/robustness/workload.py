"""A small mixture of requests that goes through every part of the engine, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from oscar_serving.engines.hf import Engine

from ..engine.helpers import Collected, assert_clean, make_engine, prompt_of, submit

SHARED = prompt_of(70, seed=1)
#: Prompts with a history between the windows, one that shares its beginning, and every way to ask for tokens.
REQUESTS = (
    (SHARED, {"logprobs": 1}),
    ([*SHARED[:64], *prompt_of(30, seed=2)], {"stop": ("never said",)}),
    (prompt_of(40, seed=3), {"prompt_logprobs": 2, "logprobs": 0}),
    (
        prompt_of(50, seed=4),
        {
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.01,
            "seed": 5,
            "presence_penalty": 0.5,
            "repetition_penalty": 1.1,
            "logit_bias": {65: 1.0},
        },
    ),
)


@dataclass
class Outcome:
    """What each request got; ``None`` for one that was refused when it was submitted."""

    results: list[Collected | None]

    def failed(self) -> list[int]:
        """Requests that did not end by themselves."""
        return [i for i, result in enumerate(self.results) if result is None or result.last.finish_reason != "length"]

    def check_others(self, expected: Outcome) -> None:
        """Every request ended, those that failed with an error of the server's own, the others with their answer."""
        for result, wanted in zip(self.results, expected.results, strict=True):
            if result is None:
                continue
            assert result.done
            if result.last.finish_reason == "error":
                assert result.last.error is not None
                assert result.last.error.code in ("internal_error", "cache_too_small")
                continue
            assert wanted is not None
            assert result.token_ids == wanted.token_ids
            assert result.text == wanted.text
            assert torch.allclose(result.logprobs, wanted.logprobs, atol=1e-3)


def run_requests(
    engine: Engine, name: str, injected: type[Exception] | tuple[type[Exception], ...] = (), *, tokens: int = 3
) -> Outcome:
    """Run :data:`REQUESTS` together to their end; the pool is checked after every step.

    Parameters
    ----------
    injected
        Errors that :meth:`Engine.submit` may raise.
    tokens
        How many each generates.
    """
    results: list[Collected | None] = []
    for i, (prompt, params) in enumerate(REQUESTS):
        try:
            results.append(submit(engine, f"{name}-{i}", prompt, **{"max_tokens": tokens, "ignore_eos": True} | params))
        except injected:
            results.append(None)
    step_to_the_end(engine)
    return Outcome(results)


def step_to_the_end(engine: Engine, limit: int = 500) -> None:
    """Step until nothing is left; the pool adds up after every step, and nothing is held at the end."""
    for _ in range(limit):
        busy = engine.step()
        engine.stores.pool.check_integrity()
        if not busy:
            break
    else:
        raise AssertionError("the engine does not come to an end")
    assert_clean(engine)
    assert not engine._live


def small_engine() -> Engine:
    """Steps of 48 tokens, so that prompts are cut and mixed with decodes."""
    return make_engine(max_batched_tokens=48, kv_cache_memory=8 << 20)


def crowded_engine() -> Engine:
    """The same with too few pages for all requests at once."""
    options: dict[str, Any] = {"max_batched_tokens": 48, "max_num_seqs": 4, "max_model_len": 128}
    roomy = make_engine(**options, prefix_caching=False).stores
    memory = roomy.window_pages * roomy.sizes.window_page + 11 * roomy.sizes.page
    return make_engine(**options, kv_cache_memory=memory)

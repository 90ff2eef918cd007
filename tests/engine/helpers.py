"""Engines over tiny models, and requests run to their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oscar_serving.calibration import Artifact
from oscar_serving.config import OscarConfig
from oscar_serving.engines.hf import Engine, EngineOptions, RequestOutput, SamplingParams
from oscar_serving.engines.hf.model import prepare_model

from .tiny import byte_tokenizer, tiny_model

#: Windows short enough that tiny prompts have a history between them.
SMALL_WINDOWS = {"sink": 8, "recent": 24, "page_size": 16, "window_dtype": "float32"}


@cache
def model_of(family: str, seed: int = 0) -> Any:
    """A tiny model, made once."""
    return tiny_model(family, seed=seed)


def make_engine(family: str = "llama", config: dict[str, Any] | None = None, **options: Any) -> Engine:
    """A Hadamard-rotated engine over a tiny float32 model, 64 MiB of cache, contexts of 512 tokens."""
    model = model_of(family)
    prefill_mode = options.pop("prefill_mode", "rule")
    max_model_len = options.pop("max_model_len", 512)
    layers = options.pop("artifact_layers", None)
    settings = {"max_num_seqs": 8, "max_batched_tokens": 64, "kv_cache_memory": 64 << 20} | options
    artifact = Artifact.plain(model.config, config=OscarConfig(**(SMALL_WINDOWS if config is None else config)))
    if layers is not None:
        artifact = replace(artifact, layers=layers)
    return Engine(
        prepare_model(model, max_model_len=max_model_len),
        byte_tokenizer(),
        EngineOptions(prefill_mode=prefill_mode, **settings),
        artifact=None if options.get("kv_cache_dtype") == "bf16" else artifact,
        model_id=family,
    )


@dataclass
class Collected:
    """All outputs of one request put together."""

    outputs: list[RequestOutput] = field(default_factory=list)

    def __call__(self, output: RequestOutput) -> None:
        assert not self.done, "an output after the last one"
        self.outputs.append(output)

    @property
    def done(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def last(self) -> RequestOutput:
        return self.outputs[-1]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def token_ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def logprobs(self) -> Tensor:
        """Of prompt and output tokens, as far as they were asked for."""
        prompt = [entry for output in self.outputs for entry in output.prompt_logprobs or () if entry is not None]
        sampled = [entry for output in self.outputs for entry in output.logprobs or ()]
        return torch.tensor([entry.logprob for entry in (*prompt, *sampled)])


def submit(engine: Engine, name: str, prompt: Sequence[int], **params: Any) -> Collected:
    """Queue a request, greedy unless said otherwise."""
    collected = Collected()
    engine.submit(name, list(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": 8} | params), collected)
    return collected


def run(engine: Engine, prompts: Sequence[Sequence[int]], **params: Any) -> list[Collected]:
    """Run requests together to their end, and check that the pool is as it should be."""
    results = [submit(engine, f"request-{i}", prompt, **params) for i, prompt in enumerate(prompts)]
    finish(engine)
    assert all(result.done for result in results)
    return results


def finish(engine: Engine, limit: int = 20_000) -> None:
    """Step until nothing is left."""
    for _ in range(limit):
        if not engine.step():
            break
    else:
        raise AssertionError("the engine does not come to an end")
    assert_clean(engine)


def assert_clean(engine: Engine) -> None:
    """No request holds a page."""
    engine.stores.pool.check_integrity()
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.quantized.used, stats.windows.used) == (0, 0)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A random prompt of bytes."""
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

"""Decode and prefill of the embedded engine beside transformers' own BF16 cache, on this machine's CPU.

    python -m benchmarks.embedded_decode [--model smollm2] [--contexts 4096 8064] [--threads 2]

The two take turns, token by token, so that what else the machine does slows both; the medians are compared. The
baseline is the same model in BF16 with ``DynamicCache`` and SDPA, prefilled in the same chunks.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.result import RESULTS, write_result
from oscar_serving import models
from oscar_serving.engines.hf import Engine, EngineOptions, RequestOutput, SamplingParams

CHUNK = 512
WARM_STEPS = 4
#: Ours / baseline, time a token: not slower; and what we aim at.
MUST, AIM = 1.0, 0.7


class Baseline:
    """The model with ``DynamicCache``, one sequence."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        self._cache: Any = None
        self._next = torch.zeros(1, 1, dtype=torch.long)

    def prefill(self, prompt: list[int]) -> None:
        """Fill a new cache."""
        self._cache = DynamicCache(config=self._model.config)
        for start in range(0, len(prompt), CHUNK):
            self._run(torch.tensor([prompt[start : start + CHUNK]]))

    def decode(self) -> None:
        """One token."""
        self._run(self._next)

    @torch.inference_mode()
    def _run(self, tokens: torch.Tensor) -> None:
        logits = self._model(input_ids=tokens, cache=self._cache, use_cache=True, logits_to_keep=1).logits
        self._next = logits.argmax(-1)


class Ours:
    """The engine, one request."""

    def __init__(self, path: Path, artifact: str, context: int) -> None:
        options = EngineOptions(
            artifact=artifact, max_num_seqs=1, max_batched_tokens=CHUNK, prefix_caching=False, max_model_len=context
        )
        self._engine = Engine.load(path, options)
        self._outputs: list[RequestOutput] = []
        self.dtype = str(self._engine.loaded.model.dtype).removeprefix("torch.")
        self.backend = self._engine.backend.name

    def prefill(self, prompt: list[int]) -> None:
        """Compute a prompt and its first token."""
        params = SamplingParams(temperature=0.0, ignore_eos=True)
        self._engine.submit(f"prompt-{len(prompt)}", prompt, params, self._outputs.append)
        while not self._outputs:
            self._engine.step()

    def decode(self) -> None:
        """One token."""
        count = len(self._outputs)
        self._engine.step()
        if len(self._outputs) != count + 1:
            raise RuntimeError("the request ended before the benchmark did")

    def close(self) -> None:
        """End the request."""
        self._engine.shutdown(drain=False)


def seconds(work: Callable[[], None]) -> float:
    """Duration of ``work``."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(path: Path, artifact: str, context: int, steps: int) -> list[dict[str, Any]]:
    """Rows of one context length."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(100, 40_000, (context,), generator=generator).tolist()
    ours, baseline = Ours(path, artifact, context + steps + WARM_STEPS + 1), Baseline(path)
    prefill = [seconds(partial(side.prefill, prompt)) for side in (ours, baseline)]
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(steps + WARM_STEPS):
        for side, spent in zip((ours, baseline), times, strict=True):
            spent.append(seconds(side.decode))
    ours.close()
    decode = [statistics.median(spent[WARM_STEPS:]) for spent in times]
    case = f"{path.name}, {context} tokens, CPU, model in {ours.dtype}, kernel {ours.backend}"
    rows = []
    for metric, unit, (mine, theirs), must, aim in (
        ("decode, time a token", "ms", [1e3 * s for s in decode], MUST, AIM),
        ("prefill, time a token", "ms", [1e3 * s / context for s in prefill], None, None),
    ):
        rows.append(
            {
                "case": case,
                "metric": metric,
                "unit": unit,
                "ours": round(mine, 3),
                "baselines": {"transformers DynamicCache BF16": round(theirs, 3)},
                "ratio": round(mine / theirs, 3),
                "must": must,
                "aim": aim,
                "direction": "lower",
            }
        )
    return rows


def main() -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="known model or folder")
    parser.add_argument("--artifact", default="auto", help="artifact folder, auto, or hadamard")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8064])
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = Path(options.model) if Path(options.model).is_dir() else models.get_model(options.model)
    rows = [row for context in options.contexts for row in measure(path, options.artifact, context, options.steps)]
    for row in rows:
        (theirs,) = row["baselines"].values()
        print(f"{row['case']}: {row['metric']} {row['ours']} {row['unit']}, baseline {theirs}, ratio {row['ratio']}")
    print(
        write_result(
            "embedded-decode",
            rows,
            f"{platform.processor() or platform.machine()}, {options.threads} threads",
            options.out,
        )
    )


if __name__ == "__main__":
    main()

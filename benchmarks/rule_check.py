"""Prefill mode ``rule`` on a long prompt: the same answer however it was cut, batched, found in the cache or preempted.

    python -m benchmarks.rule_check                    SmolLM2, 6000 tokens, float32; a table and the result file
    python -m benchmarks.rule_check --tokens 1500      shorter

Every case is the embedded engine on the shipped artifact; it is compared with the prompt alone, cold, in chunks of 512
tokens: greedy tokens, and log probabilities of the prompt (where nothing of it came from the cache) and of the answer.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import RESULTS, write_result
from oscar_serving.calibration import Artifact, find_artifact
from oscar_serving.engines.hf import Engine, EngineOptions, RequestOutput, SamplingParams
from oscar_serving.models import get_model

TEXT = Path(__file__).parents[1] / "oscar_serving" / "evaluation" / "data" / "devils-dictionary.txt"
NEW = 16
#: Float32 sums in another order, with INT2 codes between: a code next to a threshold may fall on its other side.
LARGEST, MEAN = 5e-2, 3e-3


@dataclass
class Answer:
    """What a request got."""

    tokens: list[int] = field(default_factory=list)
    prompt: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    cached: int = 0

    def __call__(self, output: RequestOutput) -> None:
        self.tokens += output.token_ids
        self.prompt += [x.logprob for x in output.prompt_logprobs or () if x is not None]
        self.sampled += [x.logprob for x in output.logprobs or ()]
        self.cached = max(self.cached, output.cached_tokens)


class Bench:
    """Engines over one loaded model."""

    def __init__(self, model: Path, artifact: str, dtype: Any, longest: int) -> None:
        first = Engine.load(model, EngineOptions(artifact=artifact, dtype=dtype, max_model_len=longest))
        self.loaded, self.tokenizer = first.loaded, first.tokenizer
        self.artifact = Artifact.load(find_artifact(model, artifact))

    def engine(self, **options: Any) -> Engine:
        """A fresh engine with an empty cache."""
        settings = {"prefill_mode": "rule", "kv_cache_memory": 512 << 20, "max_num_seqs": 8} | options
        return Engine(self.loaded, self.tokenizer, EngineOptions(**settings), artifact=self.artifact)

    @staticmethod
    def ask(engine: Engine, prompts: Sequence[list[int]], *, score: bool = True, new: int = NEW) -> list[Answer]:
        """Greedy answers to prompts that are computed together."""
        params = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0, prompt_logprobs=0 if score else None
        )
        answers = [Answer() for _ in prompts]
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            engine.submit(f"{i}", prompt, params, answer)
        while engine.step():
            pass
        engine.stores.pool.check_integrity()
        return answers


def main(argv: Sequence[str] | None = None) -> None:
    """Run every case and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a name that `oscar models list` shows")
    parser.add_argument("--artifact", default="auto")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    bench = Bench(get_model(options.model), options.artifact, options.dtype, options.tokens + 128)
    text = bench.tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"]
    prompt, other = text[: options.tokens], text[options.tokens : 2 * options.tokens]
    rows: list[dict[str, Any]] = []

    def compare(case: str, got: Answer, expected: Answer) -> None:
        rows.extend(rows_of(f"{options.model}, {options.tokens} tokens: {case}", got, expected))
        for row in rows[-3:]:
            print(f"{row['case']:60} {row['metric']:40} {row['ours']:.3g}", flush=True)

    base = bench.engine()
    (expected,) = bench.ask(base, [prompt])
    (warm,) = bench.ask(base, [prompt], score=False)
    compare(f"prefix hit of {warm.cached} tokens", warm, expected)
    for chunk in (128, options.tokens):
        (got,) = bench.ask(bench.engine(max_batched_tokens=chunk), [prompt])
        compare("at once" if chunk == options.tokens else f"chunks of {chunk}", got, expected)
    others = [text[1000 * i : 1000 * i + 600 + 100 * i] for i in range(1, 8)]
    compare("in a batch of 8", bench.ask(bench.engine(), [prompt, *others])[0], expected)
    alone, crowded, preemptions = preempted(bench, [other, prompt])
    compare(f"preempted ({preemptions} times)", crowded, alone)
    print(write_result("rule", rows, f"{platform.machine()} CPU, {torch.get_num_threads()} threads", options.out))


def preempted(bench: Bench, prompts: list[list[int]]) -> tuple[Answer, Answer, int]:
    """The later of two requests without and with too little memory for both, and how often one was preempted."""
    roomy = bench.engine(max_num_seqs=len(prompts), prefix_caching=False)
    stores = roomy.stores
    new = 2 * stores.config.page_size  # both grow by two pages, and there are two for both
    alone = bench.ask(roomy, prompts[1:], score=False, new=new)[0]
    pages = sum(len(p) // stores.config.page_size + 1 for p in prompts) + 3  # the null page
    memory = stores.window_pages * stores.sizes.window_page + pages * stores.sizes.page
    tight = bench.engine(max_num_seqs=len(prompts), kv_cache_memory=memory, prefix_caching=False)
    crowded = bench.ask(tight, prompts, score=False, new=new)[1]
    return alone, crowded, tight.stats().preemptions


def rows_of(case: str, got: Answer, expected: Answer) -> list[dict[str, Any]]:
    """Rows of a comparison."""
    pairs = list(zip(got.sampled, expected.sampled, strict=True))
    if got.prompt:
        pairs += zip(got.prompt, expected.prompt, strict=True)
    gaps = [abs(x - y) for x, y in pairs]
    differing = sum(x != y for x, y in zip(got.tokens, expected.tokens, strict=True))
    values = (
        ("tokens that differ", "", differing, 0),
        ("largest difference of a log probability", "nat", max(gaps), LARGEST),
        ("mean difference of a log probability", "nat", sum(gaps) / len(gaps), MEAN),
    )
    return [
        {
            "case": case, "metric": metric, "unit": unit, "ours": value, "baselines": {}, "ratio": value, "must": must,
            "aim": None, "direction": "lower",
        }
        for metric, unit, value, must in values
    ]  # fmt: skip


if __name__ == "__main__":
    main()

"""Does the plugin give right answers on this machine's vLLM? Small random models, a minute or two.

    python -m benchmarks.vllm_smoke --out DIR [--models llama,gemma3] [--checks graphs,warm]

Greedy continuations of the same prompts must agree between settings that must not matter in prefill mode ``rule``. Two
continuations agree if they are equal, or part at a near-tie: where they part, each token is within ``--tie`` of the
other's log probability. Prints a line a check; the exit status is the number of failures.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
    },
    "llama64": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1024, "num_hidden_layers": 4,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    },
    "gemma3": {
        "model_type": "gemma3_text", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 128,
        "query_pre_attn_scalar": 256, "sliding_window_pattern": 3,
    },
}  # fmt: skip
VOCABULARY = 4096
NEW = 48


def build_model(name: str, out: Path) -> Path:
    """Folder with a random model whose continuations are not constant."""
    folder = out / f"model-{name}"
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    options = {**MODELS[name]}
    config = AutoConfig.for_model(
        options.pop("model_type"), **options, vocab_size=VOCABULARY, max_position_embeddings=8192,
        initializer_range=0.06, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


@dataclass
class Answer:
    """One continuation: tokens, log probability of each token among the best few, and cached prompt tokens."""

    tokens: list[int]
    best: list[dict[int, float]]
    cached: int


class Engines:
    """Opens engines one at a time."""

    def __init__(self, model: Path, out: Path, *, cpu: bool) -> None:
        self.model, self.out, self.cpu = model, out, cpu
        self.llm: Any = None

    def open(self, *, dtype: str = "oscar_int2", oscar: dict[str, Any] | None = None, **options: Any) -> None:
        """Start an engine in this process, in prefill mode ``rule`` unless ``oscar`` says otherwise."""
        from vllm import LLM

        self.close()
        settings: dict[str, Any] = {
            "max_model_len": 4096, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 30, "dtype": "bfloat16", "skip_tokenizer_init": True, "seed": 0,
            "kv_cache_dtype": dtype, "disable_log_stats": True, "model": str(self.model), "max_logprobs": 20,
        }  # fmt: skip
        if dtype.startswith("oscar"):
            base = {"artifact": "hadamard", "prefill_mode": "rule"}
            settings["additional_config"] = {"oscar": base | (oscar or {})}
        self.llm = LLM(**(settings | options))

    def close(self) -> None:
        """Stop the engine and free its memory."""
        if self.llm is None:
            return
        self.llm.llm_engine.engine_core.shutdown()
        self.llm = None
        gc.collect()
        if not self.cpu:
            import torch

            torch.cuda.empty_cache()

    def ask(self, prompts: list[list[int]], tokens: int = NEW) -> list[Answer]:
        """Greedy continuations."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=10, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [
            Answer(
                list(o.outputs[0].token_ids),
                [{t: x.logprob for t, x in position.items()} for position in o.outputs[0].logprobs],
                o.num_cached_tokens or 0,
            )
            for o in outputs
        ]

    def score(self, prompts: list[list[int]]) -> list[list[float]]:
        """Log probability of each prompt token but the first, from a prefill."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [
            [position[t].logprob for position, t in zip(o.prompt_logprobs[1:], p[1:], strict=True)]
            for o, p in zip(outputs, prompts, strict=True)
        ]


def prompts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of mixed length, the first of the greatest."""
    rng = random.Random(seed)
    sizes = [longest, *(rng.randrange(1, longest) for _ in range(count - 1))]
    return [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in sizes]


def differences(a: list[Answer], b: list[Answer], tie: float) -> list[str]:
    """Where continuations part although it is no near-tie."""
    out = []
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        for p, (s, t) in enumerate(zip(x.tokens, y.tokens, strict=True)):
            if s == t:
                continue
            gaps = [
                side[p].get(own, 0.0) - side[p].get(other, -99.0)
                for side, own, other in ((x.best, s, t), (y.best, t, s))
            ]
            if max(gaps) > tie:
                out.append(f"prompt {i} token {p}: gap {max(gaps):.3f}")
            break
    return out


def check_graphs(e: Engines, args: argparse.Namespace) -> list[str]:
    """CUDA graphs on and off."""
    some = prompts(8, 900)
    e.open()
    eager = e.ask(some)
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    e.open(enforce_eager=False, compilation_config=graphs)
    return differences(eager, e.ask(some), args.tie)


def check_warm(e: Engines, args: argparse.Namespace) -> list[str]:
    """Cold, warm, and a second turn that hits the first answer."""
    some = prompts(6, 1500)
    e.open()
    cold, warm = e.ask(some, 200), e.ask(some, 200)
    wrong = differences(cold, warm, args.tie)
    for p, c, w in zip(some, cold, warm, strict=True):
        if c.cached or w.cached != (len(p) - 1) // 128 * 128:
            wrong.append(f"prompt of {len(p)}: cached {c.cached}, then {w.cached}")
    turns = [[*p, *w.tokens, *p[:20]] for p, w in zip(some, warm, strict=True)]
    second = e.ask(turns)
    for turn, p, s in zip(turns, some, second, strict=True):
        if s.cached != (len(p) + 199) // 128 * 128:
            wrong.append(f"second turn of {len(turn)}: cached {s.cached}, want {(len(p) + 199) // 128 * 128}")
    e.open()
    return wrong + differences(e.ask(turns), second, args.tie)


def check_chunks(e: Engines, args: argparse.Namespace) -> list[str]:
    """Chunks of 128 and of 2048 tokens."""
    some = prompts(6, 1500)
    e.open()
    whole = e.ask(some)
    e.open(max_num_batched_tokens=128)
    return differences(whole, e.ask(some), args.tie)


def check_batch(e: Engines, args: argparse.Namespace) -> list[str]:
    """Alone and in a batch."""
    some = prompts(64, 700)
    e.open()
    together = e.ask(some)
    e.llm.reset_prefix_cache()
    return differences(together[:12], [e.ask([p])[0] for p in some[:12]], args.tie)


def check_decode(e: Engines, args: argparse.Namespace) -> list[str]:
    """Log probabilities of decode steps and of a prefill over the same tokens."""
    some = prompts(4, 800)
    e.open()
    answers = e.ask(some, 300)
    scores = e.score([[*p, *a.tokens] for p, a in zip(some, answers, strict=True)])
    wrong = []
    for i, (a, s) in enumerate(zip(answers, scores, strict=True)):
        got = [best[t] for best, t in zip(a.best, a.tokens, strict=True)]
        gaps = sorted(abs(x - y) for x, y in zip(got, s[-len(got) :], strict=True))
        if gaps[len(gaps) * 9 // 10] > args.tie:
            wrong.append(f"prompt {i}: 90 % of tokens within {gaps[len(gaps) * 9 // 10]:.3f}, worst {gaps[-1]:.3f}")
    return wrong


def check_windows(e: Engines, args: argparse.Namespace) -> list[str]:
    """With a sink of the whole context the cache is BF16 up to rotation: the same answers as vLLM's own."""
    some = prompts(6, 1500)
    e.open(dtype="auto")
    plain, want = e.ask(some), e.score(some)
    wrong = []
    for mode, chunk in (("raw", 2048), ("raw", 256), ("rule", 256)):
        e.open(oscar={"sink": 4096, "prefill_mode": mode}, max_num_batched_tokens=chunk)
        wrong += [f"{mode} {chunk}: {d}" for d in differences(plain, e.ask(some), 2 * args.tie)]
        for a, b in zip(want, e.score(some), strict=True):
            gaps = sorted(abs(x - y) for x, y in zip(a, b, strict=True))
            if gaps and gaps[len(gaps) * 9 // 10] > 2 * args.tie:
                wrong.append(f"{mode} {chunk}: 90 % of prompt tokens within {gaps[len(gaps) * 9 // 10]:.3f}")
    return wrong


def check_pool(e: Engines, args: argparse.Namespace) -> list[str]:
    """A pool that holds a few of 48 prompts: evictions and preemptions change nothing."""
    some = [[*head, *tail] for head, tail in zip(prompts(48, 500, 1), prompts(48, 600, 2), strict=True)]
    e.open()
    roomy = e.ask(some)
    e.open(num_gpu_blocks_override=130, max_model_len=2048)
    return differences(roomy, e.ask(some), args.tie)


def check_speculation(e: Engines, args: argparse.Namespace) -> list[str]:
    """n-gram speculation on and off."""
    rng = random.Random(3)
    phrase = [rng.randrange(3, VOCABULARY) for _ in range(40)]
    some = [phrase * n for n in (3, 9, 20)]
    e.open()
    plain = e.ask(some)
    e.open(speculative_config={
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1,
    })  # fmt: skip
    return differences(plain, e.ask(some), args.tie)


def check_k4v2(e: Engines, args: argparse.Namespace) -> list[str]:
    """The K4 V2 cache: warm and cold, mode ``raw``."""
    some = prompts(4, 900)
    e.open(dtype="oscar_k4v2")
    wrong = differences(e.ask(some), e.ask(some), args.tie)
    e.open(dtype="oscar_k4v2", oscar={"prefill_mode": "raw"}, max_num_batched_tokens=256)
    if any(len(set(a.tokens)) < 3 for a in e.ask(some)):
        wrong.append("constant continuation")
    return wrong


CHECKS: dict[str, Callable[[Engines, argparse.Namespace], list[str]]] = {
    "windows": check_windows, "decode": check_decode, "chunks": check_chunks, "warm": check_warm,
    "batch": check_batch, "graphs": check_graphs, "pool": check_pool, "k4v2": check_k4v2,
    "speculation": check_speculation,
}  # fmt: skip


def run(args: argparse.Namespace, *, cpu: bool = False) -> int:
    """Run the checks; the number of failures."""
    failures = 0
    for name in args.models:
        engines = Engines(build_model(name, args.out), args.out, cpu=cpu)
        for check in args.checks:
            started = time.perf_counter()
            try:
                wrong = CHECKS[check](engines, args)
            except Exception as error:
                if args.stop:
                    raise
                wrong = [f"{type(error).__name__}: {error}"]
            failures += bool(wrong)
            verdict = "FAIL " + "; ".join(wrong[:4]) if wrong else "ok"
            print(f"smoke {name:8} {check:12} {time.perf_counter() - started:6.1f} s  {verdict}", flush=True)
        engines.close()
    return failures


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm_smoke"))
    parser.add_argument("--models", type=lambda s: s.split(","), default=["llama", "llama64", "gemma3"])
    parser.add_argument("--checks", type=lambda s: s.split(","), default=list(CHECKS))
    parser.add_argument("--tie", type=float, default=0.5, help="log probabilities this near count as equal")
    parser.add_argument("--stop", action="store_true", help="stop at the first exception, with its traceback")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


if __name__ == "__main__":
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    sys.exit(run(parse()))

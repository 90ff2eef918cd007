"""SGLang 0.5.23 with an OSCAR cache against the same SGLang with a BF16 cache: capacity, latency, throughput.

    python -m benchmarks.sglang_serving --out DIR                    everything, then the result file
    python -m benchmarks.sglang_serving --out DIR --engines oscar_int2 --cases latency --contexts 4K,32K
    python -m benchmarks.sglang_serving --out DIR --report           the result file from what DIR holds

Each engine runs in its own process and leaves ``DIR/<engine>.<case>.json`` behind, so a long run may be cut into
calls. Both use SGLang's Triton attention backend settings; ours replaces its kernels. Qwen3-8B shapes with dummy
weights unless ``--model`` names a folder. Prompts are random token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.result import write_result
from benchmarks.vllm_serving import CONTEXTS, GIB, QWEN3_8B, model_folder

ENGINES = {"bf16": "auto", "oscar_int2": "oscar_int2", "oscar_k4v2": "oscar_k4v2"}
DEFAULT_ENGINES = ("bf16", "oscar_int2")
#: Metric → (unit, better direction, must, aim); must and aim are ours / SGLang's Triton BF16.
CRITERIA: dict[str, tuple[str, str, float | None, float | None]] = {
    "KV tokens that fit, 64 requests": ("tokens", "higher", 6.3, 6.8),
    "TPOT, batch 1, 4K": ("ms", "lower", 1.05, 1.0),
    "TPOT, batch 1, 32K": ("ms", "lower", 0.5, 0.4),
    "TPOT, batch 1, 100K": ("ms", "lower", 0.25, 0.2),
    "TTFT 4K": ("s", "lower", None, None),
    "TTFT 32K": ("s", "lower", None, None),
    "TTFT 100K": ("s", "lower", 1.10, 1.0),
    "100K contexts, as many as fit in 16 GiB": ("decode tok/s", "higher", 7.0, 8.0),
}
HEADROOM = 600


class Engine:
    """An SGLang engine with the settings of the comparison, and how to time it."""

    def __init__(self, args: argparse.Namespace, running: int, tokens: int | None) -> None:
        import sglang

        os.environ.setdefault("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "0")
        model, dummy = model_folder(args)
        os.environ["OSCAR_ARTIFACT"] = args.artifact
        options: dict[str, Any] = {} if tokens is None else {"max_total_tokens": tokens}
        if args.mem_fraction is not None:
            options["mem_fraction_static"] = args.mem_fraction
        started = time.perf_counter()
        self.engine = sglang.Engine(
            model_path=str(model), load_format="dummy" if dummy else "auto", skip_tokenizer_init=True,
            dtype="bfloat16", kv_cache_dtype=ENGINES[args.engine], context_length=args.max_model_len,
            max_running_requests=running, chunked_prefill_size=args.chunk, attention_backend="triton",
            sampling_backend="pytorch", cuda_graph_max_bs_decode=running, random_seed=0, log_level="warning", **options,
        )  # fmt: skip
        self.start_seconds = time.perf_counter() - started
        self.random = random.Random(1)
        self.vocabulary = QWEN3_8B["vocab_size"] - 1000 if dummy else args.vocabulary

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that no earlier one shares a page with."""
        return [self.random.randrange(100, self.vocabulary) for _ in range(tokens)]

    def run(self, prompts: list[list[int]], output: int) -> tuple[float, list[Any]]:
        """Seconds and outputs of a batch that generates exactly ``output`` tokens a prompt."""
        params = {"max_new_tokens": output, "temperature": 0.0, "ignore_eos": True}
        started = time.perf_counter()
        outputs = self.engine.generate(input_ids=prompts, sampling_params=params)
        seconds = time.perf_counter() - started
        for made in outputs:
            if made["meta_info"]["completion_tokens"] != output:
                raise RuntimeError(f"{made['meta_info']['completion_tokens']} tokens instead of {output}")
        return seconds, outputs

    def capacity(self) -> int:
        """Tokens that the pool holds, as SGLang counts them."""
        return int(self.engine.get_server_info()["max_total_num_tokens"])


def capacity(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens that fit in the card's memory at SGLang's default fraction, for 64 running requests."""
    return {"KV tokens that fit, 64 requests": engine.capacity(), "start seconds": engine.start_seconds}


def latency(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Time to the first token of a fresh prompt, then time per token behind the cached prompt."""
    out: dict[str, Any] = {}
    for name in args.contexts:
        first = []
        for _ in range(args.repeat):
            prompt = engine.prompt(CONTEXTS[name])
            first.append(engine.run([prompt], 1)[0])
        out[f"TTFT {name}"] = statistics.median(first)
        one = min(engine.run([prompt], 1)[0] for _ in range(3))
        many = min(engine.run([prompt], 129)[0] for _ in range(3))
        out[f"TPOT, batch 1, {name}"] = 1000 * (many - one) / 128
    return out


def long_contexts(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Decode throughput of as many 100K contexts as 16 GiB hold, all of them cached first."""
    fit = max(1, engine.capacity() // (CONTEXTS["100K"] + HEADROOM))
    prompts = [engine.prompt(CONTEXTS["100K"]) for _ in range(fit)]
    for prompt in prompts:
        engine.run([prompt], 1)
    one, many = engine.run(prompts, 1)[0], engine.run(prompts, 257)[0]
    return {"100K contexts, as many as fit in 16 GiB": fit * 256 / (many - one), "contexts": fit}


#: Case → (what runs, running requests, KV bytes or None for what the card has).
CASES: dict[str, tuple[Callable[[Engine, argparse.Namespace], dict[str, Any]], int, int | None]] = {
    "capacity": (capacity, 64, None),
    "latency": (latency, 8, 16 * GIB),
    "long": (long_contexts, 8, 16 * GIB),
}


def tokens_in(memory: int | None, args: argparse.Namespace, running: int) -> int | None:
    """Tokens of the engine's cache that ``memory`` bytes hold, what our window rows and sinks take subtracted."""
    if memory is None:
        return None
    config = QWEN3_8B if not args.model else json.loads((Path(args.model) / "config.json").read_text())
    heads, layers, d = config["num_key_value_heads"], config["num_hidden_layers"], config["head_dim"]
    token = 2 * heads * d * 2 * layers
    if not args.engine.startswith("oscar"):
        return memory // token // 64 * 64
    from oscar_serving.codec import PageLayout
    from oscar_serving.engines.sglang.options import PAGE, SglangOptions
    from oscar_serving.engines.sglang.store import window_pages

    layout = PageLayout(d, SglangOptions.parse(args.engine, {}).config())
    windows = window_pages(layout.config, running) * 16 * token
    return int((memory - windows) // (layout.bytes_per_token(heads) * layers)) // PAGE * PAGE


def worker(args: argparse.Namespace) -> None:
    """Run cases that share one engine, in this process; one file a case, written as soon as it is done."""
    _, running, memory = CASES[args.cases[0]]
    engine = Engine(args, running, tokens_in(memory, args, running))
    engine.run([engine.prompt(64)], 8)
    for case in args.cases:
        result = CASES[case][0](engine, args)
        (args.out / f"{args.engine}.{case}.json").write_text(
            json.dumps({"engine": args.engine, "case": case, "values": result, "device": device()}, indent=1)
        )
        print(f"{args.engine:12} {case:9} " + "  ".join(f"{k}: {v:,.3f}" for k, v in result.items()), flush=True)
    engine.engine.shutdown()


def device() -> str:
    """The card's name."""
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"


def report(out: Path) -> Path | None:
    """Compose the result file from the records in ``out`` and print the table; ``None`` without records of ours."""
    records = [json.loads(p.read_text()) for p in sorted(out.glob("*.*.json")) if p.name.split(".")[0] in ENGINES]
    values: dict[str, dict[str, float]] = {}
    for record in records:
        values.setdefault(record["engine"], {}).update(record["values"])
    rows = []
    for ours in (e for e in ENGINES if e.startswith("oscar") and e in values):
        for metric, (unit, direction, must, aim) in CRITERIA.items():
            if metric not in values[ours]:
                continue
            mine, base = values[ours][metric], values.get("bf16", {}).get(metric)
            judged = ours == "oscar_int2"
            rows.append({
                "case": f"{metric} ({ours})", "metric": metric, "unit": unit, "ours": mine,
                "baselines": {} if base is None else {"SGLang Triton bf16": base},
                "ratio": None if base is None else mine / base, "must": must if judged else None,
                "aim": aim if judged else None, "direction": direction,
            })  # fmt: skip
    if not rows:
        return None
    for row in rows:
        base = row["baselines"].get("SGLang Triton bf16", float("nan"))
        ratio = row["ratio"] if row["ratio"] is not None else float("nan")
        print(f"{row['case']:56} {row['ours']:14,.2f} {base:14,.2f} {ratio:7.2f}  must {row['must'] or '-'}")
    return write_result("sglang_serving", rows, records[-1]["device"], out)


def run_engines(args: argparse.Namespace) -> list[str]:
    """One process for each engine and memory size; names of those that failed."""
    failed = []
    for engine in args.engines:
        for setting in dict.fromkeys(CASES[c][1:] for c in args.cases):
            cases = [c for c in args.cases if CASES[c][1:] == setting]
            command = [
                sys.executable, "-m", "benchmarks.sglang_serving", "--engine", engine, "--cases", ",".join(cases),
                "--contexts", ",".join(args.contexts), "--out", str(args.out), "--repeat", str(args.repeat),
                "--max-model-len", str(args.max_model_len), "--artifact", args.artifact, "--chunk", str(args.chunk),
                "--vocabulary", str(args.vocabulary), *(["--model", args.model] if args.model else []),
                *(["--mem-fraction", str(args.mem_fraction)] if args.mem_fraction is not None else []),
            ]  # fmt: skip
            with (args.out / f"{engine}-{'-'.join(cases)}.log").open("w") as log:
                status = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
            print("\n".join(x for x in status.stdout.splitlines() if x.startswith(engine)), flush=True)
            if status.returncode:
                failed.append(f"{engine} {'+'.join(cases)} (see {log.name})")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sglang_serving"))
    parser.add_argument("--engines", type=lambda s: s.split(","), default=list(DEFAULT_ENGINES))
    parser.add_argument("--cases", type=lambda s: s.split(","), default=list(CASES))
    parser.add_argument("--contexts", type=lambda s: s.split(","), default=list(CONTEXTS))
    parser.add_argument("--repeat", type=int, default=2, help="fresh prompts a context for TTFT")
    parser.add_argument("--chunk", type=int, default=16384, help="tokens of a prefill chunk")
    parser.add_argument("--max-model-len", type=int, default=110_000)
    parser.add_argument("--mem-fraction", type=float, help="SGLang's mem_fraction_static")
    parser.add_argument("--model", help="folder of a real model; default: Qwen3-8B shapes, dummy weights")
    parser.add_argument("--vocabulary", type=int, default=30_000, help="token ids of prompts stay below, with --model")
    parser.add_argument("--artifact", default="hadamard", help="as --oscar-artifact")
    parser.add_argument("--report", action="store_true", help="only compose the result file")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, given, known in (
        ("engines", args.engines, ENGINES), ("cases", args.cases, CASES), ("contexts", args.contexts, CONTEXTS),
    ):  # fmt: skip
        for item in given:
            if item not in known:
                parser.error(f"--{name} {item}: allowed are {', '.join(known)}")
    if args.engine:
        worker(args)
        return
    failed = [] if args.report else run_engines(args)
    print(f"\n{report(args.out) or 'no result'}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

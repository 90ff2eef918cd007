"""vLLM 0.33 with an OSCAR cache against the same vLLM with BF16 and FP8 caches: capacity, latency, throughput.

    python -m benchmarks.vllm_serving --out DIR                      everything, then the result file
    python -m benchmarks.vllm_serving --out DIR --engines oscar_int2 --cases capacity,tpot
    python -m benchmarks.vllm_serving --out DIR --report             the result file from what DIR holds

Each engine runs in its own process and leaves ``DIR/<engine>.<case>.json`` behind, so a long run may be cut into
calls. Qwen3-8B shapes with dummy weights unless ``--model`` names a folder. Prompts are random token ids.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

GIB = 1 << 30
ENGINES = {"bf16": "auto", "fp8": "fp8", "oscar_int2": "oscar_int2", "oscar_k4v2": "oscar_k4v2"}
DEFAULT_ENGINES = ("bf16", "fp8", "oscar_int2")
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 12288, "max_position_embeddings": 131072, "max_window_layers": 36, "model_type": "qwen3",
    "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
CONTEXTS = {"4K": 4096, "32K": 32768, "100K": 100_000}
#: Case → (unit, better direction, baseline that judges, must, aim); must and aim are ours / baseline.
CRITERIA: dict[str, tuple[str, str, str, float | None, float | None]] = {
    "KV tokens in 16 GiB": ("tokens", "higher", "bf16", 6.5, 7.0),
    "TPOT, batch 1, 4K": ("ms", "lower", "bf16", 1.05, 1.0),
    "TPOT, batch 1, 32K": ("ms", "lower", "bf16", None, None),
    "TPOT, batch 1, 100K": ("ms", "lower", "bf16", 0.80, 0.70),
    "TTFT 32K": ("s", "lower", "bf16", 1.10, 1.0),
    "TTFT 100K": ("s", "lower", "bf16", 1.25, 1.05),
    "job 96 x (8000 in, 512 out)": ("output tok/s", "higher", "fp8", 1.5, 1.8),
    "100K contexts, as many as fit": ("decode tok/s", "higher", "bf16", 5.0, 7.0),
    "28 x 100K in 60 GB": ("requests finished", "higher", "", 28, 28),
}
WARM_UP = 64


class Engine:
    """A vLLM engine with the settings of the comparison, and how to time it."""

    def __init__(self, args: argparse.Namespace, memory: int) -> None:
        from vllm import LLM

        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        model, dummy = model_folder(args)
        options: dict[str, Any] = {}
        if args.engine.startswith("oscar"):
            options["additional_config"] = {"oscar": json.loads(args.oscar)}
        started = time.perf_counter()
        self.llm = LLM(
            model=str(model), load_format="dummy" if dummy else "auto", skip_tokenizer_init=True, dtype="bfloat16",
            kv_cache_dtype=ENGINES[args.engine], max_model_len=args.max_model_len, max_num_seqs=256,
            max_num_batched_tokens=16384, enable_prefix_caching=True, kv_cache_memory_bytes=memory, seed=0,
            compilation_config={
                "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256],
            },
            disable_log_stats=True, **options,
        )  # fmt: skip
        self.start_seconds = time.perf_counter() - started
        self.vocabulary = self.llm.llm_engine.vllm_config.model_config.get_vocab_size() - 1000
        self.random = random.Random(1)

    def prompt(self, tokens: int) -> list[int]:
        """A prompt that no earlier one shares a block with."""
        return [self.random.randrange(100, self.vocabulary) for _ in range(tokens)]

    def run(self, prompts: list[list[int]], output: int) -> tuple[float, list[Any]]:
        """Seconds and outputs of a batch that generates exactly ``output`` tokens a prompt."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - started, outputs

    def capacity(self) -> int:
        """Tokens that fit, as vLLM counts them: whole requests of the greatest length."""
        return int(self.llm.llm_engine.vllm_config.cache_config.kv_cache_size_tokens or 0)


def capacity(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """KV tokens that fit in the given memory."""
    return {"KV tokens in 16 GiB": engine.capacity(), "start seconds": engine.start_seconds}


def latency(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Time to the first token of a fresh prompt, then time per token behind the cached prompt."""
    out: dict[str, Any] = {}
    for name in args.contexts:
        length = CONTEXTS[name]
        first = []
        for _ in range(args.repeat):
            prompt = engine.prompt(length)
            first.append(engine.run([prompt], 1)[0])
        out[f"TTFT {name}"] = statistics.median(first)
        one = min(engine.run([prompt], 1)[0] for _ in range(3))
        many = min(engine.run([prompt], 129)[0] for _ in range(3))
        out[f"TPOT, batch 1, {name}"] = 1000 * (many - one) / 128
    return out


def job(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """96 requests of 8000 tokens, 512 out each."""
    prompts = [engine.prompt(8000) for _ in range(args.job_requests)]
    seconds, outputs = engine.run(prompts, 512)
    made = sum(len(o.outputs[0].token_ids) for o in outputs)
    return {"job 96 x (8000 in, 512 out)": made / seconds, "job seconds": seconds, "job requests": len(prompts)}


def long_contexts(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """Decode throughput of as many 100K contexts as the memory holds, all of them cached first."""
    fit = max(1, engine.capacity() // (CONTEXTS["100K"] + 600))
    prompts = [engine.prompt(CONTEXTS["100K"]) for _ in range(fit)]
    for prompt in prompts:
        engine.run([prompt], 1)
    one, many = engine.run(prompts, 1)[0], engine.run(prompts, 257)[0]
    return {"100K contexts, as many as fit": fit * 256 / (many - one), "contexts": fit}


def crowd(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    """28 requests of 100K tokens at once."""
    seconds, outputs = engine.run([engine.prompt(CONTEXTS["100K"]) for _ in range(28)], 64)
    finished = sum(len(o.outputs[0].token_ids) == 64 for o in outputs)
    return {"28 x 100K in 60 GB": finished, "crowd seconds": seconds, "crowd tokens that fit": engine.capacity()}


#: Case → (what runs, bytes of KV memory). Cases with the same memory share one engine.
CASES: dict[str, tuple[Callable[[Engine, argparse.Namespace], dict[str, Any]], int]] = {
    "capacity": (capacity, 16 * GIB),
    "latency": (latency, 16 * GIB),
    "job": (job, 16 * GIB),
    "long": (long_contexts, 16 * GIB),
    "crowd": (crowd, 60_000_000_000),
}
OURS_ONLY = ("crowd",)


def model_folder(args: argparse.Namespace) -> tuple[Path, bool]:
    """Folder of the model, and whether its weights are dummies."""
    if args.model:
        return Path(args.model), False
    folder = args.out / "qwen3-8b-shapes"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return folder, True


def worker(args: argparse.Namespace) -> None:
    """Run cases that share one engine, in this process; one file a case, written as soon as it is done."""
    engine = Engine(args, CASES[args.cases[0]][1])
    engine.run([engine.prompt(WARM_UP)], 8)
    for case in args.cases:
        result = CASES[case][0](engine, args)
        record = {"engine": args.engine, "case": case, "values": result, "meta": machine()}
        (args.out / f"{args.engine}.{case}.json").write_text(json.dumps(record, indent=1))
        print(f"{args.engine:12} {case:9} " + "  ".join(f"{k}: {v:,.3f}" for k, v in result.items()), flush=True)


def machine() -> dict[str, Any]:
    """Card, driver and versions."""
    import torch
    import triton
    import vllm

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    return {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else platform.processor(),
        "driver": driver,
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "vllm": vllm.__version__,
        },
    }  # fmt: skip


def report(out: Path, command: str) -> Path | None:
    """Compose the result file from the records in ``out`` and print the table; ``None`` without records."""
    records = [json.loads(p.read_text()) for p in sorted(out.glob("*.*.json")) if p.name.split(".")[0] in ENGINES]
    if not records:
        return None
    values: dict[str, dict[str, float]] = {}
    for record in records:
        values.setdefault(record["engine"], {}).update(record["values"])
    rows = []
    for ours in (e for e in ENGINES if e.startswith("oscar") and e in values):
        for metric, (unit, direction, judge, must, aim) in CRITERIA.items():
            if metric not in values[ours]:
                continue
            mine = values[ours][metric]
            baselines = {e: v[metric] for e, v in values.items() if not e.startswith("oscar") and metric in v}
            ratio = mine / baselines[judge] if judge in baselines else (None if judge else mine)
            rows.append({
                "case": f"{metric} ({ours})", "metric": metric, "unit": unit, "ours": mine, "baselines": baselines,
                "ratio": ratio, "must": must if ours == "oscar_int2" else None,
                "aim": aim if ours == "oscar_int2" else None, "direction": direction,
            })  # fmt: skip
    date = datetime.now(UTC).strftime("%Y%m%d")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    meta = {"name": "vllm_serving", "date": date, "commit": commit, **records[-1]["meta"], "command": command}
    target = out / f"vllm_serving-{date}.json"
    target.write_text(json.dumps({"meta": meta, "rows": rows, "records": records}, indent=1) + "\n")
    print_table(rows)
    return target


def print_table(rows: list[dict[str, Any]]) -> None:
    """Ours, baselines, ratio and whether the must is met."""
    print(f"\n{'case':44} {'ours':>12} {'bf16':>12} {'fp8':>12} {'ratio':>7} {'must':>6}")
    for row in rows:
        base = [f"{row['baselines'][b]:12,.2f}" if b in row["baselines"] else f"{'-':>12}" for b in ("bf16", "fp8")]
        ratio, must = row["ratio"], row["must"]
        met = ""
        if ratio is not None and must is not None:
            met = "ok" if (ratio <= must if row["direction"] == "lower" else ratio >= must) else "MISSED"
        shown = "-" if ratio is None else f"{ratio:.2f}"
        print(f"{row['case']:44} {row['ours']:12,.2f} {' '.join(base)} {shown:>7} {must or '-':>6} {met}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm_serving"))
    parser.add_argument("--engines", type=lambda s: s.split(","), default=list(DEFAULT_ENGINES))
    parser.add_argument("--cases", type=lambda s: s.split(","), default=list(CASES))
    parser.add_argument("--contexts", type=lambda s: s.split(","), default=list(CONTEXTS))
    parser.add_argument("--repeat", type=int, default=2, help="fresh prompts a context for TTFT")
    parser.add_argument("--job-requests", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=110_000)
    parser.add_argument("--model", help="folder of a real model; default: Qwen3-8B shapes, dummy weights")
    parser.add_argument("--oscar", default='{"artifact": "hadamard"}', help="JSON of the plugin's options")
    parser.add_argument("--report", action="store_true", help="only compose the result file")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name, given, known in (("engines", args.engines, ENGINES), ("cases", args.cases, CASES)):
        for item in given:
            if item not in known:
                parser.error(f"--{name} {item}: allowed are {', '.join(known)}")
    if args.engine:
        worker(args)
        return
    failed = [] if args.report else run_engines(args)
    command = "python -m benchmarks.vllm_serving " + " ".join(sys.argv[1:])
    target = report(args.out, command)
    print(f"\n{target or 'no result'}")
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run_engines(args: argparse.Namespace) -> list[str]:
    """One process for each engine and memory size; names of those that failed."""
    failed = []
    for engine in args.engines:
        wanted = [c for c in args.cases if c not in OURS_ONLY or engine.startswith("oscar")]
        for memory in sorted({CASES[c][1] for c in wanted}):
            cases = [c for c in wanted if CASES[c][1] == memory]
            command = [
                sys.executable, "-m", "benchmarks.vllm_serving", "--engine", engine, "--cases", ",".join(cases),
                "--contexts", ",".join(args.contexts), "--out", str(args.out), "--repeat", str(args.repeat),
                "--job-requests", str(args.job_requests), "--max-model-len", str(args.max_model_len),
                "--oscar", args.oscar, *(["--model", args.model] if args.model else []),
            ]  # fmt: skip
            with (args.out / f"{engine}-{'-'.join(cases)}.log").open("w") as log:
                status = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=False)
            lines = [line for line in status.stdout.splitlines() if line.startswith(engine)]
            print("\n".join(lines), flush=True)
            if status.returncode:
                failed.append(f"{engine} {'+'.join(cases)} (see {log.name})")
    return failed


if __name__ == "__main__":
    main()

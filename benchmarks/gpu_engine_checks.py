"""Does a stock engine with the plugin answer right on this GPU? A real small model, several starts of the engine.

    python -m benchmarks.gpu_engine_checks vllm --model FOLDER --out DIR
    python -m benchmarks.gpu_engine_checks sglang --model FOLDER --out DIR --runs whole,eager --checks graphs

FOLDER is what ``oscar models get smollm2`` made, or any chat model with an artifact. Each run is a start of the engine
in a process of its own, which leaves ``DIR/<engine>.<run>.json`` and ``.log`` behind; checks compare runs. A run or
check that fails does not stop the others. Prints a JSON line for each; the exit status is the number of failures.

Two greedy continuations agree if they are equal, or part at a near-tie: where they part, each token's log probability
is within a tolerance of the other's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = dict[str, Any]
NEW = 64
QUESTIONS = ("What is the capital of France?", "Name three colours.", "What is the opposite of hot?")
TEXT = Path(__file__).parents[1] / "oscar_serving" / "evaluation" / "data" / "devils-dictionary.txt"
#: Positions from here on read INT2 in mode ``rule``: behind the sink and the recent tokens.
QUANTIZED_FROM = 64 + 256 + 64


@dataclass(frozen=True)
class Run:
    """Settings of an engine, and what it is asked: any of ``ask again alone crowd score``."""

    asked: tuple[str, ...]
    dtype: str = "oscar_int2"
    mode: str = "rule"
    graphs: bool = True
    chunk: int = 8192
    small: bool = False


RUNS = {
    "bf16": Run(("ask", "score"), dtype="auto"),
    "whole": Run(("ask", "again", "alone", "crowd", "score")),
    "eager": Run(("ask",), graphs=False),
    "chunks": Run(("ask", "score"), chunk=256),
    "pool": Run(("crowd",), small=True),
    "raw": Run(("ask",), mode="raw"),
    "k4v2": Run(("ask", "score"), dtype="oscar_k4v2"),
}


class VllmEngine:
    """Stock vLLM in this process."""

    def __init__(self, args: argparse.Namespace, run: Run) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        from vllm import LLM

        options: dict[str, Any] = {"enforce_eager": not run.graphs}
        if run.graphs:
            graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
            options["compilation_config"] = graphs
        if run.small:
            options["num_gpu_blocks_override"] = args.longest // 128 + 120
        if run.dtype.startswith("oscar"):
            options["additional_config"] = {"oscar": {"artifact": args.artifact, "prefill_mode": run.mode}}
        self.llm = LLM(
            model=args.model, skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=run.dtype, seed=0,
            max_model_len=args.longest + 256, max_num_seqs=32, max_num_batched_tokens=run.chunk,
            enable_chunked_prefill=True, kv_cache_memory_bytes=1 << 30, max_logprobs=20, disable_log_stats=False,
            **options,
        )  # fmt: skip

    def ask(self, prompts: list[list[int]]) -> list[Record]:
        """Greedy continuations."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=10, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return [
            {
                "tokens": list(o.outputs[0].token_ids),
                "best": [{str(t): x.logprob for t, x in step.items()} for step in o.outputs[0].logprobs],
                "cached": o.num_cached_tokens or 0,
            }
            for o in outputs
        ]

    def score(self, prompts: list[list[int]]) -> list[Record]:
        """Log probability of each prompt token but the first, and the likeliest token at each place."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        found = []
        for output, prompt in zip(outputs, prompts, strict=True):
            places = list(zip(output.prompt_logprobs[1:], prompt[1:], strict=True))
            found.append({
                "logprobs": [place[t].logprob for place, t in places],
                "best": [max(place, key=lambda t: place[t].logprob) for place, _ in places],
            })  # fmt: skip
        return found

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.llm.reset_prefix_cache()

    def preemptions(self) -> int:
        """Since the start."""
        return sum(m.value for m in self.llm.get_metrics() if m.name == "vllm:num_preemptions")

    def close(self) -> None:
        """Stop."""
        self.llm.llm_engine.engine_core.shutdown()


class SglangEngine:
    """Stock SGLang; its scheduler runs in a process of its own."""

    def __init__(self, args: argparse.Namespace, run: Run) -> None:
        os.environ |= {"OSCAR_ARTIFACT": args.artifact, "OSCAR_PREFILL_MODE": run.mode}
        if run.small:  # SGLang's own test switch: every few steps running requests are retracted
            os.environ |= {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "16"}
        import sglang

        self.retractions = 0
        self.engine = sglang.Engine(
            model_path=args.model, skip_tokenizer_init=True, dtype="bfloat16", kv_cache_dtype=run.dtype,
            context_length=args.longest + 256, max_running_requests=32, chunked_prefill_size=run.chunk,
            attention_backend="triton", sampling_backend="pytorch", disable_cuda_graph=not run.graphs, random_seed=0,
            log_level="info", max_total_tokens=4 * args.longest if run.small else 1 << 17,
        )  # fmt: skip

    def ask(self, prompts: list[list[int]]) -> list[Record]:
        """Greedy continuations."""
        outputs = self.engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": NEW, "temperature": 0.0, "ignore_eos": True},
            return_logprob=True, top_logprobs_num=10,
        )  # fmt: skip
        self.retractions += sum(o["meta_info"].get("num_retractions", 0) for o in outputs)
        return [
            {
                "tokens": list(o["output_ids"]),
                "best": [{str(t): x for x, t, *_ in step} for step in o["meta_info"]["output_top_logprobs"]],
                "cached": o["meta_info"]["cached_tokens"],
            }
            for o in outputs
        ]

    def score(self, prompts: list[list[int]]) -> list[Record]:
        """Log probability of each prompt token but the first, and the likeliest token at each place."""
        outputs = self.engine.generate(
            input_ids=prompts, sampling_params={"max_new_tokens": 1, "temperature": 0.0}, return_logprob=True,
            logprob_start_len=0, top_logprobs_num=1,
        )  # fmt: skip
        return [
            {
                "logprobs": [x[0] for x in o["meta_info"]["input_token_logprobs"][1:]],
                "best": [step[0][1] for step in o["meta_info"]["input_top_logprobs"][1:]],
            }
            for o in outputs
        ]

    def forget(self) -> None:
        """Empty the prefix cache."""
        self.engine.flush_cache()

    def preemptions(self) -> int:
        """Since the start."""
        return self.retractions

    def close(self) -> None:
        """Stop."""
        self.engine.shutdown()


ENGINES: dict[str, type[VllmEngine | SglangEngine]] = {"vllm": VllmEngine, "sglang": SglangEngine}


def prompts(args: argparse.Namespace) -> dict[str, list[list[int]]]:
    """Questions; documents of several lengths with a question behind; a crowd of them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    text = tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]

    def chat(content: str) -> list[int]:
        message = [{"role": "user", "content": content}]
        return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)["input_ids"])

    def document(start: int, length: int) -> list[int]:
        return chat(f"{tokenizer.decode(text[start : start + length])}\n\nWhat is the text above about?")[
            : args.longest
        ]

    sizes = [args.longest * i // 6 for i in range(1, 7)]
    return {
        "ask": [chat(q) for q in QUESTIONS] + [document(3000 * i, n - 64) for i, n in enumerate(sizes)],
        "crowd": [document(900 * i, args.longest * (8 + i % 5) // 16) for i in range(20)],
        "score": [text[i : i + args.longest - 2] for i in (20_000, 30_000)],
    }


def work(args: argparse.Namespace) -> None:
    """Start the engine of one run, ask it, and leave what it says."""
    run, asked = RUNS[args.work], prompts(args)
    started = time.perf_counter()
    engine = ENGINES[args.engine](args, run)
    found: Record = {"start seconds": time.perf_counter() - started}
    if "ask" in run.asked:
        found["ask"] = engine.ask(asked["ask"])
    if "again" in run.asked:
        found["again"] = engine.ask(asked["ask"])
    if "alone" in run.asked:
        engine.forget()
        found["alone"] = [engine.ask([p])[0] for p in asked["ask"]]
    if "crowd" in run.asked:
        engine.forget()
        found["crowd"] = engine.ask(asked["crowd"])
        found["preemptions"] = engine.preemptions()
    if "score" in run.asked:
        engine.forget()
        found["score"] = engine.score(asked["score"])
    found["lengths"] = [len(p) for p in asked["ask"]]
    (args.out / f"{args.engine}.{args.work}.json").write_text(json.dumps(found))
    engine.close()


def partings(a: list[Record], b: list[Record]) -> list[float]:
    """For each pair of continuations: 0 if they are equal, else by how much the likelier token is ahead."""
    out = []
    for x, y in zip(a, b, strict=True):
        gap = 0.0
        for p, (s, t) in enumerate(zip(x["tokens"], y["tokens"], strict=True)):
            if s != t:
                sides = ((x["best"][p], s, t), (y["best"][p], t, s))
                gap = max(side.get(str(own), 0.0) - side.get(str(other), -99.0) for side, own, other in sides)
                break
        out.append(gap)
    return out


def agree(a: list[Record], b: list[Record], tie: float) -> Record:
    """Verdict on two runs' continuations."""
    gaps = partings(a, b)
    return {
        "ok": max(gaps) <= tie, "equal": sum(g == 0 for g in gaps), "of": len(gaps), "worst gap": round(max(gaps), 4),
        "allowed": tie,
    }  # fmt: skip


def quality(runs: dict[str, Record], name: str, top1: float, gap: float) -> Record:
    """Prompt tokens that read quantized history, against BF16: same likeliest token, distance of log probabilities."""
    same, distance = [], []
    for ours, base in zip(runs[name]["score"], runs["bf16"]["score"], strict=True):
        pairs = zip(ours["logprobs"], base["logprobs"], strict=True)
        distance += [abs(x - y) for x, y in pairs][QUANTIZED_FROM:]
        same += [x == y for x, y in zip(ours["best"], base["best"], strict=True)][QUANTIZED_FROM:]
    share, mean = sum(same) / len(same), sum(distance) / len(distance)
    return {
        "ok": share >= top1 and mean <= gap, "top-1 %": round(100 * share, 2), "must": 100 * top1,
        "mean |dlogprob|": round(mean, 4), "allowed": gap, "tokens": len(same),
    }  # fmt: skip


def check_sensible(runs: dict[str, Record], args: argparse.Namespace) -> Record:
    """Every run names Paris, and the first token's log probabilities are near BF16's."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    answers = {name: tokenizer.decode(run["ask"][0]["tokens"][:12]) for name, run in runs.items() if "ask" in run}
    base, first = runs["bf16"]["ask"], {}
    for name, run in runs.items():
        gaps = [
            abs(ours["best"][0][t] - x)
            for ours, theirs in zip(run.get("ask", []), base, strict=False)
            for t, x in sorted(theirs["best"][0].items(), key=lambda item: -item[1])[:3]
            if t in ours["best"][0]
        ]
        if gaps:
            first[name] = round(sum(gaps) / len(gaps), 4)
    ok = all("Paris" in a for a in answers.values()) and max(first.values()) <= 0.5
    return {"ok": ok, "answers": answers, "mean |dlogprob| of the first token's best three": first, "allowed": 0.5}


def check_prefix(runs: dict[str, Record], args: argparse.Namespace) -> Record:
    """Cold and on a prefix hit. SGLang computes the tail again behind INT2 keys: it may differ by what those cost."""
    whole = runs["whole"]
    found = agree(whole["ask"], whole["again"], args.tie * (2 if args.engine == "sglang" else 1))
    cached = [a["cached"] for a in whole["again"]]
    hit = all(c > 0 for c, n in zip(cached, whole["lengths"], strict=True) if n > QUANTIZED_FROM)
    return found | {"ok": found["ok"] and hit, "cached": cached, "lengths": whole["lengths"]}


def check_pool(runs: dict[str, Record], args: argparse.Namespace) -> Record:
    """Preempted and not."""
    found, preemptions = agree(runs["whole"]["crowd"], runs["pool"]["crowd"], args.tie), runs["pool"]["preemptions"]
    return found | {"ok": found["ok"] and preemptions > 0, "preemptions": preemptions}


def check_chunks(runs: dict[str, Record], args: argparse.Namespace) -> Record:
    """Chunks of 256 tokens and the whole prompt: continuations, and log probabilities of prompts."""
    found = agree(runs["whole"]["ask"], runs["chunks"]["ask"], args.tie)
    pairs = [
        (x, y)
        for a, b in zip(runs["whole"]["score"], runs["chunks"]["score"], strict=True)
        for x, y in zip(a["logprobs"], b["logprobs"], strict=True)
    ]
    mean = sum(abs(x - y) for x, y in pairs) / len(pairs)
    return found | {"ok": found["ok"] and mean <= 0.05, "mean |dlogprob|": round(mean, 5), "mean allowed": 0.05}


#: Check → (runs that it compares, how).
CHECKS: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Record], argparse.Namespace], Record]]] = {
    "sensible": (("bf16", "whole", "raw", "k4v2"), check_sensible),
    "quality": (("bf16", "whole"), lambda runs, args: quality(runs, "whole", 0.88, 0.3)),
    "quality k4v2": (("bf16", "k4v2"), lambda runs, args: quality(runs, "k4v2", 0.94, 0.12)),
    "prefix": (("whole",), check_prefix),
    "batch": (("whole",), lambda runs, args: agree(runs["whole"]["ask"], runs["whole"]["alone"], args.tie)),
    "graphs": (("whole", "eager"), lambda runs, args: agree(runs["whole"]["ask"], runs["eager"]["ask"], args.tie)),
    "chunks": (("whole", "chunks"), check_chunks),
    "pool": (("whole", "pool"), check_pool),
}  # fmt: skip


def start(args: argparse.Namespace, name: str) -> Record:
    """One run in a process of its own."""
    command = [
        sys.executable, "-m", "benchmarks.gpu_engine_checks", args.engine, "--model", args.model, "--out",
        str(args.out), "--artifact", args.artifact, "--longest", str(args.longest), "--work", name,
    ]  # fmt: skip
    started, log = time.perf_counter(), args.out / f"{args.engine}.{name}.log"
    (args.out / f"{args.engine}.{name}.json").unlink(missing_ok=True)
    try:
        with log.open("w") as out:
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=args.timeout, check=False)
        problem = "" if status.returncode == 0 else f"exit status {status.returncode}"
    except subprocess.TimeoutExpired:
        problem = f"not done in {args.timeout} s"
    line = {"engine": args.engine, "run": name, "ok": not problem, "seconds": round(time.perf_counter() - started, 1)}
    if problem:
        last = log.read_text(errors="replace").strip().splitlines()[-8:]
        line |= {"problem": problem, "log": [x[-300:] for x in last]}
    return line


def check(args: argparse.Namespace, name: str) -> Record:
    """One check over what the runs left."""
    needed, compare = CHECKS[name]
    line: Record = {"engine": args.engine, "check": name}
    try:
        runs = {r: json.loads((args.out / f"{args.engine}.{r}.json").read_text()) for r in needed}
        return line | compare(runs, args)
    except Exception as error:  # the other checks are worth having
        return line | {"ok": False, "problem": f"{type(error).__name__}: {error}"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, check, count failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--artifact", default="auto", help="calibration; auto: shipped or in the model's folder")
    parser.add_argument("--longest", type=int, default=3000, help="tokens of the longest prompt")
    parser.add_argument("--tie", type=float, default=0.5, help="log probabilities this near count as equal")
    parser.add_argument("--timeout", type=int, default=240, help="seconds for a run")
    parser.add_argument("--runs", type=lambda s: s.split(","), default=list(RUNS), help="'' to only check")
    parser.add_argument("--checks", type=lambda s: s.split(","), default=list(CHECKS))
    parser.add_argument("--work", choices=list(RUNS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    args.model = str(args.model)
    if args.work:
        work(args)
        return 0
    failures = 0
    for lines in ((start(args, r) for r in args.runs if r), (check(args, c) for c in args.checks if c)):
        for line in lines:
            failures += not line["ok"]
            print(json.dumps(line), flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main())

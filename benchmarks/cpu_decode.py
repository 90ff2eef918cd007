"""Decoding on a CPU: attention alone, and the whole model beside transformers with a BF16 DynamicCache.

    python -m benchmarks.cpu_decode                       both, at 4K and 8K, and the result file
    python -m benchmarks.cpu_decode --only attention      without a model
    python -m benchmarks.cpu_decode --threads 2 --artifact hadamard

The candidates take turns of a few tokens each, so that whatever else the machine does meets them alike. A number is the
median over all tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.result import RESULTS, write_result
from oscar_serving.attention import AttentionBackend, AttentionSpec, BatchTables, LayerCache, select_backend
from oscar_serving.attention.torch_backend import TorchBackend
from oscar_serving.codec import PageLayout
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform


class Shape(NamedTuple):
    """Attention of a model."""

    layers: int
    heads: int
    ratio: int
    head_dim: int


SMOLLM2 = Shape(layers=30, heads=3, ratio=3, head_dim=64)
#: What `oscar calibrate` picks for heads of 64 channels.
CONFIG = OscarConfig(scale_dtype="float8_e4m3")
TURN = 8  # tokens
Step = Callable[[], object]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["attention", "model"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192], help="tokens in the cache at the end")
    parser.add_argument("--tokens", type=int, default=64, help="decode steps timed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--artifact", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for context in options.contexts:
            if options.only != "model":
                rows += attention_rows(SMOLLM2, context, options.tokens)
            if options.only != "attention":
                rows += model_rows(context, options.tokens, options.artifact)
    for row in rows:
        print(row["case"], row["metric"], f"{row['ours']:.4g}", row["baselines"], row["unit"])
    print(write_result("cpu-decode", rows, f"{processor()}, {options.threads} threads", options.out))


def take_turns(steps: dict[str, Step], tokens: int) -> dict[str, float]:
    """Median seconds of a call of each, ``tokens`` calls each in turns of :data:`TURN`."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for start in range(0, tokens, TURN):
        for name, step in steps.items():
            for _ in range(min(TURN, tokens - start)):
                begin = time.perf_counter()
                step()
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def attention_rows(shape: Shape, context: int, tokens: int) -> list[dict[str, Any]]:
    """Store and attend of one new token in all layers: compiled, eager, and PyTorch's attention over BF16 K and V.

    The BF16 baseline has its K and V contiguous and appends nothing, which no real cache can do as fast.
    """
    backend = select_backend("cpu")
    q = torch.randn(1, shape.heads * shape.ratio, shape.head_dim, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, shape.heads, shape.head_dim, dtype=torch.bfloat16)
    quantized = [oscar_layer(shape, context) for _ in range(shape.layers)]
    full = torch.randn(shape.layers, 2, 1, shape.heads, context, shape.head_dim, dtype=torch.bfloat16)

    def oscar(implementation: AttentionBackend) -> Step:
        def step() -> None:
            tables = decode_tables(context, CONFIG)
            for layer in quantized:
                implementation.store(layer, k, v, tables)
                implementation.attend(layer, q, k, v, tables)

        return step

    def bf16() -> None:
        for keys, values in full:
            torch.nn.functional.scaled_dot_product_attention(q[None].transpose(1, 2), keys, values, enable_gqa=True)

    times = take_turns(
        {"ours": oscar(backend), "oscar_int2, eager PyTorch": oscar(TorchBackend()), "bf16": bf16}, tokens
    )
    ms = {name: 1e3 * t for name, t in times.items()}
    return [
        {
            "case": f"attention of {shape.layers} layers, batch 1, {context} tokens ({backend.name} backend)",
            "metric": "time of a token",
            "unit": "ms",
            "ours": ms.pop("ours"),
            "baselines": {"BF16, scaled_dot_product_attention": ms.pop("bf16"), **ms},
            "ratio": times["ours"] / times["bf16"],
            "must": None,
            "aim": 1.0,
            "direction": "lower",
        }
    ]


def oscar_layer(shape: Shape, context: int) -> LayerCache:
    """A layer with random codes; scales are small numbers."""
    pages = -(-context // CONFIG.page_size) + 1
    layer = LayerCache.allocate(
        PageLayout(shape.head_dim, CONFIG),
        LayerTransform.plain(shape.heads, shape.head_dim),
        AttentionSpec(shape.head_dim**-0.5),
        pages=pages,
        window_pages=pages,
    )
    layer.pages.random_(0, 48)
    layer.windows.normal_()
    return layer


def decode_tables(context: int, config: OscarConfig) -> BatchTables:
    """One request, one new token, window pages for the sink and the recent tokens."""
    size = config.page_size
    pages = torch.arange(1, -(-context // size) + 1, dtype=torch.int32)[None]
    windows = pages.clone()
    windows[:, -(-config.sink // size) : (context - config.recent) // size] = 0
    host = [0, 1], [context], [context]
    ints = [torch.tensor(x, dtype=torch.int32) for x in host]
    return BatchTables(*ints, pages, windows, host)


def model_rows(context: int, tokens: int, artifact: str) -> list[dict[str, Any]]:
    """Decode of SmolLM2-135M: the embedded engine with INT2 and with paged BF16, and transformers."""
    from oscar_serving.models import get_model

    folder = get_model("smollm2")
    prompt = torch.randint(1000, 40000, (context - tokens - 8,), generator=torch.Generator().manual_seed(0)).tolist()
    engines = {name: engine_step(folder, name, artifact, prompt, tokens) for name in ("oscar_int2", "bf16")}
    steps = {name: step for name, (step, _) in engines.items()}
    steps["transformers"] = transformers_step(folder, prompt)
    rate = {name: 1 / t for name, t in take_turns(steps, tokens).items()}
    baselines = {"transformers DynamicCache, BF16": rate["transformers"], "embedded engine, BF16": rate["bf16"]}
    stored = {name: size for name, (_, size) in engines.items()}
    return [
        {
            "case": f"SmolLM2-135M, batch 1, {context} tokens",
            "metric": "decode",
            "unit": "token/s",
            "ours": rate["oscar_int2"],
            "baselines": baselines,
            "ratio": rate["oscar_int2"] / rate["transformers"],
            "must": 1.0,
            "aim": 1.5,
            "direction": "higher",
        },
        {
            "case": f"SmolLM2-135M, batch 1, {context} tokens",
            "metric": "cache bytes of a token, windows apart",
            "unit": "byte",
            "ours": stored["oscar_int2"],
            "baselines": {"embedded engine, BF16": stored["bf16"]},
            "ratio": stored["oscar_int2"] / stored["bf16"],
            "must": 1 / 6.5,
            "aim": 1 / 7,
            "direction": "lower",
        },
    ]


def engine_step(folder: Path, dtype: str, artifact: str, prompt: list[int], tokens: int) -> tuple[Step, float]:
    """One decode step of the embedded engine after the prompt; bytes of a token in its cache."""
    from oscar_serving.engines.hf import Engine, EngineOptions, SamplingParams

    options = EngineOptions(kv_cache_dtype=dtype, artifact=artifact, max_num_seqs=1, device="cpu", dtype="bfloat16")
    engine = Engine.load(folder, options)
    outputs: list[object] = []
    params = SamplingParams(temperature=0.0, max_tokens=tokens + 8, ignore_eos=True)
    engine.submit("benchmark", prompt, params, outputs.append)
    while not outputs:
        engine.step()

    def step() -> None:
        before = engine.stats().generated_tokens
        engine.step()
        if engine.stats().generated_tokens != before + 1:
            raise RuntimeError(f"{dtype}: a step did not generate one token")

    return step, engine.stats().bytes_per_token


def transformers_step(folder: Path, prompt: list[int]) -> Step:
    """One greedy decode step of transformers with a DynamicCache after the prompt."""
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([prompt]), cache=cache, logits_to_keep=1).logits
    token = logits[:, -1].argmax(-1, keepdim=True)

    def step() -> None:
        nonlocal token
        token = model(token, cache=cache, logits_to_keep=1).logits[:, -1].argmax(-1, keepdim=True)

    return step


def processor() -> str:
    """The CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else "CPU"


if __name__ == "__main__":
    main()

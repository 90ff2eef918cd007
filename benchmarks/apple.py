"""The packed SRFT cache on a CPU: decode beside transformers' caches, encoding beside rfft and a GEMM, peak memory.

    python -m benchmarks.apple [--parts decode encode memory] [--threads 1]

Writes ``benchmarks/results/apple-<date>.json``, anew after each part. For a Mac there is ``benchmarks.apple_decode``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import apple_decode
from benchmarks.result import RESULTS, write_result
from oscar_kernels.cpu.srft import PagedRows, srft_kernels
from oscar_serving import models
from oscar_serving.codec.signed import quantize_signed
from oscar_serving.codec.srft_int4 import SideTransform, SrftConfig, clean
from oscar_serving.engines.apple import SRFTInt4Cache
from oscar_serving.rotation import signs

VECTORS = 8192
PARTS = ("encode", "decode", "memory")


def decode(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time a token and bytes of the cache, Gemma-3 270M in float32."""
    model = AutoModelForCausalLM.from_pretrained(models.get_model("gemma3-270m"), dtype=torch.float32).eval()
    label = f"Gemma-3-270M, float32, K4 V4 g32, {options.threads} thread(s)"
    return apple_decode.measure(model, label, SrftConfig(), options.context, options.steps)


def encode(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Nanoseconds to rotate, quantize and pack a vector."""
    rows = []
    for d in (64, 128, 256):
        config = SrftConfig()
        groups = config.groups(d)
        side = SideTransform.build(config.matrix(d), torch.ones(1, d))
        x = torch.randn(1, 1, VECTORS, d, generator=torch.Generator().manual_seed(d))
        codes = torch.zeros(1, 1, VECTORS, d // 2, dtype=torch.uint8)
        scales = torch.zeros(1, 1, VECTORS, groups, dtype=torch.float16)
        paged = PagedRows(codes, scales, codes.clone(), scales.clone(), d)
        places = torch.zeros(VECTORS, dtype=torch.int64), torch.arange(VECTORS)
        pattern, inverse = signs(d).float(), side.inverse_factors[:, None]
        matrix, flat = side.encode_matrix.contiguous(), x[0].transpose(0, 1).contiguous()

        def ours(args: Any = (paged, flat, matrix, *places)) -> None:
            srft_kernels().store(*args, value=False)

        def gemm(x: Any = x, side: Any = side, groups: int = groups) -> object:
            return side.encode(x, 4, groups)

        def rfft(x: Any = x, pattern: Any = pattern, inverse: Any = inverse, d: int = d) -> object:
            spectrum = torch.fft.rfft(clean(x) * pattern, norm="ortho")
            edges = spectrum[..., (0, d // 2)].real
            inner = torch.view_as_real(spectrum[..., 1 : d // 2]).flatten(-2) * 2**0.5
            return quantize_signed(torch.cat([edges, inner], -1) * inverse, 4, 32)

        times = _in_turns({"ours": ours, "dense GEMM": gemm, "rfft + pack": rfft})
        spent = {name: round(1e9 * seconds / VECTORS, 1) for name, seconds in times.items()}
        mine = spent.pop("ours")
        case = f"d = {d}, K4 g32, {VECTORS} vectors, {options.threads} thread(s)"
        rows.append(_row(case, "encode, time a vector", "ns", mine, spent, must=None))
    return rows


def memory(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Peak resident memory above the loaded model's: a prompt in chunks of 512, then decoding.

    The model is in float32, which every CPU computes fast; the float16 figure is that of K and V alone, without the
    activations and scratch that are in the two measured ones.
    """
    context = multiprocessing.get_context("spawn")
    found = {}
    for name in ("SRFTInt4Cache", "DynamicCache"):
        with context.Pool(1) as pool:
            found[name] = pool.apply(_peak, (name, options.prompt, options.answer, options.threads))
    (mine, float16), (plain, _) = found["SRFTInt4Cache"], found["DynamicCache"]
    case = f"SmolLM2-135M, float32, K4 V4 g32, prompt of {options.prompt}, {options.answer} decoded"
    baselines = {"float16, K and V alone": float16, "DynamicCache": plain}
    return [_row(case, "peak memory above the model's", "byte", mine, baselines)]


def _peak(name: str, prompt: int, answer: int, threads: int) -> tuple[int, int]:
    """Peak above the model's, and (for ours) the bytes of the same rows in float16."""
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(models.get_model("smollm2"), dtype=torch.float32).eval()
    ours = name == "SRFTInt4Cache"
    cache = SRFTInt4Cache(model.config, max_tokens=prompt + answer) if ours else DynamicCache(config=model.config)
    ids = torch.randint(100, model.config.vocab_size, (1, prompt), generator=torch.Generator().manual_seed(0))
    apple_decode.Run(model, DynamicCache(config=model.config), ids[:, :16])  # whatever a first call allocates
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    run = apple_decode.Run(model, cache, ids)
    for _ in range(answer):
        run.decode()
    return _status("VmHWM") - before, cache.bytes().float16 if ours else 0


def _status(field: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def _in_turns(candidates: dict[str, Callable[[], object]], turns: int = 40) -> dict[str, float]:
    """Median seconds of each, one call in turn."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(turns + 2):
        for name, call in candidates.items():
            start = time.perf_counter()
            call()
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent) for name, spent in times.items()}


def _row(
    case: str, metric: str, unit: str, ours: float, baselines: dict[str, Any], must: float | None = 1.0
) -> dict[str, Any]:
    ratio = round(ours / min(baselines.values()), 4)
    return {
        "case": case, "metric": metric, "unit": unit, "ours": ours, "baselines": baselines, "ratio": ratio,
        "must": must, "aim": None, "direction": "lower",
    }  # fmt: skip


def main() -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=4096, help="of the decode part")
    parser.add_argument("--steps", type=int, default=32, help="tokens timed")
    parser.add_argument("--prompt", type=int, default=8192, help="of the memory part")
    parser.add_argument("--answer", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = f"{platform.processor() or platform.machine()}, {options.threads} thread(s)"
    rows: list[dict[str, Any]] = []
    for part in options.parts:
        for row in {"decode": decode, "encode": encode, "memory": memory}[part](options):
            print(f"{row['case']}: {row['metric']} {row['ours']} {row['unit']}, {row['baselines']}", flush=True)
            rows.append(row)
        print(write_result("apple", rows, device, options.out), flush=True)


if __name__ == "__main__":
    main()

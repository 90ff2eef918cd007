"""Kernels beside the best BF16 kernel on one GPU: decode, store, and prefill behind a history.

    python -m benchmarks.kernels                 the table of docs/kernels.md, and the result file
    python -m benchmarks.kernels --variants      also several configurations of the Triton kernels
    python -m benchmarks.kernels --only store    rows whose name has one of these words (or implementations of decode)
    python -m benchmarks.kernels --tune          write the best configuration of each shape to the tuning file

Times are medians over replays of a CUDA graph that walks several input sets, together larger than the L2 cache.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernel_data import Decode, Shape
from benchmarks.kernel_prefill import prefill_rows
from benchmarks.result import RESULTS, write_result
from oscar_kernels.triton.config import DecodeConfig, decode_config, save_tuned, tuning_key
from oscar_kernels.triton.decode import decode, plan, rotate_query, workspace_size
from oscar_kernels.triton.store import Transform, split_rotation, store

Run = Callable[[], object]


class DecodeCase(NamedTuple):
    """A row of the table: batch, keys a request, and what its ratio to BF16 must and should be."""

    name: str
    batch: int
    length: int
    must: float
    aim: float


CASES = (
    DecodeCase("decode, batch 1, 100K", 1, 100_000, 0.40, 0.25),
    DecodeCase("decode, batch 32, 32K", 32, 32_768, 0.33, 0.22),
    DecodeCase("decode, batch 1, 4K", 1, 4096, 1.10, 0.80),
    DecodeCase("decode, batch 128, 2K", 128, 2048, 0.50, 0.30),
)
VARIANTS: dict[str, DecodeConfig] = {
    "w4n32s4": DecodeConfig(),
    "w4n32s5": DecodeConfig(stages=5),
    "w4n32s3": DecodeConfig(stages=3),
    "w4n32r128": DecodeConfig(registers=128, resident=4),
    "w4n64": DecodeConfig(keys=64, registers=0, resident=2),
    "w2n64": DecodeConfig(warps=2, keys=64, registers=168, resident=6),
    "w2n32": DecodeConfig(warps=2, resident=6),
    "w1n64": DecodeConfig(warps=1, keys=64, registers=224, resident=9),
    "w1n128": DecodeConfig(warps=1, keys=128, registers=0, resident=8),
    "waves2": DecodeConfig(waves=2),
    "waves8": DecodeConfig(waves=8),
    "plain-unpack": DecodeConfig(packed=False),
    "pdl": DecodeConfig(pdl=True),
}
#: Form of the rotation, and tiling. The first is the default.
STORE_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "store": ("two parts", {}),
    "two parts 64x2": ("two parts", {"tiles": 2}),
    "two parts 64x4": ("two parts", {"tiles": 4}),
    "two parts 64x16": ("two parts", {"tiles": 16}),
    "two parts 128x4": ("two parts", {"block": 128, "tiles": 4, "warps": 8}),
    "one part 64x4": ("one part", {"tiles": 4}),
    "one part 64x8": ("one part", {"tiles": 8}),
    "one part 128x4": ("one part", {"block": 128, "tiles": 4, "warps": 8}),
    "float16 64x4": ("float16", {"tiles": 4}),
    "float16 64x8": ("float16", {"tiles": 8}),
    "tf32 64x8": ("tf32", {}),
}
SETS_BYTES = 256 << 20
ERROR_LIMIT = 5e-3


def measure(runs: list[Run], target_s: float = 0.15) -> float:
    """Median seconds of one run, from replays of a graph over all ``runs``."""
    for run in runs:
        run()
    torch.cuda.synchronize()
    repeat = max(1, 20 // len(runs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            for run in runs:
                run()
    calls = repeat * len(runs)
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    deadline = time.perf_counter() + target_s
    while len(times) < 7 or (time.perf_counter() < deadline and len(times) < 200):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls / 1e3)
    return statistics.median(times)


def sets_for(bytes_: int) -> int:
    """How many input sets exceed the L2 cache several times."""
    return max(1, min(64, -(-SETS_BYTES // max(1, bytes_))))


def wanted(only: str, *names: str) -> bool:
    """Whether ``--only`` is empty or one of its words is in one of the names."""
    return not only or any(word.strip() in name for word in only.split(",") for name in names)


def error_of(out: Tensor, data: Decode) -> float:
    """Largest relative error over the first and the last request."""
    worst = 0.0
    for request in {0, data.lengths.shape[0] - 1}:
        want = data.reference(request)
        error = ((out[request].double() - want).norm() / want.norm()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst


def triton_run(data: Decode, config: DecodeConfig) -> tuple[Run, Tensor]:
    """Rotation of q, attention and merge; the output is poisoned once."""
    shape, device = data.shape, data.q.device
    batch, ratio = data.lengths.shape[0], data.shape.query_heads // data.shape.heads
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    geometry = plan(batch, shape.heads, ratio, 1, int(data.lengths.max()), sms, config)
    space = torch.empty(workspace_size(batch, shape.heads, shape.head_dim, geometry), device=device)
    rotated = torch.empty_like(data.q, dtype=torch.float32)
    out = torch.full_like(data.q, float("nan"))

    def run() -> None:
        rotate_query(data.q, data.rotation, rotated, pdl=config.pdl)
        decode(
            rotated, data.views, data.windows, data.page_table, data.query_start, data.lengths,
            geometry=geometry, workspace=space, out=out, sink=shape.sink, recent=shape.recent,
            scale=shape.head_dim**-0.5, k_unit=data.ones, v_unit=data.ones, v_rotation=data.rotation,
        )  # fmt: skip

    return run, out


def cuda_run(data: Decode) -> tuple[Run, Tensor]:
    """The CUDA kernel, which rotates q itself."""
    from oscar_kernels.cuda import decode as cuda

    shape, device = data.shape, data.q.device
    batch, ratio = data.lengths.shape[0], shape.query_heads // shape.heads
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    geometry = cuda.plan(
        batch, shape.heads, ratio, shape.head_dim, shape.page_size,
        max_queries=1, max_length=int(data.lengths.max()), sms=sms,
    )  # fmt: skip
    floats, ints = cuda.workspace_size(batch, shape.heads, shape.head_dim, geometry)
    partial, arrived = torch.empty(floats, device=device), torch.zeros(ints, dtype=torch.int32, device=device)
    out = torch.full_like(data.q, float("nan"))
    back, turn = cuda.back_matrix(data.rotation), cuda.turn_matrix(data.rotation)

    def run() -> None:
        cuda.decode(
            data.q, data.views, (data.windows.k, data.windows.v), data.page_table, data.windows.table,
            data.query_start, data.lengths, geometry=geometry, partial=partial, arrived=arrived, out=out,
            sink=shape.sink, recent=shape.recent, scale=shape.head_dim**-0.5, k_unit=data.ones, v_unit=data.ones,
            v_back=back, k_turn=turn,
        )  # fmt: skip

    return run, out


def flash_runs(shape: Shape, batch: int, length: int, sets: int, device: torch.device) -> dict[str, list[Run]]:
    """FlashAttention 3 as vLLM calls it, BF16 and FP8: its heuristic splits, and vLLM's limit under CUDA graphs."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    page = 128
    count = -(-length // page)
    q_start = torch.arange(batch + 1, dtype=torch.int32, device=device)
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    q16 = torch.randn(batch, shape.query_heads, shape.head_dim, device=device).bfloat16()
    out = torch.empty_like(q16)
    runs: dict[str, list[Run]] = {}
    for kind, dtype in (("FA3 BF16", torch.bfloat16), ("FA3 FP8", torch.float8_e4m3fn)):
        caches = []
        for _ in range(sets):
            kv = torch.empty(2, batch * count, page, shape.heads, shape.head_dim, dtype=dtype, device=device)
            for i in range(0, kv.shape[1], 64):
                kv[:, i : i + 64] = torch.randn(kv[:, i : i + 64].shape, device=device).to(dtype)
            table = torch.randperm(batch * count, device=device).int().view(batch, count)
            caches.append((kv, table))
        scale = torch.ones(batch, shape.heads, device=device)
        descale = {"q_descale": scale, "k_descale": scale, "v_descale": scale} if kind == "FA3 FP8" else {}
        for splits in (0, 32):
            metadata = get_scheduler_metadata(
                batch, 1, length, shape.query_heads, shape.heads, shape.head_dim, lengths, qkv_dtype=dtype,
                cu_seqlens_q=q_start, page_size=page, causal=True, num_splits=splits,
            )  # fmt: skip

            def call(
                kv: Tensor, table: Tensor, dtype: torch.dtype = dtype, metadata: Tensor = metadata,
                splits: int = splits, descale: dict[str, Tensor] = descale,
            ) -> None:  # fmt: skip
                flash_attn_varlen_func(
                    q16 if dtype == torch.bfloat16 else q16.to(dtype), kv[0], kv[1], 1, q_start, length,
                    seqused_k=lengths, softmax_scale=shape.head_dim**-0.5, causal=True, block_table=table, out=out,
                    scheduler_metadata=metadata, num_splits=splits, fa_version=3, **descale,
                )  # fmt: skip

            runs[f"{kind}, {splits or 'auto'} splits"] = [partial(call, *cache) for cache in caches]
    return runs


def decode_rows(args: argparse.Namespace, device: torch.device, bandwidth: float) -> list[dict[str, Any]]:
    """Measure every decode case."""
    shape, rows, tuned = Shape(), [], {}
    flash = importlib.util.find_spec("vllm") is not None
    if not flash:
        print("FA3: not measured, vllm is not installed")
    for case in CASES:
        if not wanted(args.only, case.name, "triton", "cuda"):
            continue
        data = [Decode.make(shape, case.batch, case.length, device, 0)]
        sets = sets_for(data[0].int_bytes + data[0].window_bytes)
        data += [Decode.make(shape, case.batch, case.length, device, i) for i in range(1, sets)]
        ratio = shape.query_heads // shape.heads
        default = decode_config(
            device, head_dim=shape.head_dim, k_bits=shape.k_bits, v_bits=shape.v_bits, ratio=ratio,
            page_size=shape.page_size, rows=ratio,
        )  # fmt: skip
        makers: dict[str, Callable[[Decode], tuple[Run, Tensor]]] = {
            "triton": partial(triton_run, config=default),
            "cuda": cuda_run,
        }
        if args.variants or args.tune:
            for name, config in VARIANTS.items():
                makers[f"triton {name}"] = partial(triton_run, config=config)
        ours: dict[str, float] = {}
        for name, maker in makers.items():
            if not wanted(args.only, case.name, name):
                continue
            try:
                pairs = [maker(d) for d in data]
                seconds = measure([run for run, _ in pairs])
                error = error_of(pairs[0][1], data[0])
            except Exception as problem:  # one bad variant must not cost the whole lease
                print(f"{case.name:24} {name:20} failed: {str(problem).splitlines()[0][:150]}", flush=True)
                continue
            share = (data[0].int_bytes + data[0].window_bytes) / seconds / bandwidth
            verdict = "" if error <= ERROR_LIMIT else "  WRONG"
            line = f"{case.name:24} {name:20} {seconds * 1e6:9.1f} us  {share:6.1%} of copy  error {error:.1e}{verdict}"
            print(line, flush=True)
            if not verdict:
                ours[name] = seconds
        del data
        baselines: dict[str, float] = {}
        if flash:
            bytes_ = case.batch * case.length * 4 * shape.heads * shape.head_dim
            try:
                for name, runs in flash_runs(shape, case.batch, case.length, sets_for(bytes_), device).items():
                    baselines[name] = measure(runs)
                    print(f"{case.name:24} {name:20} {baselines[name] * 1e6:9.1f} us", flush=True)
            except Exception as problem:
                print(f"{case.name:24} FA3 failed: {str(problem).splitlines()[0][:150]}", flush=True)
        torch.cuda.empty_cache()
        if not ours:
            continue
        best_triton = min((n for n in ours if n.startswith("triton ")), key=ours.__getitem__, default=None)
        if best_triton:
            tuned[case.name] = best_triton
        name = min(ours, key=ours.__getitem__)
        bf16 = min((s for n, s in baselines.items() if "BF16" in n), default=None)
        rows.append(
            {
                "case": case.name,
                "metric": f"time of one layer ({name}; q rotated and o rotated back included)",
                "unit": "us",
                "ours": ours[name] * 1e6,
                "baselines": {n: s * 1e6 for n, s in (baselines | ours).items() if n != name},
                "ratio": ours[name] / bf16 if bf16 else None,
                "must": case.must,
                "aim": case.aim,
                "direction": "lower",
            }
        )
    if args.tune and (best := tuned.get(CASES[1].name)):
        key = tuning_key(torch.cuda.get_device_name(device), 128, 2, 2, 4, shape.page_size)
        print("tuned:", save_tuned({key: VARIANTS[best.removeprefix("triton ")]}))
    return rows


def store_rows(args: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measure the store of 16K tokens beside a plain copy of the same K and V."""
    shape, tokens = Shape(), 16_384
    data = Decode.make(shape, 1, tokens, device, 0)
    k, v = (torch.randn(tokens, shape.heads, shape.head_dim, device=device).bfloat16() for _ in range(2))
    k2, v2 = torch.empty_like(k), torch.empty_like(v)

    def copy() -> None:
        k2.copy_(k)
        v2.copy_(v)

    page = data.page_table[0].long()
    position = torch.arange(tokens, device=device)
    slot = page[position // shape.page_size] * shape.page_size + position % shape.page_size
    wpage = data.windows.table[0].long()[position // shape.window_page]
    wslot = torch.where(wpage > 0, wpage * shape.window_page + position % shape.window_page, -1)
    forms = {
        "two parts": split_rotation(data.rotation, torch.bfloat16),
        "one part": split_rotation(data.rotation, torch.bfloat16, 1),
        "float16": split_rotation(data.rotation, torch.float16, 1),
        "tf32": data.rotation,
    }
    baseline = measure([copy])
    print(f"{'store, 16K tokens':24} {'copy of K and V':20} {baseline * 1e6:9.1f} us", flush=True)
    times: dict[str, float] = {}
    variants = list(STORE_VARIANTS.items())
    for name, (form, options) in variants if args.variants else variants[:1]:
        side = Transform(forms[form], None, data.ones * 0.9, data.ones)
        try:
            times[name] = measure([partial(store, k, v, data.views, data.windows, slot, wslot, side, side, **options)])
        except Exception as problem:
            print(f"{name} failed: {str(problem).splitlines()[0][:150]}", flush=True)
            continue
        print(f"{'store, 16K tokens':24} {name:20} {times[name] * 1e6:9.1f} us", flush=True)
    side = Transform(forms["two parts"], None, data.ones * 0.9, data.ones)
    few = measure([partial(store, k[:32], v[:32], data.views, data.windows, slot[:32], wslot[:32], side, side)])
    print(f"{'store, 32 tokens':24} {'store':20} {few * 1e6:9.1f} us", flush=True)
    if "store" not in times:
        return []
    return [
        {
            "case": "store, 16K tokens",
            "metric": "time of one layer",
            "unit": "us",
            "ours": times["store"] * 1e6,
            "baselines": {"copy of K and V": baseline * 1e6},
            "ratio": times["store"] / baseline,
            "must": 2.0,
            "aim": 1.2,
            "direction": "lower",
        }
    ]


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second of a device-to-device copy, read and write counted."""
    a = torch.empty(2 << 30, dtype=torch.uint8, device=device).random_(0, 256)
    b = torch.empty_like(a)
    return 2 * a.numel() / measure([lambda: b.copy_(a)])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variants", action="store_true", help="several configurations of each kernel")
    parser.add_argument("--tune", action="store_true", help="write the best configuration to the tuning file")
    parser.add_argument("--only", default="", help="rows, and kernels of decode, whose name has one of the words")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the result file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.kernels: needs a CUDA GPU; torch sees none")
    device = torch.device("cuda")
    torch.manual_seed(0)
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows = decode_rows(args, device, bandwidth)
    if wanted(args.only, "store, 16K tokens"):
        rows += store_rows(args, device)
    if wanted(args.only, "prefill, 16K new over 84K history"):
        rows += prefill_rows(device)
    print(f"\n{'case':26} {'ours':>9} {'FA3/copy':>9} {'ratio':>6} {'must':>5} {'aim':>5}")
    for row in rows:
        base = row["ours"] / row["ratio"] if row["ratio"] else float("nan")
        ratio = row["ratio"] or float("nan")
        print(f"{row['case']:26} {row['ours']:9.1f} {base:9.1f} {ratio:6.3f} {row['must']:5.2f} {row['aim']:5.2f}")
    # Part of the table is another result: it does not replace the whole.
    name = "-".join(["kernels", *(word.strip().replace(" ", "") for word in args.only.split(",") if word)])
    print(write_result(name, rows, torch.cuda.get_device_name(), args.out))


if __name__ == "__main__":
    main()

"""Decode speed and memory of SRFTInt4Cache beside transformers' own caches: run it on a Mac and send the JSON back.

    python -m benchmarks.apple_decode [--model smollm2] [--contexts 1024 4096] [--device mps|cpu]

Three caches take turns, one token each, in one process: ours, ``DynamicCache`` and a preallocated ``StaticCache``,
the last two under the model's own attention (SDPA).
Writes ``benchmarks/results/apple-decode-<device>-<date>.json``.
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from benchmarks.result import RESULTS, write_result
from oscar_serving import models
from oscar_serving.codec.srft_int4 import SrftConfig
from oscar_serving.engines.apple import SRFTInt4Cache
from oscar_serving.engines.apple.attention import ATTENTION
from oscar_serving.engines.apple.cache import cache_argument

CHUNK = 512
WARM_STEPS = 4
BASELINES = ("DynamicCache", "StaticCache")


class Run:
    """One cache, filled by a prompt; a packed one reads through its own attention, another through SDPA."""

    def __init__(self, model: Any, cache: Any, prompt: torch.Tensor) -> None:
        self._model, self.cache = model, cache
        self._name = cache_argument(model.forward)
        self._attention = ATTENTION if isinstance(cache, SRFTInt4Cache) else "sdpa"
        self._model.set_attn_implementation(self._attention)
        for part in prompt.split(CHUNK, dim=1):
            self._forward(part)

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor) -> None:
        logits = self._model(ids, **{self._name: self.cache}, use_cache=True, logits_to_keep=1).logits
        self._next = logits[:, -1].argmax(-1, keepdim=True)
        self._next.tolist()  # waits for the GPU

    def decode(self) -> float:
        """Seconds of one token."""
        self._model.set_attn_implementation(self._attention)
        start = time.perf_counter()
        self._forward(self._next)
        return time.perf_counter() - start


def caches(model: Any, config: SrftConfig, tokens: int) -> dict[str, Callable[[], Any]]:
    """Cache factories by name."""
    return {
        "SRFTInt4Cache": lambda: SRFTInt4Cache(model.config, config, max_tokens=tokens),
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "StaticCache": lambda: StaticCache(config=model.config, max_cache_len=tokens),
    }


def plain_bytes(cache: Any) -> int:
    """Bytes of the tensors of a transformers cache."""
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


class Peak:
    """Largest GPU memory that torch held within, sampled every millisecond; 0 without an Apple GPU."""

    def __enter__(self) -> Peak:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        if torch.backends.mps.is_available():
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        if self._thread.ident:
            self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self.bytes = max(self.bytes, torch.mps.current_allocated_memory())


def measure(model: Any, label: str, config: SrftConfig, context: int, steps: int) -> list[dict[str, Any]]:
    """Rows of one context length."""
    device = model.device
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(100, model.config.get_text_config().vocab_size, (1, context), generator=generator)
    runs, peaks, stored = {}, {}, {}
    for name, make in caches(model, config, context + steps + WARM_STEPS).items():
        gc.collect()
        with Peak() as peak:
            runs[name] = Run(model, make(), prompt.to(device))
        peaks[name] = peak.bytes
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(steps + WARM_STEPS):
        for name, run in runs.items():
            times[name].append(run.decode())
    for name, run in runs.items():
        stored[name] = run.cache.bytes().allocated if name == "SRFTInt4Cache" else plain_bytes(run.cache)
    decode = {name: 1e3 * statistics.median(spent[WARM_STEPS:]) for name, spent in times.items()}
    rows = []
    for metric, unit, values, must in (
        ("decode, time a token", "ms", decode, 1.0),
        ("bytes of the cache", "byte", stored, None),
        ("peak GPU memory while the prompt is computed", "byte", peaks, 1.0),
    ):
        if not any(values.values()):
            continue
        baselines = {name: round(values[name], 4) for name in BASELINES}
        ours = values["SRFTInt4Cache"]
        rows.append(
            {
                "case": f"{label}, {context} tokens", "metric": metric, "unit": unit, "ours": round(ours, 4),
                "baselines": baselines, "ratio": round(ours / min(baselines.values()), 4), "must": must, "aim": None,
                "direction": "lower",
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="known model or folder")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--k-bits", type=int, default=4)
    parser.add_argument("--v-bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument(
        "--device", choices=("mps", "cpu"), default="mps" if torch.backends.mps.is_available() else "cpu"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = Path(options.model) if Path(options.model).is_dir() else models.get_model(options.model)
    dtype = torch.float16 if options.device == "mps" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(options.device).eval()
    config = SrftConfig(options.k_bits, options.v_bits, options.group_size)
    label = f"{folder.name}, {options.device}, model in {str(dtype).removeprefix('torch.')}"
    label += f", K{options.k_bits} V{options.v_bits} g{options.group_size}"
    rows = [row for context in options.contexts for row in measure(model, label, config, context, options.steps)]
    for row in rows:
        print(f"{row['case']}: {row['metric']} {row['ours']} {row['unit']}, {row['baselines']}, ratio {row['ratio']}")
    device = f"{platform.platform()}, {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    print(write_result(f"apple-decode-{options.device}", rows, device, options.out))


if __name__ == "__main__":
    main()

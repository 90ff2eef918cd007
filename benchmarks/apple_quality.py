"""Perplexity of the SRFT codec's settings on text that it was not calibrated on.

    python -m benchmarks.apple_quality [--model smollm2] [--sequences 4] [--tokens 512]

Every token is read from its codes, in prefill as in decode, so that one pass over a text reads the quantized cache.
Writes ``benchmarks/results/apple-quality-<model>-<date>.json``.
"""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.result import RESULTS, write_result
from oscar_serving import models
from oscar_serving.calibration import texts as calibration_texts
from oscar_serving.codec.srft_int4 import SrftConfig
from oscar_serving.engines.apple import SRFTInt4Cache, use_packed_attention
from oscar_serving.engines.apple.cache import cache_argument, capture, factors_of
from oscar_serving.evaluation.texts import read_texts, sequences

#: Case → settings, and whether per-channel factors are calibrated.
CASES: dict[str, tuple[SrftConfig, bool]] = {
    "K8 V8, g32": (SrftConfig(k_bits=8, v_bits=8), True),
    "K8 V4, g32": (SrftConfig(k_bits=8), True),
    "K4 V4, g16": (SrftConfig(group_size=16), True),
    "K4 V4, g32": (SrftConfig(), True),
    "K4 V4, g32, other signs": (SrftConfig(seed=1), True),
    "K4 V4, g32, third signs": (SrftConfig(seed=2), True),
    "K4 V4, g32, no factors": (SrftConfig(), False),
    "K4 V4, g32, SRHT": (SrftConfig(rotation="srht"), True),
    "K4 V4, g32, SRHT, other signs": (SrftConfig(rotation="srht", seed=1), True),
    "K4 V4, g32, SRHT, third signs": (SrftConfig(rotation="srht", seed=2), True),
    "K4 V4, g32, Householder": (SrftConfig(rotation="householder"), True),
    "K4 V4, g32, unrotated": (SrftConfig(rotation="none"), True),
    "K4 V4, one scale a token": (SrftConfig(group_size=None), False),
    "K4 V4, one scale a token, unrotated": (SrftConfig(group_size=None, rotation="none"), False),
}


@torch.inference_mode()
def log_probabilities(model: Any, ids: Tensor, cache: Any) -> Tensor:
    """Log-probabilities float32 ``[tokens - 1, vocabulary]`` of the tokens after the first."""
    logits = model(ids[None, :-1], **{cache_argument(model.forward): cache}, use_cache=True).logits[0]
    return logits.float().log_softmax(-1)


def loss(predicted: Tensor, ids: Tensor) -> float:
    """Mean negative log-likelihood."""
    return float(-predicted.gather(-1, ids[1:, None]).mean())


def measure(folder: Path, count: int, tokens: int) -> list[dict[str, Any]]:
    """Rows of all cases."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    use_packed_attention(model)
    calibration, _ = calibration_texts.sequences(tokenizer, [("docstrings", calibration_texts.docstrings())], 1024, 512)
    captured = capture(model, torch.stack(calibration))
    evaluated = [torch.as_tensor(s) for s in sequences(tokenizer, read_texts([]), count=count, tokens=tokens)[0]]
    exact = [log_probabilities(model, ids, DynamicCache(config=model.config)) for ids in evaluated]
    baseline = float(torch.tensor([loss(p, ids) for p, ids in zip(exact, evaluated, strict=True)]).mean().exp())
    rows = []
    for case, (config, factors) in CASES.items():
        found = factors_of(captured, config) if factors else None
        losses, divergences, bits = [], [], 0.0
        for ids, expected in zip(evaluated, exact, strict=True):
            cache = SRFTInt4Cache(model.config, config, found)
            predicted = log_probabilities(model, ids, cache)
            losses.append(loss(predicted, ids))
            divergences.append(float((expected.exp() * (expected - predicted)).sum(-1).mean()))
            size = cache.bytes()
            bits = 16 * size.live / size.float16
        perplexity = float(torch.tensor(losses).mean().exp())
        name = f"{folder.name}, {case}"
        for metric, unit, ours, reference in (
            ("perplexity", "", perplexity, {"float32 cache": baseline}),
            ("KL divergence from the float32 cache", "nat", sum(divergences) / count, {}),
            ("stored bits of a value, scales included", "bit", bits, {"float16": 16.0}),
        ):
            ratio = ours / next(iter(reference.values())) if reference else None
            rows.append(
                {
                    "case": name, "metric": metric, "unit": unit, "ours": round(ours, 5), "baselines": reference,
                    "ratio": ratio, "must": None, "aim": None, "direction": "lower",
                }
            )  # fmt: skip
        divergence = sum(divergences) / count
        print(
            f"{name}: perplexity {perplexity:.3f} (exact {baseline:.3f}), KL {divergence:.5f}, {bits} bits", flush=True
        )
    return rows


def main() -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="known model or folder")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    folder = Path(options.model) if Path(options.model).is_dir() else models.get_model(options.model)
    rows = measure(folder, options.sequences, options.tokens)
    name = f"apple-quality-{folder.name.lower()}"
    print(write_result(name, rows, platform.processor() or platform.machine(), options.out))


if __name__ == "__main__":
    main()

"""One rank of a tensor-parallel vLLM engine on the CPU; :mod:`test_tensor_parallel` starts one process a rank.

Prints a JSON line: what a few prompts are answered, which heads of the artifact the layers hold, and what fits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from typing import Any

VOCABULARY = 512


def prompts() -> list[list[int]]:
    """Within the windows, beyond them, and in two chunks."""
    rng = random.Random(0)
    return [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (20, 300, 700)]


def report(args: argparse.Namespace) -> dict[str, Any]:
    """Run the engine."""
    from vllm import LLM, SamplingParams

    from oscar_serving.engines.vllm import transforms
    from oscar_serving.engines.vllm.plugin import register

    register()
    if args.wrong_heads:  # the mistake that the test has to notice
        right = transforms.rank_heads
        transforms.rank_heads = lambda total, ranks, rank: right(total, ranks, ranks - 1 - rank)
    parallel = {"tensor_parallel_size": args.ranks, "distributed_executor_backend": "external_launcher"}
    llm = LLM(
        model=args.model, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, max_num_seqs=8,
        max_num_batched_tokens=512, enforce_eager=True, kv_cache_memory_bytes=64 << 20, kv_cache_dtype="oscar_int2",
        additional_config={"oscar": {"artifact": args.artifact}}, seed=0, disable_log_stats=True,
        **(parallel if args.ranks > 1 else {}),
    )  # fmt: skip
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0, detokenize=False)
    asked = [{"prompt_token_ids": p} for p in prompts()]
    cold, warm = (llm.generate(asked, params, use_tqdm=False) for _ in range(2))
    scores = llm.generate(
        asked, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False), use_tqdm=False
    )  # fmt: skip
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in cold],
        "cached": [o.num_cached_tokens for o in warm],
        "scores": [
            [position[t].logprob for position, t in zip(o.prompt_logprobs[1:], p[1:], strict=True)]
            for o, p in zip(scores, prompts(), strict=True)
        ],
        "shrink": {
            name: layer.oscar_k_shrink.tolist() for name, layer in layers.items() if hasattr(layer, "oscar_k_shrink")
        },
        "blocks": config.cache_config.num_gpu_blocks,
    }  # fmt: skip


if __name__ == "__main__":
    import cpu_engine

    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--wrong-heads", action="store_true")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    cpu_engine.install()
    print("REPORT " + json.dumps(report(parser.parse_args())), flush=True)
    os._exit(0)  # the process group of the other rank may be gone already

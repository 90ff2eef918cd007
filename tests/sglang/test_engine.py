"""The real engine on a CPU, kernels in Triton's interpreter, with a tiny random Llama."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")

SINK, RECENT = 16, 64
POOL = 768
OPTIONS = {
    "OSCAR_ARTIFACT": "hadamard", "OSCAR_SINK": str(SINK), "OSCAR_RECENT": str(RECENT),
    # SGLang's own test switch: every third step a running request is retracted and later computed again.
    "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def start(folder: Path, dtype: str) -> Any:
    import sglang

    return sglang.Engine(
        model_path=str(folder), skip_tokenizer_init=True, dtype="bfloat16", device="cpu", kv_cache_dtype=dtype,
        context_length=640, max_running_requests=4, max_total_tokens=POOL, sampling_backend="pytorch",
        attention_backend="triton", disable_cuda_graph=True, log_level="warning", chunked_prefill_size=128,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OPTIONS.items():
            patch.setenv(name, value)
        running = start(folder, "oscar_int2")
        yield running
        running.shutdown()


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def ask(engine: Any, prompts: list[list[int]], tokens: int, **options: Any) -> list[dict[str, Any]]:
    answers: list[dict[str, Any]] = engine.generate(
        input_ids=prompts, sampling_params={"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}, **options
    )
    return answers


def logprobs(engine: Any, tokens: list[int]) -> torch.Tensor:
    answer = ask(engine, [tokens], 1, return_logprob=True, logprob_start_len=len(tokens) - 20)[0]
    return torch.tensor([x[0] for x in answer["meta_info"]["input_token_logprobs"] if x[0] is not None])


@pytest.mark.slow
def test_answers_in_one_batch_with_retractions_and_alone_are_the_same(engine: Any) -> None:
    prompts = [prompt(n, n) for n in (5, 70, 200)]  # within the window, beyond it, and in two chunks
    answers = ask(engine, prompts, 7)
    assert sum(a["meta_info"].get("num_retractions", 0) for a in answers) > 0
    together = [a["output_ids"] for a in answers]
    engine.flush_cache()
    assert together == [ask(engine, [p], 7)[0]["output_ids"] for p in prompts]
    assert all(len(ids) == 7 for ids in together)


@pytest.mark.slow
def test_a_hit_leaves_the_window_to_be_computed_again(engine: Any) -> None:
    engine.flush_cache()
    tokens = prompt(300, 1)
    cold = logprobs(engine, tokens)
    again = ask(engine, [tokens], 4)[0]
    assert again["meta_info"]["cached_tokens"] == (300 - RECENT) // 64 * 64
    turn = tokens + again["output_ids"] + prompt(90, 2)
    assert ask(engine, [turn], 2)[0]["meta_info"]["cached_tokens"] == 256  # of 300 computed before, whole pages
    # Nothing that the hit read was garbage: it differs from the cold run by what 2 bits cost, and no more.
    assert (logprobs(engine, tokens) - cold).abs().max() < 0.1


@pytest.mark.slow
def test_short_requests_match_the_model(engine: Any, folder: Path) -> None:
    from transformers import LlamaForCausalLM

    tokens = prompt(60, 3)  # everything is in the window: only rotation and bfloat16 differ
    engine.flush_cache()
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        all_logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    wanted = all_logprobs[torch.arange(59), torch.tensor(tokens[1:])]
    ours = logprobs(engine, tokens)
    assert (ours - wanted[-len(ours) :]).abs().max() < 0.05

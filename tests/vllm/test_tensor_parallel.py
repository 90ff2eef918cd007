"""Tensor parallelism: two real CPU engines over gloo against one, with an artifact whose heads all differ."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs

from oscar_serving.calibration import Artifact
from oscar_serving.config import ConfigError, OscarConfig

HERE = Path(__file__).parent
SHRINK = [1.0, 0.6, 0.3, 0.1]


def save_model(folder: Path, kv_heads: int, query_heads: int = 8, *, weights: bool = True) -> Path:
    """Random Llama with attention far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=32 * query_heads, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=query_heads, num_key_value_heads=kv_heads, head_dim=32,
        max_position_embeddings=2048, bos_token_id=1, eos_token_id=2,
        initializer_range=0.08, torch_dtype="bfloat16",
    )  # fmt: skip
    if weights:
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    else:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
    return folder


def save_artifact(model: Path, folder: Path) -> Path:
    """An artifact in which every KV head has its own rotation and its own clip, far from the next one's."""
    from transformers import AutoConfig

    plain = Artifact.plain(AutoConfig.from_pretrained(model), config=OscarConfig(sink=16, recent=64))
    g = torch.Generator().manual_seed(1)

    def rotations(heads: int, d: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(heads, d, d, generator=g, dtype=torch.float64))[0].float()

    layers = {}
    for index, t in plain.layers.items():
        k = rotations(t.heads, t.head_dim)
        shrink = torch.tensor(SHRINK[: t.heads])
        layers[index] = replace(
            t, k_rotation=k, q_rotation=k, v_rotation=rotations(t.heads, t.head_dim), k_shrink=shrink,
            v_shrink=shrink.flip(0).contiguous(),
        )  # fmt: skip
    replace(plain, layers=layers).save(folder)
    return folder


def run(model: Path, artifact: Path, ranks: int, *options: str) -> list[dict[str, Any]]:
    """Report of each rank."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [sys.executable, str(HERE / "tensor_parallel_rank.py"), "--ranks", str(ranks), "--model", str(model),
               "--artifact", str(artifact), *options]  # fmt: skip
    root = HERE.parents[1]
    common = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), str(root / "kernels"), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "VLLM_TARGET_DEVICE": "cpu", "TRITON_INTERPRET": "0",
    }  # fmt: skip
    children = [
        subprocess.Popen(
            command, env=common | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for r in range(ranks)
    ]  # fmt: skip
    try:
        outputs = [child.communicate(timeout=240)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    reports = []
    for output in outputs:
        lines = [line for line in output.splitlines() if line.startswith("REPORT ")]
        assert lines, output[-4000:]
        reports.append(json.loads(lines[0].removeprefix("REPORT ")))
    return reports


def gap(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Mean distance of the prompts' log probabilities."""
    pairs = [(x, y) for p, q in zip(a["scores"], b["scores"], strict=True) for x, y in zip(p, q, strict=True)]
    return sum(abs(x - y) for x, y in pairs) / len(pairs)


@pytest.mark.slow
def test_two_ranks_answer_as_one_and_hold_twice_the_tokens(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", kv_heads=4)
    artifact = save_artifact(model, tmp_path / "artifact")
    alone = run(model, artifact, 1)[0]
    both = run(model, artifact, 2)
    for rank, mine in enumerate(both):
        assert list(mine["shrink"].values()) == [pytest.approx(SHRINK[2 * rank : 2 * rank + 2])] * 2
        assert mine["cached"] == alone["cached"] == [0, 256, 640]
        assert mine["tokens"] == both[0]["tokens"]
    assert 1.98 < both[0]["blocks"] / alone["blocks"] < 2.02
    near = gap(alone, both[0])
    wrong = gap(alone, run(model, artifact, 2, "--wrong-heads")[0])
    # The order of additions is another one; the heads of the other rank are a different matter.
    assert near < 0.05
    assert wrong > 5 * near


@pytest.mark.slow
def test_one_head_is_replicated(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", kv_heads=1)
    artifact = save_artifact(model, tmp_path / "artifact")
    alone = run(model, artifact, 1)[0]
    both = run(model, artifact, 2)
    assert [list(r["shrink"].values()) for r in both] == [[[1.0], [1.0]]] * 2
    assert both[0]["blocks"] == alone["blocks"]  # each rank holds the whole head
    assert gap(alone, both[0]) < 0.05


def start(folder: Path, ranks: int) -> Any:
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, kv_cache_dtype="oscar_int2", dtype="bfloat16",
        tensor_parallel_size=ranks, additional_config={"oscar": {"artifact": "hadamard"}},
    ).create_engine_config()  # fmt: skip


def test_heads_that_ranks_cannot_share_are_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 KV heads cannot be split over 2") as error:
        start(save_model(tmp_path / "12", kv_heads=3, query_heads=12, weights=False), 2)
    assert "\n" not in str(error.value)
    start(save_model(tmp_path / "4", kv_heads=2, weights=False), 4)


def test_smollm2_runs_on_one_or_three_ranks_and_not_on_two(tmp_path: Path) -> None:
    """9 query heads and 3 KV heads: vLLM itself refuses two ranks, in words."""
    folder = save_model(tmp_path, kv_heads=3, query_heads=9, weights=False)
    with pytest.raises(ValueError, match=r"attention heads \(9\) must be divisible by tensor parallel size \(2\)"):
        start(folder, 2)
    start(folder, 3)

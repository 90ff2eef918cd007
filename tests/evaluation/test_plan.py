"""The plan against what the engine and the pool allocate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from oscar_serving.cache.pool import CachePool
from oscar_serving.calibration import Artifact
from oscar_serving.config import OscarConfig
from oscar_serving.engines.hf.memory import allocate_stores
from oscar_serving.engines.hf.model import prepare_model
from oscar_serving.engines.hf.options import EngineOptions
from oscar_serving.plan import PlanError, default_config, plan
from tests.engine.tiny import CONFIGS, tiny_model

MEMORY = 64 << 20
#: Close to Qwen3-8B, with and without sliding layers.
BIG = {
    "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
}  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "gemma3", "llama-mha-80"])
def test_bytes_a_token_are_what_the_allocator_reports(family: str):
    model = tiny_model(family)
    config = default_config(plan(model.config, MEMORY).head_dim)
    planned = plan(model.config, MEMORY, config=config)
    loaded = prepare_model(model)
    for cache, artifact in (
        (planned.caches[2], Artifact.plain(model.config, "hadamard", config=config)),
        (planned.caches[0], None),
    ):
        options = EngineOptions(
            kv_cache_memory=MEMORY, kv_cache_dtype="oscar_int2" if artifact else "bf16", max_num_seqs=1,
            max_batched_tokens=64, prefix_caching=False, page_size=32, max_model_len=1024,
        )  # fmt: skip
        stores = allocate_stores(loaded, artifact, options, device=torch.device("cpu"))
        pool = sum(layer.pages.nbytes if artifact else layer.windows.nbytes for layer in stores.layers)
        count = stores.pages if artifact else stores.window_pages
        assert cache.bytes_per_token == pytest.approx(pool / (count * 32), rel=1e-9)
        assert cache.tokens == pytest.approx(stores.capacity_tokens, rel=0.02)


def test_windows_are_what_the_pool_hands_out():
    config = OscarConfig(sink=20, recent=70, page_size=16)
    planned = plan(CONFIGS["llama"], MEMORY, config=config).caches[2]
    pool = CachePool(config, pages=200, window_pages=100, prefix_caching=False)
    most = 0
    pool.admit("r", [0])
    for step in range(400):
        assert pool.reserve("r", 1)
        pool.commit("r", [step % 7])
        most = max(most, pool.stats().windows.used)
    page_bytes = 2 * 2 * 2 * 16 * 16 * 2  # layers, K and V, heads, tokens, channels, bytes
    assert planned.bytes_per_request == most * page_bytes


def test_int2_is_seven_times_smaller_at_128_and_more_than_six_and_a_half_at_64():
    big = plan(_config(BIG), 80 << 30)
    assert big.ratio(big.caches[2]) >= 7
    small = plan(
        LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30), MEMORY
    )
    assert small.ratio(small.caches[2]) >= 6.5


def test_a_config_file_alone_is_enough(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(BIG))
    planned = plan(tmp_path, 16 << 30)
    bf16, fp8, int2, k4v2 = planned.caches
    assert [c.name for c in planned.caches] == ["BF16", "FP8", "K2 V2", "K4 V2"]
    assert bf16.bytes_per_token == 36 * 8 * 128 * 2 * 2
    assert bf16.tokens == pytest.approx((16 << 30) / bf16.bytes_per_token, rel=1e-3)
    assert bf16.tokens * 2 == pytest.approx(fp8.tokens, rel=1e-3)
    assert fp8.tokens < k4v2.tokens < int2.tokens
    assert list(int2.requests) == [4096, 8192, 32768]  # 131072 is beyond the model
    assert int2.requests[32768] > 6 * bf16.requests[32768] > 0
    assert planned.to_dict()["config"]["recent"] == 256


def test_bounded_sliding_layers_take_a_fixed_amount():
    config = CONFIGS["gemma3"]
    same, bounded = (plan(config, MEMORY, sliding=s) for s in ("same", "bounded"))
    assert same.sliding_layers == bounded.sliding_layers == 5
    assert bounded.caches[0].bytes_per_token * 6 == same.caches[0].bytes_per_token
    assert bounded.caches[0].bytes_per_request > 0 == same.caches[0].bytes_per_request


def test_tensor_parallel_shares_heads_and_repeats_the_last():
    one, four, many = (plan(_config(BIG), 16 << 30, tensor_parallel=n).caches[2] for n in (1, 4, 16))
    assert four.bytes_per_token * 4 == one.bytes_per_token
    assert many.bytes_per_token * 8 == one.bytes_per_token


def test_too_little_memory_fits_nothing():
    planned = plan(_config(BIG), 1 << 20)
    assert [c.tokens for c in planned.caches] == [0] * 4
    assert planned.caches[2].requests[4096] == 0


def test_what_cannot_be_planned(tmp_path: Path):
    with pytest.raises(PlanError, match="no such"):
        plan(tmp_path, MEMORY)
    (tmp_path / "config.json").write_text('{"model_type": "nothing-known"}')
    with pytest.raises(PlanError, match="not the configuration"):
        plan(tmp_path, MEMORY)
    with pytest.raises(PlanError, match="memory_bytes=0"):
        plan(CONFIGS["llama"], 0)


def _config(values: dict):
    from transformers import Qwen3Config

    return Qwen3Config(**{k: v for k, v in values.items() if k != "model_type"})

"""Registration, refusals, the version gate, pickling, tensor-parallel slices."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from block_model import kv_cache_config
from vllm.engine.arg_utils import EngineArgs

from oscar_serving.config import ConfigError, OscarConfig
from oscar_serving.engines.vllm import plugin
from oscar_serving.engines.vllm.options import VllmOptions
from oscar_serving.engines.vllm.transforms import Calibration, layer_transform
from oscar_serving.ranks import rank_heads
from oscar_serving.rotation import LayerTransform


@pytest.fixture
def model(tmp_path: Any) -> str:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,'
        ' "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,'
        ' "vocab_size": 512,'
        ' "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}'
    )
    return str(tmp_path)


def engine_config(model: str, **options: Any) -> Any:
    common = {"model": model, "skip_tokenizer_init": True, "kv_cache_dtype": "oscar_int2", "dtype": "bfloat16"}
    return EngineArgs(**(common | options)).create_engine_config()


def test_every_hook_took_and_registering_again_changes_nothing() -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    assert plugin.check_hooks() == []
    before = KVCacheManager.allocate_slots
    plugin.register()
    assert KVCacheManager.allocate_slots is before


def test_the_self_check_names_a_hook_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    monkeypatch.setattr(KVCacheManager, "allocate_slots", KVCacheManager.allocate_slots.__wrapped__)
    assert plugin.check_hooks() == ["block planning"]


@pytest.mark.parametrize(
    ("version", "tested"), [("0.33.0", True), ("0.33.1+cu130", True), ("0.32.9", False), ("0.34.0", False)]
)
def test_version_gate(version: str, tested: bool) -> None:
    assert plugin.version_is_tested(version) is tested


def test_one_flag_is_enough(model: str) -> None:
    config = engine_config(model)
    options = VllmOptions.from_vllm(config)
    assert (options.artifact, options.prefix_cache) == ("auto", "exact")
    assert options.config().page_size == 128


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 32}, "--block-size"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, "kv-cache-dtype-skip-layers"),
        ({"disable_hybrid_kv_cache_manager": True}, "disable-hybrid"),
        ({"additional_config": {"oscar": {"sinks": 3}}}, "unknown option"),
        ({"additional_config": {"oscar": {"prefix_cache": "maybe"}}}, "prefix_cache"),
        ({"additional_config": {"oscar": {"recent": 0}}}, "recent=0"),
        ({"attention_backend": "FLASH_ATTN"}, "FLASH_ATTN"),
    ],
)
def test_refusals_name_what_and_what_to_do(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        engine_config(model, **options)
    assert "\n" not in str(error.value)


def test_other_dtypes_are_left_alone(model: str) -> None:
    engine_config(model, kv_cache_dtype="auto", block_size=32)


def _child(data: bytes, results: Any) -> None:
    config = pickle.loads(data)
    results.put([type(g.kv_cache_spec).__name__ for g in config.kv_cache_groups])


def test_specs_cross_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    child = context.Process(target=_child, args=(pickle.dumps(kv_cache_config(8, sink=64, recent=256)), results))
    child.start()
    assert results.get(timeout=120) == ["FullAttentionSpec", "SinkWindowSpec"]
    child.join()


def test_backend_crosses_a_process() -> None:
    from oscar_serving.engines.vllm.backend import OscarBackend

    assert pickle.loads(pickle.dumps(OscarBackend)) is OscarBackend


@pytest.mark.parametrize(
    ("heads", "ranks", "slices"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (2, 2, [(0, 1), (1, 2)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 2, [(0, 1)] * 2),
    ],
)
def test_a_rank_takes_its_heads(heads: int, ranks: int, slices: list[tuple[int, int]]) -> None:
    assert [rank_heads(heads, ranks, r) for r in range(ranks)] == slices


def test_a_rank_gets_its_heads_of_the_artifact() -> None:
    hf = SimpleNamespace(
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        hidden_size=512,
        head_dim=64,
        model_type="llama",
    )
    whole = LayerTransform.plain(2, 64)
    whole = replace(whole, k_shrink=torch.tensor([0.5, 0.75]))
    artifact = SimpleNamespace(layers={0: whole, 1: whole}, architecture=hf)
    calibration = Calibration(OscarConfig(page_size=128), artifact)  # type: ignore[arg-type]
    got = [layer_transform(calibration, 1, 1, 64, ranks=4, rank=r).k_shrink.tolist() for r in range(4)]
    assert got == [[0.5], [0.5], [0.75], [0.75]]
    with pytest.raises(ValueError, match="the artifact has 2"):
        layer_transform(calibration, 1, 2, 64, ranks=4, rank=0)
    # A draft model's layer is not in the artifact.
    assert layer_transform(calibration, None, 4, 128, ranks=1, rank=0).head_dim == 128

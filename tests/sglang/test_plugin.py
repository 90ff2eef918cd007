"""What the plugin registers, reads and refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_serving.config import ConfigError
from oscar_serving.engines.sglang import plugin, resolve
from oscar_serving.engines.sglang.options import DTYPES, SglangOptions


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


def test_every_hook_took() -> None:
    assert plugin.missing_hooks() == []


def test_a_hook_that_is_gone_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    monkeypatch.setattr(ReqToTokenPool, "free_rows", ReqToTokenPool.free_rows.__wrapped__)
    with pytest.raises(plugin.UnsupportedSglang, match=r"ReqToTokenPool\.free_rows"):
        plugin.check_hooks()


def test_an_untested_version_registers_nothing() -> None:
    assert plugin.version_is_tested("0.5.23")
    assert plugin.version_is_tested("0.5.23+cu130")
    assert not plugin.version_is_tested("0.5.24")
    assert not plugin.version_is_tested("0.6.0")


def test_the_command_line_takes_dtypes_and_options() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    for dtype in DTYPES:
        args = parser.parse_args(["--model-path", "m", "--kv-cache-dtype", dtype, "--oscar-recent", "128"])
        assert (args.kv_cache_dtype, args.oscar_recent) == (dtype, 128)
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "m", "--kv-cache-dtype", "oscar_int3"])


def test_options() -> None:
    options = SglangOptions.parse("int2", {"sink": 32}, {"OSCAR_SINK": "8", "OSCAR_RECENT": "96"})
    assert (options.dtype, options.config().sink, options.config().recent) == ("oscar_int2", 32, 96)
    assert SglangOptions.parse("oscar_k4v2", {}, {}).config().k_bits == 4
    for environ, message in (
        ({"OSCAR_RECENT": "many"}, "whole number"),
        ({"OSCAR_RECENT": "0"}, "recent=0"),
        ({"OSCAR_PREFILL_MODE": "fast"}, "prefill_mode"),
    ):
        with pytest.raises(ConfigError, match=message):
            SglangOptions.parse("oscar_int2", {}, environ)


def _asked(**changes: Any) -> SimpleNamespace:
    fine = dict.fromkeys(
        (
            "enable_hierarchical_cache", "enable_lmcache", "enable_flexkv", "enable_unified_memory", "enable_hisparse",
            "enable_two_batch_overlap", "enable_kv_cache_sharding", "enable_pdmux", "enable_memory_saver",
            "enable_streaming_session", "prefill_only_disable_kv_cache", "enable_deterministic_inference",
        ),
        False,
    )  # fmt: skip
    return SimpleNamespace(
        **{
            **fine, "kv_cache_dtype": "oscar_int2", "speculative_algorithm": None, "disaggregation_mode": "null",
            "dcp_size": 1, "attn_cp_size": 1, "pp_size": 1, "dllm_algorithm": None, "tp_size": 1, "dp_size": 1,
            "enable_dp_attention": False, **changes,
        }
    )  # fmt: skip


def _model(**changes: Any) -> SimpleNamespace:
    from sglang.srt.configs.model_config import AttentionArch

    return SimpleNamespace(
        **{
            "attention_arch": AttentionArch.MHA, "is_hybrid_swa": False, "is_encoder_decoder": False, "head_dim": 128,
            "v_head_dim": 128, "dtype": torch.bfloat16, "hf_text_config": SimpleNamespace(),
            "get_total_num_kv_heads": lambda: 3, **changes,
        }
    )  # fmt: skip


def test_what_is_supported_passes() -> None:
    resolve.refuse(_asked(), _model())
    resolve.refuse(_asked(tp_size=3), _model())
    resolve.refuse(_asked(tp_size=6), _model())  # each head on two ranks
    resolve.refuse(_asked(tp_size=2, dp_size=2, enable_dp_attention=True), _model())  # attention is not split


@pytest.mark.parametrize(
    ("asked", "model", "why"),
    [
        ({"speculative_algorithm": "EAGLE"}, {}, "speculative"),
        ({"enable_hierarchical_cache": True}, {}, "HiCache"),
        ({"disaggregation_mode": "prefill"}, {}, "PD disaggregation"),
        ({"pp_size": 2}, {}, "pipeline"),
        ({"dcp_size": 2}, {}, "context parallelism"),
        ({"tp_size": 2}, {}, "3 KV heads cannot be split over 2 ranks"),
        ({"enable_memory_saver": True}, {}, "memory saver"),
        ({}, {"attention_arch": "mla"}, "latent"),
        ({}, {"is_hybrid_swa": True}, "sliding-window"),
        ({}, {"head_dim": 80 + 8, "v_head_dim": 88}, "head size 88"),
        ({}, {"dtype": torch.float32}, "float32"),
        ({}, {"v_head_dim": 64}, "different head sizes"),
        ({}, {"hf_text_config": SimpleNamespace(attn_logit_softcapping=50.0)}, "soft cap"),
    ],
)
def test_refusals_are_one_line(asked: dict[str, Any], model: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as error:
        resolve.refuse(_asked(**asked), _model(**model))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("--kv-cache-dtype oscar_int2: ")

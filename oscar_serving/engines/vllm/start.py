"""Start-up: the lines that say what is active, and the checks that the plan is what the adapter asked for."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import iter_layer_specs

from oscar_serving.codec import PageLayout
from oscar_serving.engines.vllm.options import INT2_BLOCK, WINDOW_BLOCK, VllmOptions
from oscar_serving.engines.vllm.plugin import UnsupportedVllm, check_hooks, tested_versions
from oscar_serving.engines.vllm.transforms import calibration_of
from oscar_serving.engines.vllm.window_spec import SinkWindowSpec

logger = init_logger("vllm.oscar")


def announce(vllm_config: Any, kv_cache_config: Any) -> None:
    """Log what is active; raise :class:`UnsupportedVllm` if vLLM planned something else."""
    missing = check_hooks()
    if missing:
        raise UnsupportedVllm(f"oscar: these hooks did not take: {', '.join(missing)}; tested are {tested_versions()}")
    specs = [spec for group in kv_cache_config.kv_cache_groups for spec in iter_layer_specs(group.kv_cache_spec)]
    windows = [s for s in specs if isinstance(s, SinkWindowSpec)]
    pages = [s for s in specs if not isinstance(s, SinkWindowSpec) and s.block_size == INT2_BLOCK]
    if not windows or not pages:
        raise UnsupportedVllm(
            "oscar: no layer uses the INT2 store (all layers have a sliding window?); use another kv-cache dtype"
        )
    calibration, options = calibration_of(vllm_config), VllmOptions.from_vllm(vllm_config)
    config, cache = calibration.config, vllm_config.cache_config
    layout = PageLayout(pages[0].head_size, config)
    logger.info(
        "oscar: K%dV%d, %.2f bits an element, groups of %d, scales in %s; %s",
        config.k_bits, config.v_bits, layout.bits_per_element, layout.group_size, config.scale_dtype,
        calibration.origin,
    )  # fmt: skip
    logger.info(
        "oscar: first %d and last %d tokens in bfloat16 (blocks of %d and %d tokens); prefill %s; prefix cache %s",
        config.sink, config.recent, INT2_BLOCK, WINDOW_BLOCK, config.prefill_mode, options.prefix_cache,
    )  # fmt: skip
    logger.info(
        "oscar: %d blocks, %s tokens at %s tokens a request, windows included",
        kv_cache_config.num_blocks, f"{cache.kv_cache_size_tokens:,}", f"{vllm_config.model_config.max_model_len:,}",
    )  # fmt: skip

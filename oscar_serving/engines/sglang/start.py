"""Start-up: the lines that say what is active."""

from __future__ import annotations

import logging
from typing import Any

import torch

from oscar_serving.engines.sglang.geometry import LayerShape
from oscar_serving.engines.sglang.options import PAGE, WINDOW_PAGE

logger = logging.getLogger("sglang.oscar")


def announce(pool: Any, shape: LayerShape, device: torch.device) -> None:
    """Log what is active."""
    config, layout = pool.calibration.config, pool.layers[0].layout
    logger.info(
        "oscar: K%dV%d, %.2f bits an element, groups of %d, scales in %s; %s; %s decode kernel",
        config.k_bits, config.v_bits, layout.bits_per_element, layout.group_size, config.scale_dtype,
        pool.calibration.origin, shape.kernel(device),
    )  # fmt: skip
    logger.info(
        "oscar: first %d and last %d tokens in bfloat16 (pages of %d and %d tokens) for %d requests; prefill %s",
        config.sink, config.recent, PAGE, WINDOW_PAGE, pool.running, config.prefill_mode,
    )  # fmt: skip
    pages, windows = pool.get_kv_size_bytes()
    logger.info(
        "oscar: %.2f GiB of pages for %d tokens, %.2f GiB of windows", pages / 2**30, pool.size, windows / 2**30
    )

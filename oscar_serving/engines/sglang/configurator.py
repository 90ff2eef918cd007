"""How many tokens and requests fit: the INT2 pages, the windows of each running request, and scratch."""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator
from sglang.srt.runtime_context import get_parallel, get_schedule

from oscar_serving.codec import PageLayout
from oscar_serving.engines.sglang.geometry import LayerShape, Scratch
from oscar_serving.engines.sglang.options import PAGE, WINDOW_PAGE, SglangOptions
from oscar_serving.engines.sglang.store import window_pages
from oscar_serving.engines.sglang.transforms import Calibration, calibration

#: Requests at once when neither the user nor the memory says how many.
DEFAULT_RUNNING = 64


def calibration_of(kvc: Any) -> Calibration:
    """Calibration of the model that ``kvc`` configures the cache of."""
    options = SglangOptions.parse(kvc.kv_cache_dtype_str, {})
    return calibration(options, str(kvc.model_config.model_path), kvc.model_config.hf_config)


def running_requests() -> int:
    """Requests at once, per data-parallel rank."""
    asked = get_schedule().max_running_requests
    if asked is None:
        return DEFAULT_RUNNING
    return max(1, int(asked) // max(1, get_parallel().attn_dp_size))


class OscarPoolConfigurator(DefaultPoolConfigurator):  # type: ignore[misc]
    """Counts a token's INT2 bytes, and charges windows and scratch first."""

    def __init__(self, kvc: Any) -> None:
        super().__init__(kvc)
        config = calibration_of(kvc).config
        model, ranks = kvc.model_config, get_parallel().attn_tp_size
        heads, layers = model.get_num_kv_heads(ranks), kvc.layer_info.num_effective_layers
        layout = PageLayout(model.head_dim, config)
        shape = LayerShape(
            model.num_attention_heads // ranks, heads, model.head_dim, config.k_bits, config.v_bits, layout.groups
        )
        token = 2 * heads * model.head_dim * 2 * layers
        self._fixed_overhead_bytes += window_pages(config, running_requests()) * WINDOW_PAGE * token
        self._fixed_overhead_bytes += Scratch.history_bytes([shape], model.context_len, config.recent)
        self._fixed_overhead_bytes += layout.page_bytes(heads) * layers  # the null page

    def _compute_cell_size(self, kvc: Any, num_layers: int) -> int:
        layout = PageLayout(kvc.model_config.head_dim, calibration_of(kvc).config)
        heads = kvc.model_config.get_num_kv_heads(get_parallel().attn_tp_size)
        return layout.page_bytes(heads) * num_layers // PAGE

    def finalize_with_max_running_requests(self, config: Any) -> Any:
        """Run no more requests at once than have windows."""
        config.max_running_requests = min(config.max_running_requests, running_requests())
        return config

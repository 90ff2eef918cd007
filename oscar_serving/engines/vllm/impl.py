"""The attention of one layer under vLLM: write a step's K and V to both stores, attend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

from oscar_serving.attention import AttentionSpec
from oscar_serving.codec import PageLayout
from oscar_serving.config import ConfigError
from oscar_serving.engines.vllm.backend import OscarMetadata, WindowMetadata
from oscar_serving.engines.vllm.layer import CachedLayer
from oscar_serving.engines.vllm.options import INT2_BLOCK
from oscar_serving.engines.vllm.scratch import LayerShape
from oscar_serving.engines.vllm.transforms import calibration_of, layer_transform


class OscarImpl(AttentionImpl[OscarMetadata]):
    """Attention over the INT2 store of a layer and the window store beside it.

    vLLM constructs it; :meth:`attach` completes it with what the constructor is not told.
    """

    shape: LayerShape
    cached: CachedLayer

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **unknown: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sinks, self.sliding_window = kv_cache_dtype, sinks, sliding_window
        self.spec = AttentionSpec(self.scale, logits_soft_cap or None, sliding_window)
        for refused, what in (
            (alibi_slopes is not None, "ALiBi slopes are"),
            (attn_type != AttentionType.DECODER, f"{attn_type} attention is"),
            (kv_sharing_target_layer_name is not None, "sharing another layer's cache is"),
            (bool(unknown), f"attention options {', '.join(sorted(unknown))} are"),
        ):
            if refused:
                raise ConfigError(
                    f"--kv-cache-dtype {kv_cache_dtype}: {what} not supported; use another kv-cache dtype"
                )

    def attach(self, layer: Any, prefix: str, window: Any, vllm_config: Any) -> None:
        """Give the layer its transform (for this rank), its window store and its place in the pool of blocks."""
        calibration = calibration_of(vllm_config)
        config = calibration.config
        target = vllm_config.speculative_config is None or not _is_draft(vllm_config, prefix)
        transform = layer_transform(
            calibration,
            extract_layer_index(prefix) if target else None,
            self.num_kv_heads,
            self.head_size,
            ranks=get_tensor_model_parallel_world_size(),
            rank=get_tensor_model_parallel_rank(),
        )
        layout = PageLayout(self.head_size, config)
        self.shape = LayerShape(
            self.num_heads, self.num_kv_heads, self.head_size, config.k_bits, config.v_bits, layout.groups
        )
        self.cached = CachedLayer(layer, layout, transform, self.spec, self.sinks)
        if not self.cached.portable:
            _ = self.cached.flash  # chosen now: refuse at start, and under vLLM's configuration
        self.window = window
        page = FullAttentionSpec(
            block_size=INT2_BLOCK,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.CUSTOM,
            state_content_bytes=layout.head_bytes // INT2_BLOCK,
        )
        layer.get_kv_cache_spec = lambda _: page

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write new ``key, value`` ``[T, heads, d]`` to both stores; slot -1 is padding."""
        window = self._window_metadata()
        if window is not None:  # None in a profiling run
            self.cached.bind(kv_cache, self.window.windows)
            self.cached.store(key, value, slot_mapping, window.slots)

    def _window_metadata(self) -> WindowMetadata | None:
        return get_attention_context(self.window.layer_name)[0]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: OscarMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend for ``query`` ``[T, query heads, d]``; writes and returns ``output``."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("oscar: fused output quantization is not supported")
        if attn_metadata is None:
            # Profiling run: prefill behind a history holds partial results beside its output.
            _ = torch.empty_like(output), torch.empty_like(output, dtype=torch.float32)
            return output.fill_(0)
        window = self._window_metadata()
        assert window is not None
        self.cached.bind(kv_cache, self.window.windows)
        n = attn_metadata.num_decode_tokens
        if attn_metadata.num_decodes:
            self.cached.decode(query[:n], attn_metadata, window.block_table, output[:n], self.shape)
        if attn_metadata.prefill is not None:
            rows = slice(n, attn_metadata.num_tokens)
            self.cached.prefill(
                query[rows], key[rows], value[rows], attn_metadata, attn_metadata.prefill, window.block_table,
                output[rows],
            )  # fmt: skip
        return output


def _is_draft(vllm_config: Any, prefix: str) -> bool:
    """Whether the layer belongs to a draft model: another model, or a layer beyond the target's."""
    speculative = vllm_config.speculative_config
    if vllm_config.model_config is not speculative.target_model_config:
        return True
    target = speculative.target_model_config
    return extract_layer_index(prefix) >= target.get_total_num_hidden_layers() or prefix.startswith("draft")

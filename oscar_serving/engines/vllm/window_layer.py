"""The layer that owns a window store, and how an attention layer comes by one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.kv_cache_interface import KVCacheSpec, KVQuantMode

from oscar_serving.config import KV_CACHE_DTYPES, ConfigError
from oscar_serving.engines.vllm.options import WINDOW_BLOCK, VllmOptions
from oscar_serving.engines.vllm.window_spec import SinkWindowSpec

WINDOW_SUFFIX = ".oscar_window"


class WindowLayer(nn.Module, AttentionLayerBase):
    """KV-bearing layer beside an attention layer: K and V of its sink and recent tokens, 16 bits an element.

    ``kv_cache`` is the raw uint8 view ``[blocks, KV heads, 16, 4 * d]`` that vLLM binds; :attr:`windows` is the same
    memory as bfloat16 ``[blocks, 2, KV heads, 16, d]``, the layout of the kernels. The store is declared as uint8, like
    the INT2 store, because groups of differing types make vLLM zero each new block.
    """

    def __init__(self, prefix: str, heads: int, head_dim: int, options: VllmOptions, num_heads: int) -> None:
        super().__init__()
        self.layer_name = prefix + WINDOW_SUFFIX
        self.num_heads = num_heads
        self.heads, self.head_dim, self.options = heads, head_dim, options
        self.kv_cache = torch.tensor([])
        self.windows = torch.empty(0)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take vLLM's view and reinterpret each block."""
        self.kv_cache = kv_cache
        blocks = kv_cache.shape[0]
        flat = kv_cache.as_strided((blocks, kv_cache[0].numel()), (kv_cache.stride(0), 1))
        self.windows = flat.view(torch.bfloat16).unflatten(1, (2, self.heads, WINDOW_BLOCK, self.head_dim))  # type: ignore[no-untyped-call]

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that builds this layer's metadata."""
        from oscar_serving.engines.vllm.backend import OscarWindowBackend

        return OscarWindowBackend

    def get_kv_cache_spec(self, vllm_config: Any) -> KVCacheSpec:
        """Spec of the window store."""
        config = self.options.config()
        return SinkWindowSpec(
            block_size=WINDOW_BLOCK,
            num_kv_heads=self.heads,
            head_size=self.head_dim,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.CUSTOM,
            state_content_bytes=2 * self.head_dim * torch.bfloat16.itemsize,
            sink=config.sink,
            recent=config.recent,
            exact=self.options.prefix_cache == "exact",
        )


def build_attention(original: Callable[..., None], layer: Any, *args: Any, **kwargs: Any) -> None:
    """Construct vLLM's attention ``layer``, with a window store where its dtype is OSCAR's.

    Layers with a sliding window keep the model's type: they hold few tokens anyway, and their blocks share the pool.
    """
    call = inspect.signature(original).bind(layer, *args, **kwargs).arguments
    cache_config = call.get("cache_config")
    if cache_config is None or cache_config.cache_dtype not in KV_CACHE_DTYPES:
        original(layer, *args, **kwargs)
        return
    dtype, prefix = cache_config.cache_dtype, call.get("prefix", "")
    sliding = call.get("per_layer_sliding_window") or cache_config.sliding_window
    if sliding is not None or call.get("attn_type", AttentionType.DECODER) != AttentionType.DECODER:
        plain = copy.copy(cache_config)
        plain.cache_dtype = "auto"
        call["cache_config"] = plain
        call.pop("self", None)
        extra = call.pop("extra_impl_args", {})
        original(layer, **call, **extra)
        if layer.attn_backend.get_name() == "FLASH_ATTN":
            from oscar_serving.engines.vllm.sliding import SlidingFlashBackend

            layer.attn_backend = SlidingFlashBackend
        return
    for refused, what in (
        (call.get("kv_sharing_target_layer_name") is not None, "shares another layer's cache"),
        (call.get("head_size_v") not in (None, call["head_size"]), "has V heads of another size than K's"),
        (call.get("attn_backend") is not None, "comes with its own attention backend"),
    ):
        if refused:
            raise ConfigError(f"--kv-cache-dtype {dtype}: layer {prefix} {what}; use another kv-cache dtype")
    original(layer, *args, **kwargs)
    vllm_config = get_current_vllm_config()
    options = VllmOptions.from_vllm(vllm_config)
    window = WindowLayer(prefix, layer.num_kv_heads, layer.head_size, options, layer.num_heads)
    vllm_config.compilation_config.static_forward_context[window.layer_name] = window
    layer.impl.attach(layer, prefix, window, vllm_config)

"""Entry point ``vllm.general_plugins``: makes ``--kv-cache-dtype oscar_int2`` known to a stock vLLM.

vLLM calls :func:`register` once in every process. It registers two dtypes and hangs six small hooks into vLLM; none
does anything unless the engine runs with one of the dtypes. :func:`check_hooks` proves that all of them took.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

from oscar_serving.config import KV_CACHE_DTYPES, ConfigError

#: vLLM versions that this adapter was tested with: from the first, below the second.
TESTED_VLLM = ((0, 33, 0), (0, 34, 0))

BACKEND_PATH = "oscar_serving.engines.vllm.backend.OscarBackend"

_MARK = "_oscar_hook"


class UnsupportedVllm(RuntimeError):
    """This vLLM was not tested, or has changed under the plugin."""


def register() -> None:
    """Register dtypes, backend, cache specs and hooks. Safe to call again."""
    version = importlib.metadata.version("vllm")
    if not version_is_tested(version):
        # Without the dtypes registered vLLM itself refuses them; with any other dtype the plugin is not needed.
        _warn_untested(version)
        return
    _register_dtypes()
    _register_backend()
    _register_specs()
    _hook_config_check()
    _hook_backend_choice()
    _hook_attention_layers()
    _hook_block_planning()
    _hook_start_lines()


def version_is_tested(version: str) -> bool:
    """Whether the adapter knows this vLLM version."""
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:3] if p.isdigit())
    return TESTED_VLLM[0] <= parts < TESTED_VLLM[1]


def tested_versions() -> str:
    """The tested range in words."""
    low, high = (".".join(map(str, v)) for v in TESTED_VLLM)
    return f"vllm >= {low}, < {high}"


def _warn_untested(version: str) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.oscar").warning(
        "oscar: this is vllm %s; oscar-serving works with %s, so its kv-cache dtypes (%s) are not available",
        version, tested_versions(), ", ".join(KV_CACHE_DTYPES),
    )  # fmt: skip


def _register_dtypes() -> None:
    import torch
    from vllm.config.cache import get_kv_cache_dtype_handler, register_kv_cache_dtype
    from vllm.v1.kv_cache_interface import KVQuantMode

    def handler(dtype: str) -> type:
        class Handler:
            name = dtype

            def torch_dtype(self) -> torch.dtype:
                return torch.uint8

            def quant_mode(self) -> KVQuantMode:
                return KVQuantMode.CUSTOM

        return Handler

    for name in KV_CACHE_DTYPES:
        if get_kv_cache_dtype_handler(name) is None:
            register_kv_cache_dtype(name)(handler(name))


def _register_backend() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    if custom.is_overridden() and custom.get_path() != BACKEND_PATH:
        raise UnsupportedVllm(
            f"oscar: the attention backend CUSTOM is taken by {custom.get_path()}; disable one of the two plugins "
            "with VLLM_PLUGINS"
        )
    register_backend(custom, BACKEND_PATH)


def _register_specs() -> None:
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from oscar_serving.engines.vllm.window_spec import SinkWindowManager, SinkWindowSpec

    register_all_kvcache_specs(None)  # a registry that is not empty would keep vLLM from adding its own
    KVCacheSpecRegistry.register(SinkWindowSpec, SinkWindowManager, SinkWindowSpec)


def _hook(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``wrap`` of it, once."""
    original = getattr(owner, name, None)
    if original is None:
        raise UnsupportedVllm(f"oscar: vllm has no {owner.__name__}.{name}; tested are {tested_versions()}")
    if hasattr(original, _MARK):
        return
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _hook_config_check() -> None:
    """Refuse unsupported combinations where the configuration is made, before any process starts."""
    from vllm.engine.arg_utils import EngineArgs

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            vllm_config = original(self, *args, **kwargs)
            if vllm_config.cache_config.cache_dtype in KV_CACHE_DTYPES:
                from oscar_serving.engines.vllm.options import check_supported

                check_supported(vllm_config)
            return vllm_config

        return create_engine_config

    _hook(EngineArgs, "create_engine_config", wrap)


def _hook_backend_choice() -> None:
    """Layers with an OSCAR dtype get the OSCAR backend on every platform, without ``--attention-backend``."""
    from vllm.v1.attention import selector

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def choose(backend: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> Any:
            if attn_selector_config.kv_cache_dtype not in KV_CACHE_DTYPES:
                return original(backend, attn_selector_config, *args, **kwargs)
            from oscar_serving.engines.vllm.backend import OscarBackend

            reason = OscarBackend.refusal(attn_selector_config)
            if reason:
                raise ConfigError(f"--kv-cache-dtype {attn_selector_config.kv_cache_dtype}: {reason}")
            return OscarBackend

        return choose

    _hook(selector, "_cached_get_attn_backend", wrap)


def _hook_attention_layers() -> None:
    """Give each attention layer its window store; leave sliding-window layers unquantized."""
    from vllm.model_executor.layers.attention.attention import Attention

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            from oscar_serving.engines.vllm.window_layer import build_attention

            build_attention(original, self, *args, **kwargs)

        return init

    _hook(Attention, "__init__", wrap)


def _hook_block_planning() -> None:
    """Tell the window store's manager at which lengths later requests may continue a request."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    from oscar_serving.engines.vllm.window_spec import SinkWindowManager

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def allocate_slots(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            for manager in self.coordinator.single_type_managers:
                if isinstance(manager, SinkWindowManager):
                    manager.expect(request.request_id, request.num_prompt_tokens, request.shared_prefix_boundary)
            return original(self, request, *args, **kwargs)

        return allocate_slots

    _hook(KVCacheManager, "allocate_slots", wrap)


def _hook_start_lines() -> None:
    """Say what is active once the cache's size is known, and check the plan."""
    from vllm.v1.engine import core

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def update_kv_cache_capacity(vllm_config: Any, kv_cache_config: Any) -> None:
            original(vllm_config, kv_cache_config)
            if vllm_config.cache_config.cache_dtype in KV_CACHE_DTYPES:
                from oscar_serving.engines.vllm.start import announce

                announce(vllm_config, kv_cache_config)

        return update_kv_cache_capacity

    _hook(core, "update_kv_cache_capacity", wrap)


def check_hooks() -> list[str]:
    """Names of hooks that did not take; empty when all did."""
    from vllm.config.cache import is_known_kv_cache_dtype
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.engine import core
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST

    from oscar_serving.engines.vllm.window_spec import SinkWindowSpec

    custom = AttentionBackendEnum.CUSTOM
    took = {
        "kv-cache dtypes": all(map(is_known_kv_cache_dtype, KV_CACHE_DTYPES)),
        "attention backend": custom.is_overridden() and custom.get_path() == BACKEND_PATH,
        "cache specs": {SinkWindowSpec, FullAttentionSpec} <= set(_REGISTRY_KVCACHESPEC_LIST),
        "configuration check": hasattr(EngineArgs.create_engine_config, _MARK),
        "backend choice": hasattr(selector._cached_get_attn_backend, _MARK),
        "attention layers": hasattr(Attention.__init__, _MARK),
        "block planning": hasattr(KVCacheManager.allocate_slots, _MARK),
        "start lines": hasattr(core.update_kv_cache_capacity, _MARK),
    }
    return [name for name, ok in took.items() if not ok]

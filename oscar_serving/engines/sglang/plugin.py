"""Entry point ``sglang.srt.plugins``: makes ``--kv-cache-dtype oscar_int2`` known to a stock SGLang.

SGLang calls :func:`register` once in every process. It registers dtypes, an attention backend and a radix cache, and
hangs hooks into SGLang; none does anything unless the engine runs with one of the dtypes. SGLang only logs a plugin or
a hook that fails, so :func:`check_hooks` runs wherever an OSCAR cache is about to be made, and stops the server.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
from collections.abc import Callable
from typing import Any

from oscar_serving.engines.sglang.options import DTYPES, add_arguments, export, read_arguments

#: SGLang versions that this adapter was tested with: from the first, below the second.
TESTED_SGLANG = ((0, 5, 23), (0, 5, 24))
#: Name of the attention backend and of the radix cache.
NAME = "oscar"
_CACHE = "sglang.srt.mem_cache"


class UnsupportedSglang(RuntimeError):
    """This SGLang was not tested, or has changed under the plugin."""


def register() -> None:
    """Register dtypes, backends and hooks. Safe to call again."""
    version = importlib.metadata.version("sglang")
    if not version_is_tested(version):
        # Without the dtypes registered SGLang itself refuses them; with any other dtype the plugin is not needed.
        import logging

        logging.getLogger("sglang.oscar").warning(
            "oscar: this is sglang %s; oscar-serving works with %s, so its kv-cache dtypes (%s) are not available",
            version, tested_versions(), ", ".join(DTYPES),
        )  # fmt: skip
        return
    _register_hooks()
    _register_backends()
    _register_dtypes()


def version_is_tested(version: str) -> bool:
    """Whether the adapter knows this SGLang version."""
    parts = tuple(int(p) for p in version.split("+")[0].split(".")[:3] if p.isdigit())
    return TESTED_SGLANG[0] <= parts < TESTED_SGLANG[1]


def tested_versions() -> str:
    """The tested range in words."""
    low, high = (".".join(map(str, v)) for v in TESTED_SGLANG)
    return f"sglang >= {low}, < {high}"


def _dtype_choices() -> list[str]:
    from typing import get_type_hints

    from sglang.srt.arg_groups.arg_utils import _unwrap_annotated
    from sglang.srt.server_args import ServerArgs

    choices: list[str] = _unwrap_annotated(get_type_hints(ServerArgs, include_extras=True)["kv_cache_dtype"])[1].choices
    return choices


def _register_dtypes() -> None:
    choices = _dtype_choices()
    choices.extend(name for name in DTYPES if name not in choices)


def _register_backends() -> None:
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS, register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import register_radix_cache_backend, registered_radix_cache_backends

    from oscar_serving.engines.sglang import resolve

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_attention_backend)
    if NAME not in registered_radix_cache_backends():
        register_radix_cache_backend(NAME, _radix_cache)
    for step, hook in (
        ("handle_missing_default_values", resolve.choose_backends),
        ("handle_other_validations", resolve.check_arguments),
    ):
        if hook not in _HOOKS.get(step, ()):
            register_resolution_hook(step)(hook)


def _attention_backend(runner: Any) -> Any:
    from oscar_serving.engines.sglang.backend import OscarAttnBackend

    return OscarAttnBackend(runner)


def _radix_cache(context: Any) -> Any:
    from sglang.srt.mem_cache.registry import create_unified_radix_cache

    from oscar_serving.engines.sglang.radix import OscarRadixCache

    return create_unified_radix_cache(context, cache_class=OscarRadixCache)


# Hooks ----------------------------------------------------------------------------------------------------------------


def _add_arguments(result: Any, parser: Any) -> None:
    add_arguments(parser)


def _read_arguments(result: Any, cls: type, args: Any) -> None:
    export(read_arguments(args))


def _cache_dtype(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("server_args_kv_cache_dtype") not in DTYPES or kwargs.get("is_draft_worker"):
        return original(*args, **kwargs)
    check_hooks()
    import torch

    return kwargs["server_args_kv_cache_dtype"], torch.uint8


def _pool_configurator(original: Callable[..., Any], kvc: Any) -> Any:
    if kvc.kv_cache_dtype_str not in DTYPES:
        return original(kvc)
    from oscar_serving.engines.sglang.configurator import OscarPoolConfigurator

    return OscarPoolConfigurator(kvc)


def _pool_class(original: Callable[..., type], kvc: Any, *, kind: str, default: type) -> type:
    if kvc.kv_cache_dtype_str not in DTYPES or kind != "mha":
        return original(kvc, kind=kind, default=default)
    from oscar_serving.engines.sglang.pool import pool_class

    return pool_class(kvc)


def _alloc_rows(original: Callable[..., Any], pool: Any, requests: list[Any]) -> Any:
    book = getattr(pool, "oscar_rows", None)
    if book is None:
        return original(pool, requests)
    new = [r for r in requests if not r.kv.holds_kv]
    rows = original(pool, requests)
    if rows is not None:
        from oscar_serving.engines.sglang.radix import salt_of

        for request in new:
            tokens = request.origin_input_ids + request.output_ids
            book.open(request.kv.req_pool_idx, request.prefix_len, tokens, salt_of(request))
    return rows


def _free_rows(result: Any, pool: Any, indices: list[int]) -> None:
    book = getattr(pool, "oscar_rows", None)
    if book is not None:
        for row in indices:
            book.close(row)


def _clear_rows(result: Any, pool: Any) -> None:
    book = getattr(pool, "oscar_rows", None)
    if book is not None:
        book.clear()


def _targets() -> dict[str, tuple[Callable[..., Any], str]]:
    return {
        "sglang.srt.server_args.ServerArgs.add_cli_args": (_add_arguments, "AFTER"),
        "sglang.srt.server_args.ServerArgs.from_cli_args": (_read_arguments, "AFTER"),
        f"{_CACHE}.kv_cache_dtype.configure_kv_cache_dtype": (_cache_dtype, "AROUND"),
        "sglang.srt.model_executor.pool_configurator.create_memory_pool_configurator": (_pool_configurator, "AROUND"),
        f"{_CACHE}.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class": (_pool_class, "AROUND"),
        f"{_CACHE}.memory_pool.ReqToTokenPool.alloc": (_alloc_rows, "AROUND"),
        f"{_CACHE}.memory_pool.ReqToTokenPool.free_rows": (_free_rows, "AFTER"),
        f"{_CACHE}.memory_pool.ReqToTokenPool.clear": (_clear_rows, "AFTER"),
    }  # fmt: skip


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for target, (hook, kind) in _targets().items():
        if all(known is not hook for _, known, _ in HookRegistry._hooks.get(target, ())):
            HookRegistry.register(target, hook, getattr(HookType, kind))


def missing_hooks() -> list[str]:
    """What did not take; empty when everything did."""
    from sglang.srt.arg_groups.resolution_hooks import _HOOKS
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.mem_cache.registry import get_radix_cache_factory

    from oscar_serving.engines.sglang import resolve

    took = {target: _is_hooked(target) for target in _targets()}
    took["kv-cache dtypes"] = set(DTYPES) <= set(_dtype_choices())
    took["attention backend"] = ATTENTION_BACKENDS.get(NAME) is _attention_backend
    took["radix cache"] = get_radix_cache_factory(NAME) is _radix_cache
    took["argument check"] = resolve.check_arguments in _HOOKS.get("handle_other_validations", ())
    return [name for name, ok in took.items() if not ok]


def _is_hooked(target: str) -> bool:
    owner, name = target.rsplit(".", 1)
    try:
        return hasattr(getattr(pkgutil.resolve_name(owner), name), "__wrapped__")
    except (ImportError, AttributeError):
        return False


def check_hooks() -> None:
    """Raise :class:`UnsupportedSglang` unless everything took: an OSCAR cache without a hook would serve garbage."""
    missing = missing_hooks()
    if missing:
        raise UnsupportedSglang(
            f"oscar: these hooks did not take: {', '.join(missing)}; tested are {tested_versions()}"
        )

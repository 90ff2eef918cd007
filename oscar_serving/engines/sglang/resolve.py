"""Resolution of SGLang's arguments for an OSCAR cache: what is set, and what is refused, with one line each."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from oscar_serving.config import ConfigError
from oscar_serving.engines.sglang.options import DTYPES, PAGE, SglangOptions
from oscar_serving.engines.sglang.plugin import NAME, check_hooks
from oscar_serving.ranks import can_share


def choose_backends(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Set page size, attention backend and radix cache before SGLang chooses its own."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    asked = resolving_view(server_args)
    if asked.kv_cache_dtype in DTYPES:
        check_hooks()
        dtype = f"--kv-cache-dtype {asked.kv_cache_dtype}"
        SglangOptions.parse(asked.kv_cache_dtype, {})
        for option in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
            if getattr(asked, option) not in (None, "triton", NAME):
                flag = f"--{option.replace('_', '-')} {getattr(asked, option)}"
                raise ConfigError(f"{dtype}: {flag} cannot read this cache; leave it out")
        if asked.page_size not in (None, 1, PAGE):
            raise ConfigError(f"{dtype}: --page-size {asked.page_size}: pages have {PAGE} tokens; leave it out")
        if asked.radix_cache_backend not in (None, NAME):
            raise ConfigError(
                f"{dtype}: --radix-cache-backend {asked.radix_cache_backend} does not know the windows; leave it out"
            )
        os.environ["SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"] = "0"
        declare_resolution(
            server_args, "oscar", attention_backend=NAME, prefill_attention_backend=None, decode_attention_backend=None,
            page_size=PAGE, radix_cache_backend=NAME, cuda_graph_backend_prefill="disabled",
        )  # fmt: skip
    previous(server_args)


def check_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse what is not supported, before any process starts."""
    from sglang.srt.arg_groups.overrides import resolving_view

    previous(server_args)
    asked = resolving_view(server_args)
    if asked.kv_cache_dtype in DTYPES:
        refuse(asked, _model_config(server_args))


def _model_config(server_args: Any) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def refuse(asked: Any, model: Any) -> None:
    """Raise :class:`ConfigError` with one line for a combination that is not supported."""
    from sglang.srt.configs.model_config import AttentionArch

    other = "use another kv-cache dtype"
    heads = model.get_total_num_kv_heads()
    ranks = asked.tp_size // (asked.dp_size if asked.enable_dp_attention else 1)
    refusals = (
        (
            model.attention_arch != AttentionArch.MHA,
            "multi-head latent attention caches latents, not K and V",
            other,
        ),
        (model.is_hybrid_swa, "sliding-window layers are not supported", f"{other}, or vLLM with oscar-serving"),
        (
            getattr(model.hf_text_config, "attn_logit_softcapping", None) is not None,
            "a logit soft cap is not supported",
            f"{other}, or vLLM with oscar-serving",
        ),
        (model.is_encoder_decoder, "cross-attention is not supported", other),
        (
            not can_share(heads, ranks),
            f"{heads} KV heads cannot be split over {ranks} ranks, nor be replicated evenly",
            "use a --tp-size that divides them or is a multiple of them",
        ),
        (model.head_dim != model.v_head_dim, "K and V of different head sizes are not supported", other),
        (
            model.head_dim % 16 != 0 or model.head_dim > 256,
            f"head size {model.head_dim} is not a multiple of 16 up to 256",
            other,
        ),
        (
            str(model.dtype) not in ("torch.bfloat16", "torch.float16"),
            f"model type {model.dtype} is not bfloat16 or float16",
            "set --dtype bfloat16",
        ),
        (
            asked.speculative_algorithm is not None,
            "speculative decoding is not supported",
            "leave --speculative-algorithm out",
        ),
        (
            asked.enable_hierarchical_cache,
            "HiCache does not know the windows",
            "leave --enable-hierarchical-cache out",
        ),
        (asked.enable_lmcache or asked.enable_flexkv, "KV connectors do not know the windows", "leave them out"),
        (
            asked.disaggregation_mode != "null",
            "PD disaggregation does not transfer the windows",
            "leave --disaggregation-mode out",
        ),
        (asked.dcp_size > 1 or asked.attn_cp_size > 1, "context parallelism splits pages over ranks", "use --tp-size"),
        (asked.pp_size > 1, "pipeline parallelism is not tested", "use --tp-size"),
        (asked.enable_unified_memory, "the unified pool is not supported", "leave --enable-unified-memory out"),
        (asked.enable_hisparse, "HiSparse is not supported", "leave --enable-hisparse out"),
        (asked.enable_two_batch_overlap, "two-batch overlap is not supported", "leave it out"),
        (asked.enable_kv_cache_sharding, "KV-cache sharding is not supported", "leave it out"),
        (asked.enable_pdmux, "PD multiplexing is not supported", "leave --enable-pdmux out"),
        (asked.enable_memory_saver, "the memory saver does not know the windows", "leave --enable-memory-saver out"),
        (asked.enable_streaming_session, "streaming sessions keep rows that the windows do not", "leave it out"),
        (
            asked.prefill_only_disable_kv_cache,
            "without a KV cache there is nothing to quantize",
            "leave --prefill-only-disable-kv-cache out",
        ),
        (asked.dllm_algorithm is not None, "diffusion models are not supported", other),
        (
            asked.enable_deterministic_inference,
            "batch-invariant decoding is not supported",
            "leave --enable-deterministic-inference out",
        ),
    )
    for refused, why, instead in refusals:
        if refused:
            raise ConfigError(f"--kv-cache-dtype {asked.kv_cache_dtype}: {why}; {instead}")

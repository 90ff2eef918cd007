"""What the user asked for, read from vLLM's configuration; and what is refused, with one line each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from oscar_serving.config import KV_CACHE_DTYPES, ConfigError, OscarConfig
from oscar_serving.engines.vllm.window_spec import HIT_ALIGNMENT, MAX_REJECTED_TOKENS
from oscar_serving.ranks import can_share

#: Tokens of a block of the two stores. At 2.25 bits a block of either takes nearly the same bytes.
INT2_BLOCK = HIT_ALIGNMENT
WINDOW_BLOCK = 16

PrefixCacheMode = Literal["exact", "soft"]

_ADAPTER_KEYS = ("artifact", "prefix_cache")
_CONFIG_KEYS = ("sink", "recent", "prefill_mode", "group_size", "scale_dtype")


@dataclass(frozen=True)
class VllmOptions:
    """Options of the plugin: the kv-cache dtype and ``--additional-config '{"oscar": {…}}'``.

    Attributes
    ----------
    dtype
        ``oscar_int2`` or ``oscar_k4v2``.
    artifact
        ``auto`` (shipped, or in ``$OSCAR_ARTIFACTS``), a folder, or uncalibrated: ``hadamard``, ``none`` (no rotation).
    prefix_cache
        ``exact``: a hit needs its sink and window blocks. ``soft``: it may lack them and reads INT2 there.
    overrides
        Fields of :class:`~oscar_serving.config.OscarConfig` that the user set.
    """

    dtype: str
    artifact: str
    prefix_cache: PrefixCacheMode
    overrides: tuple[tuple[str, Any], ...]

    @classmethod
    def from_vllm(cls, vllm_config: Any) -> VllmOptions:
        """Parse and validate; raises :class:`ConfigError`."""
        additional = vllm_config.additional_config
        given = additional.get("oscar", {}) if isinstance(additional, dict) else {}
        if not isinstance(given, dict):
            raise ConfigError(f"additional_config['oscar']={given!r}: must be an object of options")
        for key in given:
            if key not in _ADAPTER_KEYS + _CONFIG_KEYS:
                known = ", ".join(_ADAPTER_KEYS + _CONFIG_KEYS)
                raise ConfigError(f"additional_config['oscar'] has {key!r}: unknown option; allowed are {known}")
        mode = given.get("prefix_cache", "exact")
        if mode not in ("exact", "soft"):
            raise ConfigError(f"prefix_cache={mode!r}: allowed is 'exact', 'soft'")
        artifact = given.get("artifact", "auto")
        if not isinstance(artifact, str) or not artifact:
            raise ConfigError(f"artifact={artifact!r}: allowed is 'auto', 'hadamard', 'none' or the path of a folder")
        overrides = tuple((k, given[k]) for k in _CONFIG_KEYS if k in given)
        options = cls(vllm_config.cache_config.cache_dtype, artifact, mode, overrides)
        options.config()
        return options

    def config(self, base: OscarConfig | None = None) -> OscarConfig:
        """The cache's configuration: ``base`` (the artifact's) or the dtype's defaults, with the overrides."""
        k_bits, v_bits = KV_CACHE_DTYPES[self.dtype]
        config = base or OscarConfig()
        if base is not None:
            for key in ("group_size", "scale_dtype"):
                asked = dict(self.overrides).get(key, getattr(base, key))
                if asked != getattr(base, key):
                    raise ConfigError(f"{key}={asked!r}: the artifact was calibrated for {getattr(base, key)!r}")
        return config.with_(
            k_bits=k_bits, v_bits=v_bits, page_size=INT2_BLOCK, window_dtype="bfloat16", **dict(self.overrides)
        )


def check_supported(vllm_config: Any) -> None:
    """Raise :class:`ConfigError` with one line for a combination that is not supported."""
    cache, parallel, model = vllm_config.cache_config, vllm_config.parallel_config, vllm_config.model_config
    dtype = f"--kv-cache-dtype {cache.cache_dtype}"
    speculative = vllm_config.speculative_config
    heads, ranks = model.get_total_num_kv_heads(), parallel.tensor_parallel_size
    refusals = (
        (model.use_mla, "multi-head latent attention caches latents, not K and V", "use another kv-cache dtype"),
        (
            vllm_config.scheduler_config.disable_hybrid_kv_cache_manager is True,
            "the sink and window blocks are a KV-cache group of their own",
            "leave --disable-hybrid-kv-cache-manager out",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "KV connectors do not know the two stores",
            "leave --kv-transfer-config out",
        ),
        (
            cache.kv_offloading_size is not None,
            "KV offloading does not know the two stores",
            "leave --kv-offloading-size out",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism splits a sequence's blocks over ranks",
            "use tensor, pipeline or data parallelism",
        ),
        (
            not can_share(heads, ranks),
            f"{heads} KV heads cannot be split over {ranks} ranks, nor be replicated evenly",
            "use a --tensor-parallel-size that divides them or is a multiple of them",
        ),
        (model.is_hybrid, "Mamba state cannot share blocks with the two stores", "use another kv-cache dtype"),
        (model.is_encoder_decoder, "cross-attention is not supported", "use another kv-cache dtype"),
        (
            bool(cache.kv_cache_dtype_skip_layers),
            "skipped layers would be padded to the INT2 page",
            "leave --kv-cache-dtype-skip-layers out (sliding-window layers stay unquantized by themselves)",
        ),
        (
            cache.user_specified_block_size and cache.block_size != WINDOW_BLOCK,
            f"--block-size {cache.block_size}: the stores have blocks of {INT2_BLOCK} and {WINDOW_BLOCK} tokens",
            "leave --block-size out",
        ),
        (
            speculative is not None and (speculative.num_speculative_tokens or 0) > MAX_REJECTED_TOKENS,
            f"more than {MAX_REJECTED_TOKENS} speculative tokens",
            f"speculate at most {MAX_REJECTED_TOKENS} tokens a step",
        ),
        (
            vllm_config.attention_config.backend is not None and vllm_config.attention_config.backend.name != "CUSTOM",
            f"attention backend {getattr(vllm_config.attention_config.backend, 'name', None)} cannot read this cache",
            "leave --attention-backend out",
        ),
    )
    for refused, why, instead in refusals:
        if refused:
            raise ConfigError(f"{dtype}: {why}; {instead}")
    VllmOptions.from_vllm(vllm_config)

"""``SRFTInt4Cache``: a Hugging Face cache that stays packed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, get_layer_types_and_kwargs

from oscar_serving.codec.srft_int4 import SrftConfig, calibrate_factors
from oscar_serving.config import ConfigError
from oscar_serving.engines.apple.attention import use_packed_attention
from oscar_serving.engines.apple.layer import LEAST_ROWS, PackedLayer

#: Per layer: factors of K and of V, ``[heads, d]``.
Factors = list[tuple[Tensor, Tensor]]
SUPPORTED_LAYERS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of all layers: what the live rows take, what is allocated, what float16 rows would take."""

    live: int
    allocated: int
    float16: int


class SRFTInt4Cache(Cache):  # type: ignore[misc]
    """KV cache of int4 or int8 codes for ``model.generate(past_key_values=...)``.

    Every token, the new ones included, is read from its codes: the result does not depend on how a prompt is cut. The
    model must attend through :func:`~oscar_serving.engines.apple.attention.packed_attention`, see :meth:`for_model`.

    Parameters
    ----------
    model_config
        The model's ``config``.
    config
        Bits, groups and rotation.
    factors
        Per-channel factors from :func:`calibrate`; ``None`` for ones.
    max_tokens
        Rows to allocate at once; otherwise buffers grow as needed.

    Raises
    ------
    ConfigError
        The model has layers of another kind than full or sliding attention, or factors of another number of layers.
    """

    def __init__(
        self,
        model_config: Any,
        config: SrftConfig | None = None,
        factors: Factors | None = None,
        max_tokens: int | None = None,
    ) -> None:
        kinds, options = get_layer_types_and_kwargs(model_config.get_text_config(decoder=True))
        if other := sorted(set(kinds) - set(SUPPORTED_LAYERS)):
            raise ConfigError(f"layers of kind {', '.join(other)}: packed are {', '.join(SUPPORTED_LAYERS)} only")
        if factors is not None and len(factors) != len(kinds):
            raise ConfigError(f"factors of {len(factors)} layers for a model of {len(kinds)}: calibrate this model")
        layers = []
        for i, option in enumerate(options):
            window = option.get("sliding_window")
            rows = min(max_tokens or LEAST_ROWS, 2 * window + LEAST_ROWS if window else max_tokens or LEAST_ROWS)
            layers.append(PackedLayer(config or SrftConfig(), factors[i] if factors else None, window, rows))
        super().__init__(layers=layers)

    @classmethod
    def for_model(cls, model: PreTrainedModel, config: SrftConfig | None = None, **options: Any) -> SRFTInt4Cache:
        """A cache for ``model``, which is set to attend through the packed attention function."""
        use_packed_attention(model)
        return cls(model.config, config, **options)

    def bytes(self) -> CacheBytes:
        """Bytes now, counted on the buffers."""
        live = sum(layer.live_bytes for layer in self.layers)
        plain = 0
        for layer in self.layers:
            if layer.is_initialized:
                batch, heads = layer.k.codes.shape[:2]
                d = layer.k_side.rotation.shape[-1]
                plain += 2 * 2 * batch * heads * (layer.end - layer.start) * d
        return CacheBytes(live, sum(layer.allocated_bytes for layer in self.layers), plain)


def cache_argument(function: Callable[..., Any]) -> str:
    """Name under which a model's ``forward`` or ``generate`` takes its cache: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(function).parameters else "past_key_values"


@torch.no_grad()
def capture(model: PreTrainedModel, input_ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """K and V ``[batch, heads, tokens, d]`` of every layer, after RoPE and QK norm, as a cache would hold them."""
    cache = DynamicCache(config=model.config)
    model(input_ids, **{cache_argument(model.forward): cache}, use_cache=True, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers]


def factors_of(captured: list[tuple[Tensor, Tensor]], config: SrftConfig) -> Factors:
    """Per-channel factors of every layer from what :func:`capture` returns."""
    found: Factors = []
    for keys, values in captured:
        matrix = config.matrix(keys.shape[-1])
        found.append(
            (
                calibrate_factors(keys, matrix, config.k_bits, config.group_size),
                calibrate_factors(values, matrix, config.v_bits, config.group_size),
            )
        )
    return found


def calibrate(model: PreTrainedModel, input_ids: Tensor, config: SrftConfig) -> Factors:
    """Per-channel factors of every layer from calibration tokens.

    Parameters
    ----------
    model
        A Hugging Face decoder.
    input_ids
        int64 ``[batch, tokens]``, text that is not evaluated on.
    """
    return factors_of(capture(model, input_ids), config)

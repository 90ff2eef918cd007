"""What each kind of KV cache gives back of the K and V that were written to it.

A storage works token by token, so that a sequence may be written in pieces. All is in model space: rotating a decoded
key back and multiplying it with ``q`` is the same as multiplying the decoded one with a rotated ``q``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from oscar_serving.attention.base import EVERY_POSITION
from oscar_serving.calibration.artifact import Artifact
from oscar_serving.codec import PageLayout, dequantize, quantize
from oscar_serving.config import ConfigError, OscarConfig
from oscar_serving.evaluation.attention import Tiers
from oscar_serving.rotation import LayerTransform

FP8_MAX = 448.0


class Storage(Protocol):
    """A cache as the evaluation sees it."""

    @property
    def sink(self) -> int:
        """First tokens that are read from the window store."""

    @property
    def recent(self) -> int:
        """Most recent tokens that are read from the window store."""

    def read_back(self, layer: int, k: Tensor, v: Tensor) -> Tiers:
        """Tiers of new tokens: ``k, v`` float ``[heads, tokens, d]`` of a layer, in model space."""

    def bits_per_element(self) -> float:
        """Stored bits of one element of K or V outside the windows, scales included."""

    def describe(self) -> dict[str, Any]:
        """JSON description: everything that the result depends on."""


@dataclass(frozen=True)
class ExactStorage:
    """K and V as they are, in a type of torch; ``float32`` does nothing in a model that computes in float32."""

    dtype: torch.dtype = torch.bfloat16
    sink: int = EVERY_POSITION
    recent: int = 1

    def read_back(self, layer: int, k: Tensor, v: Tensor) -> Tiers:
        """See :class:`Storage`."""
        k, v = (x.to(self.dtype).to(x.dtype) for x in (k, v))
        return Tiers(k, v, k, v)

    def bits_per_element(self) -> float:
        """See :class:`Storage`."""
        return 8.0 * self.dtype.itemsize

    def describe(self) -> dict[str, Any]:
        """See :class:`Storage`."""
        return {"kind": "exact", "dtype": str(self.dtype).removeprefix("torch.")}


@dataclass(frozen=True)
class Fp8Storage:
    """FP8 e4m3 with one float16-sized scale a token and head: the largest magnitude becomes 448. No windows."""

    sink: int = EVERY_POSITION
    recent: int = 1
    head_dim: int = 128

    def read_back(self, layer: int, k: Tensor, v: Tensor) -> Tiers:
        """See :class:`Storage`."""
        k, v = self._round(k), self._round(v)
        return Tiers(k, v, k, v)

    def bits_per_element(self) -> float:
        """See :class:`Storage`."""
        return 8.0 + 16.0 / self.head_dim

    def describe(self) -> dict[str, Any]:
        """See :class:`Storage`."""
        return {"kind": "fp8", "scale": "per token and head"}

    @staticmethod
    def _round(x: Tensor) -> Tensor:
        scale = (x.abs().amax(-1, keepdim=True) / FP8_MAX).to(torch.float16).to(x.dtype)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


@dataclass(frozen=True)
class OscarStorage:
    """The mixed-precision cache, through the codec that the engines use.

    Attributes
    ----------
    artifact
        Transforms of the layers; with ``layer_bits``, also the clips of other numbers of bits.
    config
        Bits, group size, scale type, levels, windows.
    quantile_clip
        Quantiles (K, V) of a rotated row's magnitudes at which the row is clamped before quantization: how the
        published reference clips. Only for evaluation. ``None`` leaves the rows to the transforms' ``shrink``.
    layer_bits
        Layer → bits of K and of V, where they differ from ``config``'s.
    """

    artifact: Artifact
    config: OscarConfig
    quantile_clip: tuple[float, float] | None = None
    layer_bits: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.quantile_clip and not all(0 < q <= 1 for q in self.quantile_clip):
            raise ConfigError(f"quantile_clip={self.quantile_clip}: both must lie in (0, 1]")
        if unknown := sorted(set(self.layer_bits) - set(self.artifact.layers)):
            raise ConfigError(f"layer_bits: the artifact has no layer {unknown[0]}")

    @property
    def sink(self) -> int:
        """See :class:`Storage`."""
        return self.config.sink

    @property
    def recent(self) -> int:
        """See :class:`Storage`."""
        return self.config.recent

    @cached_property
    def _transforms(self) -> dict[int, LayerTransform]:
        """Transform of each layer with the clips of its bits."""
        return {layer: self.artifact.for_bits(*self._bits(layer)).layers[layer] for layer in self.artifact.layers}

    def _bits(self, layer: int) -> tuple[int, int]:
        return self.layer_bits.get(layer, (self.config.k_bits, self.config.v_bits))

    def read_back(self, layer: int, k: Tensor, v: Tensor) -> Tiers:
        """See :class:`Storage`."""
        if layer not in self._transforms:
            raise ConfigError(f"the artifact has no layer {layer}; it belongs to another model")
        bits = self._bits(layer)
        t = self._transforms[layer].to(k.device)
        quantiles = self.quantile_clip or (None, None)
        k_history, k_window = self._tiers(
            k, t.k_rotation, t.q_rotation, t.k_mean, t.k_shrink, t.k_unit, bits[0], quantiles[0]
        )
        v_history, v_window = self._tiers(
            v, t.v_rotation, t.v_rotation, t.v_mean, t.v_shrink, t.v_unit, bits[1], quantiles[1]
        )
        return Tiers(k_history, v_history, k_window, v_window)

    def _tiers(
        self,
        x: Tensor,
        rotation: Tensor,
        inverse: Tensor,
        mean: Tensor,
        shrink: Tensor,
        unit: Tensor,
        bits: int,
        quantile: float | None,
    ) -> tuple[Tensor, Tensor]:
        """History and window tier of ``x`` ``[heads, tokens, d]``, rotated back."""
        config = self.config
        rotated = (x.float() - mean[:, None]) @ rotation
        clipped = rotated if quantile is None else clamp_to_quantile(rotated, quantile)
        shrink, unit = (value[:, None].expand(rotated.shape[:-1]) for value in (shrink, unit))
        codes, meta = quantize(
            clipped,
            bits,
            x.shape[-1] // config.groups(x.shape[-1]),
            shrink=shrink,
            unit=unit,
            scale_dtype=config.scale_dtype,
            levels=config.levels,
        )
        decoded = dequantize(codes, meta, unit=unit, bits=bits, levels=config.levels)
        window = rotated.to(getattr(torch, config.window_dtype)).float()
        back, mean = inverse.mT.to(x.dtype), mean[:, None].to(x.dtype)
        return decoded.to(x.dtype) @ back + mean, window.to(x.dtype) @ back + mean

    def bits_per_element(self) -> float:
        """See :class:`Storage`."""
        total = 0.0
        for layer, transform in self.artifact.layers.items():
            k_bits, v_bits = self._bits(layer)
            config = self.config.with_(k_bits=k_bits, v_bits=v_bits)
            total += PageLayout(transform.head_dim, config).bits_per_element
        return total / len(self.artifact.layers)

    def describe(self) -> dict[str, Any]:
        """See :class:`Storage`."""
        config = self.config
        return {
            "kind": "oscar",
            "artifact": self.artifact.model_id or self.artifact.config.rotation,
            "fingerprint": self.artifact.fingerprint,
            "preset": self.artifact.metadata.get("calibration", {}).get("preset"),
            "k_bits": config.k_bits,
            "v_bits": config.v_bits,
            "group_size": config.group_size,
            "scale_dtype": config.scale_dtype,
            "levels": config.levels,
            "sink": config.sink,
            "recent": config.recent,
            "window_dtype": config.window_dtype,
            "quantile_clip": list(self.quantile_clip) if self.quantile_clip else None,
            "layer_bits": {str(k): list(v) for k, v in self.layer_bits.items()},
        }


def clamp_to_quantile(x: Tensor, quantile: float) -> Tensor:
    """Clamp rows ``[..., d]`` to ± the quantile (linear interpolation) of their magnitudes."""
    ordered = x.abs().sort(-1).values
    at = quantile * (x.shape[-1] - 1)
    low = int(at)
    high = min(low + 1, x.shape[-1] - 1)
    limit = ordered[..., low : low + 1].lerp(ordered[..., high : high + 1], at - low)
    return torch.minimum(torch.maximum(x, -limit), limit)

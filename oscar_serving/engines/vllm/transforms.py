"""Which transform a layer gets: from the model's artifact, cut to the KV heads of this tensor-parallel rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from oscar_serving.calibration import Artifact, find_artifact
from oscar_serving.config import OscarConfig
from oscar_serving.engines.vllm.options import VllmOptions
from oscar_serving.ranks import rank_heads
from oscar_serving.rotation import LayerTransform


@dataclass(frozen=True)
class Calibration:
    """Configuration of the cache and, unless uncalibrated, the artifact that it comes from."""

    config: OscarConfig
    artifact: Artifact | None

    @property
    def origin(self) -> str:
        """Where the rotations come from, in words."""
        if self.artifact is None:
            return "plain Hadamard, uncalibrated" if self.config.rotation == "hadamard" else "no rotation, uncalibrated"
        return f"artifact {self.artifact.fingerprint}"


def calibration_of(vllm_config: Any) -> Calibration:
    """The target model's calibration; raises where an artifact is missing or does not fit."""
    speculative = vllm_config.speculative_config
    model = vllm_config.model_config if speculative is None else speculative.target_model_config
    return _calibration(VllmOptions.from_vllm(vllm_config), str(model.model), model.hf_config)


_KNOWN: dict[tuple[VllmOptions, str], Calibration] = {}


def _calibration(options: VllmOptions, model: str, hf_config: Any) -> Calibration:
    key = (options, model)
    if key not in _KNOWN:
        if options.artifact in ("hadamard", "none"):
            _KNOWN[key] = Calibration(options.config().with_(rotation=options.artifact), None)
        else:
            with _cpu_float32():
                artifact = Artifact.load(find_artifact(model, options.artifact))
                artifact.check_model(hf_config)
                config = options.config(artifact.config)
                artifact = artifact.for_bits(config.k_bits, config.v_bits)
            _KNOWN[key] = Calibration(config, artifact)
    return _KNOWN[key]


@contextmanager
def _cpu_float32() -> Iterator[None]:
    """Undo the default device and type under which vLLM builds its layers."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


@functools.cache
def _plain(heads: int, head_dim: int, rotate: bool) -> LayerTransform:
    with _cpu_float32():
        return LayerTransform.plain(heads, head_dim, rotate=rotate)


def layer_transform(
    calibration: Calibration, layer: int | None, heads: int, head_dim: int, *, ranks: int, rank: int
) -> LayerTransform:
    """Transform of a layer for one rank.

    Parameters
    ----------
    layer
        Index in the target model; ``None`` for a layer of a draft model, which gets a plain Hadamard: its outputs are
        verified by the target.
    heads, head_dim
        KV heads of this rank and head size, as vLLM built the layer.
    """
    if calibration.artifact is None or layer is None:
        return _plain(heads, head_dim, layer is None or calibration.config.rotation == "hadamard")
    whole = calibration.artifact.layers[layer]
    first, last = rank_heads(whole.heads, ranks, rank)
    if last - first != heads or whole.head_dim != head_dim:
        raise ValueError(
            f"oscar: layer {layer} has {heads} KV heads of size {head_dim} on rank {rank} of {ranks}, "
            f"the artifact has {whole.heads} of size {whole.head_dim}"
        )
    return whole.head_slice(first, last)

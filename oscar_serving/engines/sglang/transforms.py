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
from oscar_serving.engines.sglang.options import SglangOptions
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


_KNOWN: dict[tuple[SglangOptions, str], Calibration] = {}


def calibration(options: SglangOptions, model: str, hf_config: Any) -> Calibration:
    """The model's calibration; raises where an artifact is missing or does not fit."""
    key = (options, model)
    if key not in _KNOWN:
        if options.artifact in ("hadamard", "none"):
            _KNOWN[key] = Calibration(options.config().with_(rotation=options.artifact), None)
        else:
            with _cpu_float32():
                artifact = Artifact.load(find_artifact(model, options.artifact))
                artifact.check_model(hf_config)
                config = options.config(artifact.config)
                _KNOWN[key] = Calibration(config, artifact.for_bits(config.k_bits, config.v_bits))
    return _KNOWN[key]


@contextmanager
def _cpu_float32() -> Iterator[None]:
    """Undo the default device and type under which an engine builds its layers."""
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
    known: Calibration, layer: int, heads: int, head_dim: int, *, ranks: int, rank: int
) -> LayerTransform:
    """Transform of model layer ``layer`` for a rank that has ``heads`` KV heads of size ``head_dim``."""
    if known.artifact is None:
        return _plain(heads, head_dim, known.config.rotation == "hadamard")
    whole = known.artifact.layers[layer]
    first, last = rank_heads(whole.heads, ranks, rank)
    if last - first != heads or whole.head_dim != head_dim:
        raise ValueError(
            f"oscar: layer {layer} has {heads} KV heads of size {head_dim} on rank {rank} of {ranks}, "
            f"the artifact has {whole.heads} of size {whole.head_dim}"
        )
    return whole.head_slice(first, last)

"""Named cache configurations to evaluate, and their short form on the command line.

``[NAME=]BASE[,field=value …]`` where ``BASE`` is

==================  ================================================================================================
``bf16``, ``fp8``   unquantized cache; FP8 e4m3 with a scale a token and head
``none``            INT2 without rotation
``hadamard``        INT2 after a plain Hadamard rotation
``auto`` or a path  the calibrated artifact of the model
==================  ================================================================================================

and a field one of :class:`~oscar_serving.config.OscarConfig`, ``shrink=F`` (one clip factor for uncalibrated bases),
``quantile=K/V`` (clip at quantiles), or ``layers=FIRST-LAST:KBITS/VBITS`` (bits of some layers; may be repeated).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from oscar_serving.calibration import Artifact, find_artifact
from oscar_serving.calibration.architecture import Architecture
from oscar_serving.config import OscarConfig
from oscar_serving.evaluation.model import EvaluationError
from oscar_serving.evaluation.storage import ExactStorage, Fp8Storage, OscarStorage, Storage

_INTEGERS = ("k_bits", "v_bits", "group_size", "sink", "recent", "page_size")


@dataclass(frozen=True)
class Configuration:
    """A storage and the name under which its results appear."""

    name: str
    storage: Storage


def bf16(name: str = "BF16") -> Configuration:
    """The unquantized cache in bfloat16."""
    return Configuration(name, ExactStorage(torch.bfloat16))


def fp8(hf_config: Any, name: str = "FP8") -> Configuration:
    """FP8 e4m3 with a scale a token and head."""
    return Configuration(name, Fp8Storage(Architecture.of(hf_config).head_dim))


def plain(
    name: str,
    hf_config: Any,
    rotation: Literal["hadamard", "none"],
    *,
    shrink: float = 1.0,
    quantile_clip: tuple[float, float] | None = None,
    **options: Any,
) -> Configuration:
    """An uncalibrated cache; ``options`` are fields of :class:`OscarConfig`."""
    artifact = Artifact.plain(hf_config, rotation)
    if shrink != 1.0:
        layers = {
            index: replace(t, k_shrink=t.k_shrink * shrink, v_shrink=t.v_shrink * shrink)
            for index, t in artifact.layers.items()
        }
        artifact = replace(artifact, layers=layers)
    # Its clips hold for any number of bits.
    config = artifact.config.with_(**options)
    artifact = replace(artifact, config=config)
    return Configuration(name, OscarStorage(artifact, config, quantile_clip))


def calibrated(
    name: str,
    artifact: Artifact,
    *,
    layer_bits: Mapping[int, tuple[int, int]] | None = None,
    quantile_clip: tuple[float, float] | None = None,
    **options: Any,
) -> Configuration:
    """An artifact's cache; ``options`` replace fields of its configuration.

    An artifact of preset ``paper`` says itself at which quantiles it clips.
    """
    bits = [options.get(n, getattr(artifact.config, n)) for n in ("k_bits", "v_bits")]
    if any(options.get(n, getattr(artifact.config, n)) != getattr(artifact.config, n) for n in ("group_size",)):
        raise EvaluationError(
            f"group_size={options['group_size']}: the clips of the artifact were calibrated for "
            f"{artifact.config.group_size}; calibrate one for this group size"
        )
    fitting = artifact.for_bits(*bits)
    storage = OscarStorage(
        fitting, fitting.config.with_(**options), quantile_clip or artifact.quantile_clip, layer_bits or {}
    )
    return Configuration(name, storage)


def baselines(hf_config: Any, config: OscarConfig | None = None) -> list[Configuration]:
    """BF16, FP8, INT4 with a Hadamard rotation, INT2 with it, INT2 without any; layout and windows of ``config``."""
    base = config or OscarConfig()
    shared = {n: getattr(base, n) for n in ("group_size", "sink", "recent", "window_dtype")}
    return [
        bf16(),
        fp8(hf_config),
        plain("INT4 Hadamard", hf_config, "hadamard", k_bits=4, v_bits=4, **shared),
        plain("INT2 Hadamard", hf_config, "hadamard", **shared),
        plain("INT2 unrotated", hf_config, "none", **shared),
    ]


def parse(text: str, model: Path, hf_config: Any) -> Configuration:
    """Parse the short form; see the module's docstring.

    Parameters
    ----------
    model, hf_config
        Folder and configuration of the model that is evaluated.

    Raises
    ------
    EvaluationError
        What is wrong with it.
    """
    first, *assignments = text.split(",")
    name, separator, base = first.partition("=")
    if not separator:
        name, base = text, first
    options, extra, layer_bits = _options(text, assignments)
    if base in ("bf16", "fp8"):
        if assignments:
            raise EvaluationError(f"configuration {text!r}: {base} has no options")
        return bf16(name) if base == "bf16" else fp8(hf_config, name)
    quantile = extra.pop("quantile", None)
    if base in ("hadamard", "none"):
        made = plain(name, hf_config, base, quantile_clip=quantile, **extra, **options)  # type: ignore[arg-type]
        storage = made.storage
        assert isinstance(storage, OscarStorage)
        if layer_bits:
            storage = replace(storage, layer_bits=layer_bits)
        return Configuration(name, storage)
    if extra:
        raise EvaluationError(
            f"configuration {text!r}: shrink is calibrated in an artifact; only for hadamard and none"
        )
    artifact = Artifact.load(find_artifact(model, base))
    artifact.check_model(hf_config)
    return calibrated(name, artifact, quantile_clip=quantile, layer_bits=layer_bits, **options)


def _options(text: str, assignments: list[str]) -> tuple[dict[str, Any], dict[str, Any], dict[int, tuple[int, int]]]:
    """Fields of the configuration, other options, bits of layers."""
    known = {f.name for f in fields(OscarConfig)} - {"rotation", "prefill_mode", "page_size"}
    options: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    layer_bits: dict[int, tuple[int, int]] = {}
    for assignment in assignments:
        key, _, value = assignment.partition("=")
        try:
            if key in _INTEGERS and key in known:
                options[key] = int(value)
            elif key in known:
                options[key] = value
            elif key == "shrink":
                extra[key] = float(value)
            elif key == "quantile":
                k, v = value.split("/")
                extra[key] = (float(k), float(v))
            elif key == "layers":
                span, bits = value.split(":")
                low, _, high = span.partition("-")
                k_bits, v_bits = bits.split("/")
                layer_bits |= dict.fromkeys(range(int(low), int(high or low) + 1), (int(k_bits), int(v_bits)))
            else:
                allowed = ", ".join([*sorted(known), "shrink", "quantile", "layers"])
                raise EvaluationError(f"configuration {text!r}: unknown field {key!r}; allowed are {allowed}")
        except (TypeError, ValueError) as error:
            if isinstance(error, EvaluationError):
                raise
            raise EvaluationError(f"configuration {text!r}: cannot read {assignment!r}") from error
    return options, extra, layer_bits

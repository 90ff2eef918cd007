"""``oscar eval --grid``: one thing at a time changed from the method as published, per head and with our clip.

All calibrations share one pass over the calibration text. Names are ``axis: value``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from torch import Tensor

from oscar_serving.calibration.architecture import Architecture
from oscar_serving.calibration.artifact import Artifact
from oscar_serving.calibration.moments import Moments
from oscar_serving.calibration.recipe import PRESETS, KTarget, Recipe, VTarget, default_config
from oscar_serving.calibration.run import candidates, choose, collect
from oscar_serving.config import OscarConfig
from oscar_serving.evaluation.configuration import Configuration, bf16, calibrated, fp8, plain
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError

#: Windows (sink, recent) to compare; 0 and 1 is as good as none.
WINDOWS = ((0, 1), (32, 128), (64, 256), (128, 512))
GROUPS = (32, 64, 128)
AXES = (
    "reference",
    "preset",
    "rotation",
    "parts",
    "k target",
    "v target",
    "clip",
    "group",
    "levels",
    "windows",
    "bits",
)
Progress = Callable[[str, int, int], None]


@dataclass
class Grid:
    """Calibrates variants of a model on demand.

    Attributes
    ----------
    model
        Its dtype and device are used for calibration too.
    fit, held_out
        Calibration sequences int64 ``[tokens]``: for the moments, and to choose on.
    config
        Layout and windows of the centre; the calibration's default for the head size if ``None``.
    """

    model: EvaluatedModel
    fit: Sequence[Tensor]
    held_out: Sequence[Tensor]
    config: OscarConfig | None = None
    progress: Progress | None = None
    _moments: dict[int, Moments] | None = field(default=None, init=False)

    @property
    def center(self) -> OscarConfig:
        """The configuration from which one thing at a time is changed."""
        return self.config or default_config(self.head_dim)

    @property
    def head_dim(self) -> int:
        """Channels a head."""
        return Architecture.of(self.model.config).head_dim

    def artifact(self, recipe: Recipe, config: OscarConfig) -> Artifact:
        """Calibrate one variant."""
        if self._moments is None:
            self._moments = collect(self.model.model, self.fit, self.center, progress=self.progress)
        choices = candidates(self._moments, recipe, config)
        return choose(self.model.model, choices, self.held_out, recipe=recipe, config=config, progress=self.progress)

    def configurations(self, axes: Sequence[str] = AXES) -> Iterator[Configuration]:
        """The variants of some axes, calibrated as they are asked for."""
        if unknown := sorted(set(axes) - set(AXES)):
            raise EvaluationError(f"axis {unknown[0]!r}: allowed are {', '.join(AXES)}")
        center, recipe = self.center, PRESETS["oscar"]
        for axis in axes:
            if axis in ("reference", "windows", "bits"):
                yield from self._without_calibration(axis, center)
            else:
                for value, variant, config in _variants(axis, recipe, center, self.head_dim):
                    yield calibrated(f"{axis}: {value}", self.artifact(variant, config))

    def _without_calibration(self, axis: str, center: OscarConfig) -> Iterator[Configuration]:
        """Axes that need one calibration at most."""
        if axis == "reference":
            shared = {n: getattr(center, n) for n in ("sink", "recent", "group_size")}
            yield replace(bf16(), name="reference: BF16")
            yield replace(fp8(self.model.config), name="reference: FP8")
            yield plain("reference: INT4 Hadamard", self.model.config, "hadamard", k_bits=4, v_bits=4, **shared)
            return
        artifact = self.artifact(PRESETS["default"], center)
        if axis == "windows":
            for sink, recent in WINDOWS:
                yield calibrated(f"windows: {sink}/{recent}", artifact, sink=sink, recent=recent)
            return
        for k_bits, v_bits in ((2, 2), (2, 4), (4, 2), (4, 4)):
            yield calibrated(f"bits: K{k_bits} V{v_bits}", artifact, k_bits=k_bits, v_bits=v_bits)
        layers = sorted(artifact.layers)
        ends = dict.fromkeys((*layers[:2], *layers[-2:]), (4, 2))
        yield calibrated("bits: K4 in the first and last 2 layers", artifact, layer_bits=ends)


def _variants(axis: str, recipe: Recipe, center: OscarConfig, head_dim: int) -> list[tuple[str, Recipe, OscarConfig]]:
    """Value, recipe and configuration of each point of an axis."""
    if axis == "preset":
        return [(name, preset, center) for name, preset in PRESETS.items()]
    if axis == "rotation":
        fixed = replace(
            recipe, k_targets=("none",), v_targets=("none",), use_eigenvectors=False, use_bit_reversal=False
        )
        return [
            ("none", replace(fixed, use_hadamard=False), center),
            ("Hadamard", fixed, center),
            ("per layer", replace(recipe, per_head=False), center),
            ("per head", recipe, center),
        ]
    if axis == "parts":
        return [
            ("U H P", recipe, center),
            ("without U", replace(recipe, use_eigenvectors=False), center),
            ("without H", replace(recipe, use_hadamard=False), center),
            ("without P", replace(recipe, use_bit_reversal=False), center),
        ]
    if axis == "k target":
        return [(t, replace(recipe, k_targets=(t,)), center) for t in get_args(KTarget)[:-1]]
    if axis == "v target":
        return [(t, replace(recipe, v_targets=(t,)), center) for t in get_args(VTarget)[:-1]]
    if axis == "clip":
        return [
            ("none", replace(recipe, clip="none"), center),
            ("quantile .96/.92", replace(recipe, clip="quantile"), center),
            ("shrink", recipe, center),
        ]
    if axis == "group":
        return [
            (f"{size} {kind}", recipe, center.with_(group_size=size, scale_dtype=kind))
            for size in sorted({size for size in GROUPS if head_dim % size == 0} | {head_dim})
            for kind in ("float8_e4m3", "float16")
        ]
    return [
        ("affine", recipe, center),
        ("affine without clip", replace(recipe, clip="none"), center),
        ("Lloyd-Max", replace(recipe, clip="none"), center.with_(levels="lloyd_max", scale_dtype="float16")),
    ]

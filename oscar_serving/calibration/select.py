"""Choosing, per layer and head, what moves the attention output least on held-out tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oscar_serving.calibration.artifact import Clip
from oscar_serving.calibration.candidates import Candidate
from oscar_serving.calibration.capture import LayerCall
from oscar_serving.calibration.errors import OutputErrors
from oscar_serving.calibration.recipe import SHRINKS, Recipe
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform

#: Clips at which candidates are compared; the winner's clip is then chosen from all of :data:`SHRINKS`.
_COARSE = (0.8, 0.65, 0.55)
#: Bits for which an artifact carries clips.
CLIP_BITS = (2, 4)
_QUERIES = 128


@dataclass
class LayerChoice:
    """Candidates of one layer and their accumulated errors; ``k`` and ``v`` end as one candidate each.

    Attributes
    ----------
    k, v
        Candidates.
    errors
        Float64 ``[candidates, shrinks, heads]`` sums, by ``(which, bits)``.
    signal
        Sum of the squared attention output over the same queries, float64 ``[heads]``.
    chosen
        ``(which, bits)`` → clip; and the names of the candidates kept, one a head.
    """

    k: list[Candidate]
    v: list[Candidate]
    errors: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    signal: Tensor | None = None
    chosen: dict[tuple[str, int], Clip] = field(default_factory=dict)
    names: dict[str, list[str]] = field(default_factory=dict)
    relative: dict[str, list[float]] = field(default_factory=dict)

    def observe(
        self, call: LayerCall, config: OscarConfig, bits: Sequence[tuple[str, int]], shrinks: Sequence[float]
    ) -> None:
        """Add the errors of one held-out sequence."""
        measured = OutputErrors(call, config, _QUERIES)
        signal = measured.output.double().square().sum((1, 2, 3))
        self.signal = signal if self.signal is None else self.signal + signal
        for which, width in bits:
            candidates = self.k if which == "k" else self.v
            one = (measured.of_k if which == "k" else measured.of_v)(candidates, shrinks, width)
            key = which, width
            self.errors[key] = self.errors[key] + one if key in self.errors else one

    def keep_best(self, config: OscarConfig, *, per_head: bool) -> None:
        """Reduce the candidates to the best one of each head (of the layer unless ``per_head``)."""
        for which, bits in (("k", config.k_bits), ("v", config.v_bits)):
            candidates: list[Candidate] = getattr(self, which)
            if len(candidates) > 1:
                error = self.errors[which, bits].amin(1)
                error = error if per_head else error.sum(-1, keepdim=True).expand_as(error)
                candidates = [_mix(candidates, error.argmin(0).tolist())]
            setattr(self, which, candidates)
            self.names[which] = candidates[0].name.split("; ") * (
                1 if ";" in candidates[0].name else len(candidates[0].unit)
            )
        self.errors, self.signal = {}, None

    def keep_clips(self, config: OscarConfig, *, per_head: bool) -> None:
        """Choose clips from the errors at :data:`SHRINKS`."""
        for (which, bits), error in self.errors.items():
            error = error[0] if per_head else error[0].sum(-1, keepdim=True).expand_as(error[0])
            best = error.argmin(0)
            unit = getattr(self, which)[0].unit
            self.chosen[which, bits] = Clip(torch.tensor(SHRINKS, device=best.device)[best], unit)
            if bits == (config.k_bits if which == "k" else config.v_bits) and self.signal is not None:
                least = self.errors[which, bits][0].amin(0)
                self.relative[which] = (least / self.signal.clamp_min(torch.finfo(torch.float64).tiny)).tolist()

    def no_clip(self) -> None:
        """Keep rows as they are."""
        for which in ("k", "v"):
            unit = getattr(self, which)[0].unit
            for bits in CLIP_BITS:
                self.chosen[which, bits] = Clip(torch.ones_like(unit), unit)

    def transform(self, config: OscarConfig) -> LayerTransform:
        """The choice for the bits of ``config``."""
        k, v = self.k[0], self.v[0]
        k_clip, v_clip = self.chosen["k", config.k_bits], self.chosen["v", config.v_bits]
        values = (
            k.rotation, k.query, v.rotation, k.mean, v.mean, k_clip.shrink, v_clip.shrink, k_clip.unit, v_clip.unit
        )  # fmt: skip
        return LayerTransform(*(value.float().cpu().contiguous() for value in values))

    def other_clips(self, layer: int, config: OscarConfig) -> dict[tuple[int, str, int], Clip]:
        """Clips for the other numbers of bits."""
        own = {("k", config.k_bits), ("v", config.v_bits)}
        return {
            (layer, which, bits): Clip(clip.shrink.float().cpu(), clip.unit.float().cpu())
            for (which, bits), clip in self.chosen.items()
            if (which, bits) not in own
        }


def stages(recipe: Recipe, config: OscarConfig) -> list[str]:
    """Passes over the held-out tokens that a recipe needs."""
    several = max(len(recipe.k_targets), len(recipe.v_targets)) * len(recipe.means) > 1
    return ["rotations"] * several + ["clips"] * (recipe.clip == "shrink")


def observe(choice: LayerChoice, call: LayerCall, config: OscarConfig, stage: str) -> None:
    """Add one held-out sequence to the errors of a stage."""
    if stage == "rotations":
        choice.observe(call, config, (("k", config.k_bits), ("v", config.v_bits)), _COARSE)
    else:
        choice.observe(call, config, [(w, b) for w in ("k", "v") for b in CLIP_BITS], SHRINKS)


def _mix(candidates: Sequence[Candidate], picks: Sequence[int]) -> Candidate:
    """Head ``h`` of candidate ``picks[h]``."""
    return Candidate(
        "; ".join(candidates[pick].name for pick in picks),
        *(
            torch.stack([getattr(candidates[pick], name)[head] for head, pick in enumerate(picks)])
            for name in ("rotation", "query", "mean", "unit")
        ),
    )

"""What a calibration tries: targets, means, clips. A preset is a recipe with a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from oscar_serving.config import ConfigError, OscarConfig

#: ``q``: C_Q. ``k``: K^T K. ``k_read``, ``q_read``: the same, weighted by what is read from INT2 (see ``Moments``).
#: ``balance``, ``balance_read``: K as read balanced against Q, or against Q weighted by INT2 reads (``balanced_maps``).
KTarget = Literal["balance", "balance_read", "q", "k", "q_read", "k_read", "none"]
#: ``scores``: V^T S^T S V. ``proxy``: its published stand-in. ``v``: V^T V. ``v_read``: weighted by INT2 reads.
VTarget = Literal["scores", "proxy", "v", "v_read", "none"]
#: ``none``, the plain mean, or the mean weighted by what is read from INT2.
Mean = Literal["none", "plain", "read"]
Clip = Literal["none", "shrink", "quantile"]

SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)


@dataclass(frozen=True)
class Recipe:
    """Candidates and policy of a calibration.

    Attributes
    ----------
    k_targets, v_targets, means
        What to choose from, per layer and head, by the error of the attention output on held-out tokens.
    per_head
        One rotation and clip per KV head, or one per layer.
    clip
        ``shrink``: a factor on a row's minimum and maximum, chosen on held-out tokens. ``quantile``: the published
        online clip at ``quantiles`` of a row's magnitudes (evaluation only). ``none``.
    use_eigenvectors, use_hadamard, use_bit_reversal
        Parts of the rotation.
    """

    k_targets: tuple[KTarget, ...] = ("balance_read", "balance", "k_read", "k")
    v_targets: tuple[VTarget, ...] = ("v_read", "v")
    means: tuple[Mean, ...] = ("read", "plain")
    per_head: bool = True
    clip: Clip = "shrink"
    quantiles: tuple[float, float] = (0.96, 0.92)
    use_eigenvectors: bool = True
    use_hadamard: bool = True
    use_bit_reversal: bool = True

    def __post_init__(self) -> None:
        for name, values, allowed in (
            ("k_targets", self.k_targets, get_args(KTarget)),
            ("v_targets", self.v_targets, get_args(VTarget)),
            ("means", self.means, get_args(Mean)),
            ("clip", (self.clip,), get_args(Clip)),
        ):
            if not values or not set(values) <= set(allowed):
                raise ConfigError(f"{name}={values!r}: allowed is {', '.join(map(repr, allowed))}")


#: ``default``: chooses. ``paper``: the published recipe as its code runs it. ``oscar``: the paper's targets per head,
#: with the true scores and our clip. ``hadamard`` and ``none``: baselines.
PRESETS: dict[str, Recipe] = {
    "default": Recipe(),
    "paper": Recipe(("q",), ("proxy",), ("none",), per_head=False, clip="quantile"),
    "oscar": Recipe(("q",), ("scores",), ("none",)),
    "hadamard": Recipe(("none",), ("none",), ("none",), use_eigenvectors=False, use_bit_reversal=False),
    "none": Recipe(
        ("none",), ("none",), ("none",), clip="none",
        use_eigenvectors=False, use_hadamard=False, use_bit_reversal=False,
    ),
}  # fmt: skip


def default_config(head_dim: int) -> OscarConfig:
    """Layout that calibration chooses for a head size: groups of 64 with FP8 scales where 64 divides it (2.25 bits)."""
    return OscarConfig(group_size=64 if head_dim % 64 == 0 else None, scale_dtype="float8_e4m3")

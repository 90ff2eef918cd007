"""What an artifact holds, in words."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from oscar_serving.calibration.artifact import Artifact
from oscar_serving.codec import PageLayout


def describe(artifact: Artifact) -> str:
    """Text of some twenty lines: model, layout, calibration, choices, clips and measured quality."""
    arch, config = artifact.architecture, artifact.config
    calibration = artifact.metadata.get("calibration", {})
    layout = PageLayout(arch.head_dim, config)
    lines = [
        ("model", artifact.model_id or "any of this architecture"),
        (
            "architecture",
            f"{arch.model_type}, {arch.layers} layers, {arch.query_heads}/{arch.kv_heads} heads of {arch.head_dim}"
            + (f", sliding window {arch.sliding_window}" if arch.sliding_window else ""),
        ),
        ("fingerprint", artifact.fingerprint),
        (
            "cache",
            f"K {config.k_bits} bits, V {config.v_bits} bits, groups of {layout.group_size}, "
            f"scales {config.scale_dtype}: {layout.bits_per_element:.2f} bits an element",
        ),
        ("windows", f"first {config.sink} and last {config.recent} tokens in {config.window_dtype}"),
        ("preset", str(calibration.get("preset", "unknown"))),
    ]
    for text in calibration.get("texts", []):
        lines.append(("text", f"{text['name']}, {text['tokens']} tokens, sha256 {text['sha256'][:16]}"))
    if "date" in calibration:
        lines.append(("made", f"{calibration['date']} by oscar-serving {calibration.get('tool_version', '?')}"))
    if calibration.get("command"):
        lines.append(("command", str(calibration["command"])))
    for which, names in calibration.get("chosen", {}).items():
        ranked = sorted(names.items(), key=lambda pair: -pair[1])
        lines.append((f"{which.upper()} maps", "; ".join(f"{name}: {count}" for name, count in ranked)))
    transforms = [artifact.layers[layer] for layer in sorted(artifact.layers)]
    lines.append(("K clip", _spread(t.k_shrink for t in transforms)))
    lines.append(("V clip", _spread(t.v_shrink for t in transforms)))
    if artifact.quantile_clip:
        lines.append(
            (
                "clip",
                "online at quantiles {} (K) and {} (V): to be evaluated, not served".format(*artifact.quantile_clip),
            )
        )
    also = sorted({f"{which.upper()} {bits} bits" for _, which, bits in artifact.clips})
    if also:
        lines.append(("clips also for", ", ".join(also)))
    for which, by_layer in calibration.get("relative_error", {}).items():
        worst = max(by_layer.items(), key=lambda pair: max(pair[1]), default=None)
        if worst:
            values = torch.tensor([e for row in by_layer.values() for e in row])
            lines.append(
                (
                    f"{which.upper()} error",
                    f"median {values.median():.4f} of the output, worst {max(worst[1]):.4f} in layer {worst[0]}",
                )
            )
    for name, value in artifact.metadata.get("quality", {}).items():
        lines.append(("quality", f"{name} {value}"))
    return "\n".join(f"{name:15} {value}" for name, value in lines)


def _spread(values: Iterable[Tensor]) -> str:
    joined = torch.cat([v.flatten() for v in values])
    return f"median {joined.median():.2f}, {joined.min():.2f} … {joined.max():.2f} of a row's minimum and maximum"

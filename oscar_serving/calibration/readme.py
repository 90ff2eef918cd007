"""The README of an artifact's folder, from what the artifact and its evaluation say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from oscar_serving.calibration.artifact import Artifact
from oscar_serving.calibration.inspect import describe

EVALUATION = "evaluation.json"


def write_readme(folder: Path | str) -> Path:
    """Write ``README.md`` into an artifact's folder; with its quality, if ``evaluation.json`` lies there."""
    folder = Path(folder)
    artifact = Artifact.load(folder)
    command = artifact.metadata.get("calibration", {}).get("command")
    parts = [f"# {artifact.model_id}\n"]
    if command:
        parts.append(f"Made by\n\n```\n{command}\n```\n")
    parts.append(f"`oscar inspect` says\n\n```\n{describe(artifact)}\n```\n")
    evaluation = folder / EVALUATION
    if evaluation.is_file():
        parts.append(_quality(json.loads(evaluation.read_text(encoding="utf-8"))))
    target = folder / "README.md"
    target.write_text("\n".join(parts), encoding="utf-8")
    return target


def _quality(report: dict[str, Any]) -> str:
    """Markdown table of an evaluation."""
    texts = ", ".join(f"{s['name']} ({s['tokens']} tokens)" for s in report["sources"])
    rows = [
        "| cache | bits an element | KLD | top-1 | perplexity |",
        "| --- | --- | --- | --- | --- |",
    ]
    for entry in report["configurations"]:
        overall = entry["overall"]
        rows.append(
            f"| {entry['name']} | {entry['bits_per_element']:.2f} | {_value(overall['kld_mean'], 4)} | "
            f"{_value(overall['top1'], 1, 100)} % | {_value(overall['perplexity_change'], 2, 100, sign='+')} % |"
        )
    return (
        f"Measured by\n\n```\n{report['meta']['command']}\n```\n\n"
        f"against the unquantized cache: {report['sequences']} sequences of {report['tokens']} tokens from {texts}; "
        "every token reads its history as decoded. Mean ± standard error over sequences.\n\n" + "\n".join(rows) + "\n"
    )


def _value(estimate: dict[str, Any], digits: int, factor: float = 1.0, sign: str = "") -> str:
    text = f"{estimate['value'] * factor:{sign}.{digits}f}"
    return text if estimate["error"] is None else f"{text} ± {estimate['error'] * factor:.{digits}f}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(write_readme(name))

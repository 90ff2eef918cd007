"""Drift of free generation: how long answers get on a quantized cache, and how far they follow the unquantized one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_serving.evaluation.client import Client, Completion
from oscar_serving.evaluation.fidelity import Estimate


@dataclass(frozen=True)
class DriftResult:
    """Answers to the same prompts, ``reference`` and ``other`` in pairs.

    Quantized models that reason tend to run longer: look at ``length_change`` (mean difference of tokens, with its
    standard error over prompts) and at ``truncated`` before comparing scores.
    """

    name: str
    reference: list[Completion]
    other: list[Completion]

    @property
    def length_change(self) -> Estimate:
        """Tokens longer than the reference, mean over prompts."""
        return Estimate.of([float(b.tokens - a.tokens) for a, b in zip(self.reference, self.other, strict=True)])

    @property
    def same_beginning(self) -> Estimate:
        """Share of the reference's text before the first character that differs."""
        return Estimate.of([_common(a.text, b.text) for a, b in zip(self.reference, self.other, strict=True)])

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        pairs = {"reference": self.reference, "other": self.other}
        return {
            "name": self.name,
            "prompts": len(self.other),
            "length_change": self.length_change.to_dict(),
            "same_beginning": self.same_beginning.to_dict(),
            "equal": sum(a.text == b.text for a, b in zip(self.reference, self.other, strict=True)) / len(self.other),
            "mean_tokens": {k: sum(c.tokens for c in v) / len(v) for k, v in pairs.items()},
            "truncated": {k: sum(not c.finished for c in v) / len(v) for k, v in pairs.items()},
        }


def drift(
    reference: Client,
    other: Client,
    prompts: Sequence[str],
    *,
    max_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    chat: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DriftResult:
    """Let two clients answer the same prompts."""
    answers: list[list[Completion]] = []
    for client in (reference, other):
        mine = []
        for index, prompt in enumerate(prompts):
            options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed + index}
            if chat:
                mine.append(client.chat([{"role": "user", "content": prompt}], **options))
            else:
                mine.append(client.complete(prompt, **options))
            if progress is not None:
                progress(len(answers) * len(prompts) + index + 1, 2 * len(prompts))
        answers.append(mine)
    return DriftResult(other.name, *answers)


def _common(reference: str, other: str) -> float:
    """1 where both are equal; otherwise the equal beginning's share of the reference."""
    if reference == other:
        return 1.0
    same = next((i for i, (a, b) in enumerate(zip(reference, other, strict=False)) if a != b), None)
    at = min(len(reference), len(other)) if same is None else same
    return at / max(1, len(reference))

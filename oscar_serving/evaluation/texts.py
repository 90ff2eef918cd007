"""Token sequences to evaluate on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor

from oscar_serving.calibration import texts as calibration_texts
from oscar_serving.calibration.texts import Source
from oscar_serving.evaluation.model import EvaluationError

#: Public-domain English prose that comes with the package; see the licence note beside it.
SAMPLE = "devils-dictionary.txt"


def read_texts(paths: Sequence[Path | str]) -> list[tuple[str, str]]:
    """``(name, text)`` of UTF-8 files; without paths, of the shipped sample."""
    if not paths:
        return [(SAMPLE, files("oscar_serving.evaluation").joinpath("data", SAMPLE).read_text(encoding="utf-8"))]
    return [(Path(path).name, calibration_texts.file_text(Path(path))) for path in paths]


def sequences(
    tokenizer: Any, texts: Sequence[tuple[str, str]], *, count: int, tokens: int
) -> tuple[list[Tensor], list[Source]]:
    """Cut ``count`` sequences of ``tokens + 1`` ids (the last one is only predicted) evenly out of the texts.

    They take turns between the texts, so that the first ones of them are from all.

    Raises
    ------
    EvaluationError
        The texts are too short.
    """
    if count < 1 or tokens < 2:
        raise EvaluationError(f"sequences={count}, tokens={tokens}: at least 1 sequence of 2 tokens")
    shares = [count // len(texts) + (i < count % len(texts)) for i in range(len(texts))]
    parts, sources = [], []
    for pair, share in zip(texts, shares, strict=True):
        if share:
            part, (source,) = calibration_texts.sequences(tokenizer, [pair], share * (tokens + 1), tokens + 1)
            parts.append([sequence for sequence in part if len(sequence) == tokens + 1])
            sources.append(source)
    whole = [part[turn] for turn in range(max(shares)) for part in parts if turn < len(part)]
    if len(whole) < count:
        raise EvaluationError(
            f"the texts give {len(whole)} sequences of {tokens + 1} tokens, {count} were asked for: "
            "pass more or longer texts, or ask for fewer or shorter sequences"
        )
    return whole, sources

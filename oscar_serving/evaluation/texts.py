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

    Raises
    ------
    EvaluationError
        The texts are too short.
    """
    if count < 1 or tokens < 2:
        raise EvaluationError(f"sequences={count}, tokens={tokens}: at least 1 sequence of 2 tokens")
    found, sources = calibration_texts.sequences(tokenizer, texts, count * (tokens + 1), tokens + 1)
    whole = [sequence for sequence in found if len(sequence) == tokens + 1]
    if len(whole) < count:
        raise EvaluationError(
            f"the texts give {len(whole)} sequences of {tokens + 1} tokens, {count} were asked for: "
            "pass more or longer texts, or ask for fewer or shorter sequences"
        )
    return whole[:count], sources

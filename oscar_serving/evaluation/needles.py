"""Multi-key needle retrieval: several facts in a long text, one is asked for, the others are there to be confused."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_serving.evaluation.client import Client
from oscar_serving.evaluation.model import EvaluationError

_PLACES = (
    "Amsterdam", "Bogota", "Cairo", "Dublin", "Edinburgh", "Florence", "Geneva", "Helsinki", "Istanbul", "Jakarta",
    "Kyoto", "Lisbon", "Madrid", "Nairobi", "Oslo", "Prague", "Quito", "Riga", "Seoul", "Tunis", "Utrecht", "Vienna",
    "Warsaw", "Zurich",
)  # fmt: skip
_FACT = " The special magic number for {place} is {number}."
_QUESTION = (
    "\n\nQuestion: What is the special magic number for {place}?\nAnswer: The special magic number for {place} is"
)
_ANSWER_TOKENS = 12
_DIGITS = 4


@dataclass(frozen=True)
class NeedleResult:
    """Share of right answers.

    ``cells`` maps ``(tokens, depth)`` to ``(right, asked)``; a depth is the share of the text before the fact.
    """

    name: str
    cells: dict[tuple[int, float], tuple[int, int]]

    def accuracy(self, tokens: int | None = None) -> tuple[float, float]:
        """Share of right answers and its binomial standard error, over one length or all."""
        chosen = [v for (length, _), v in self.cells.items() if tokens in (None, length)]
        right, asked = (sum(column) for column in zip(*chosen, strict=True))
        share = right / asked
        return share, math.sqrt(share * (1 - share) / asked)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.name,
            "cells": [
                {"tokens": t, "depth": d, "right": right, "asked": asked}
                for (t, d), (right, asked) in self.cells.items()
            ],
        }


def needles(
    client: Client,
    filler: str,
    *,
    lengths: Sequence[int] = (1024, 2048, 4096),
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    texts: int = 4,
    keys: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> NeedleResult:
    """Ask for the fact at every depth of ``texts`` long texts of every length.

    Parameters
    ----------
    filler
        Prose to hide the facts in; a different part of it for each text.
    keys
        Facts in a text, at least one for each depth (the default); more are put at other depths.
    """
    keys = len(depths) if keys is None else keys
    if not len(depths) <= keys <= len(_PLACES):
        raise EvaluationError(f"keys={keys}: from the number of depths, {len(depths)}, to {len(_PLACES)}")
    cells: dict[tuple[int, float], tuple[int, int]] = {}
    total = len(lengths) * texts * len(depths)
    done = 0
    for length in lengths:
        for index in range(texts):
            chooser = random.Random(f"{seed} {length} {index}")
            asked = list(depths)
            others = [chooser.random() for _ in range(keys - len(depths))]
            facts = dict(zip(chooser.sample(_PLACES, keys), asked + others, strict=True))
            numbers = {place: str(chooser.randrange(10 ** (_DIGITS - 1), 10**_DIGITS)) for place in facts}
            text = _text(client, filler, length, facts, numbers, chooser)
            for place, depth in list(facts.items())[: len(depths)]:
                prompt = text + _QUESTION.format(place=place)
                answer = client.complete(prompt, max_tokens=_ANSWER_TOKENS, stop=["\n"]).text
                right, count = cells.get((length, depth), (0, 0))
                cells[length, depth] = right + _states(answer, numbers[place]), count + 1
                done += 1
                if progress is not None:
                    progress(done, total)
    return NeedleResult(client.name, cells)


def _states(answer: str, number: str) -> bool:
    """Whether the first number of the answer is the right one."""
    word = answer.strip().replace(",", "").split(" ")[0] if answer.strip() else ""
    return word.rstrip(".;!?") == number


def _text(
    client: Client, filler: str, length: int, facts: dict[str, float], numbers: dict[str, str], chooser: random.Random
) -> str:
    """A text that is, with a question, about ``length`` tokens long."""
    sentences = [s.strip() + "." for s in filler.replace("\n", " ").split(". ") if len(s.strip()) > 20]
    if len(sentences) < 10:
        raise EvaluationError("the filler has too few sentences to hide facts in")
    start = chooser.randrange(len(sentences))
    rolled = sentences[start:] + sentences[:start]
    lines = {place: _FACT.format(place=place, number=numbers[place]) for place in facts}
    extra = len(client.encode("".join(lines.values()) + _QUESTION.format(place=_PLACES[0])))
    room = length - extra
    per_sentence = len(client.encode(" ".join(rolled[:50]))) / len(rolled[:50])
    count = max(len(facts), int(room / per_sentence))
    while count < len(rolled) and len(client.encode(" ".join(rolled[: count + 1]))) < room:
        count += max(1, (room - len(client.encode(" ".join(rolled[:count])))) // int(2 * per_sentence))
    while count > 1 and len(client.encode(" ".join(rolled[:count]))) > room:
        count -= 1
    if count >= len(rolled):
        raise EvaluationError(f"the filler is too short for texts of {length} tokens")
    parts = rolled[:count]
    for place, depth in sorted(facts.items(), key=lambda item: -item[1]):
        parts.insert(round(depth * count), lines[place].strip())
    return " ".join(parts)

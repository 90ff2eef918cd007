"""Custom tasks: a file of prompts and answers, one JSON object a line.

``{"prompt": "…", "answer": "…"}``, with optional ``"stop": ["…"]`` and ``"max_tokens": 256``; ``"messages"`` in place
of ``"prompt"`` asks through chat. As in GSM8K, an answer after ``####`` is what counts, on both sides.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_serving.evaluation.client import Client, Completion
from oscar_serving.evaluation.model import EvaluationError

_MARK = "####"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_MAX_TOKENS = 256


@dataclass(frozen=True)
class Task:
    """One line of a task file."""

    answer: str
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int = _MAX_TOKENS


@dataclass
class TaskResult:
    """Right answers by two measures: they may disagree about a quantized model, so both are reported.

    ``strict``: the answer, where the format puts it (after ``####``, or all there is), is the expected one.
    ``flexible``: the last number is the expected number, or the expected text occurs anywhere.
    """

    name: str
    strict: list[bool] = field(default_factory=list)
    flexible: list[bool] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    @property
    def truncated(self) -> float:
        """Share of answers that ran into ``max_tokens``."""
        return sum(not c.finished for c in self.completions) / len(self.completions)

    def score(self, measure: str = "strict") -> tuple[float, float]:
        """Share of right answers and its binomial standard error."""
        values: list[bool] = getattr(self, measure)
        share = sum(values) / len(values)
        return share, math.sqrt(share * (1 - share) / len(values))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.name,
            "asked": len(self.strict),
            **{m: dict(zip(("value", "error"), self.score(m), strict=True)) for m in ("strict", "flexible")},
            "truncated": self.truncated,
            "mean_tokens": sum(c.tokens for c in self.completions) / len(self.completions),
            "answers": [c.text for c in self.completions],
        }


def read_tasks(path: Path | str) -> list[Task]:
    """Read a task file; a wrong line is named in the error."""
    tasks = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            tasks.append(_task(json.loads(line)))
        except (ValueError, TypeError, AttributeError) as error:
            raise EvaluationError(f"{path}, line {number}: {error}") from error
    if not tasks:
        raise EvaluationError(f"{path}: has no tasks")
    return tasks


def run_tasks(
    client: Client,
    tasks: Sequence[Task],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> TaskResult:
    """Ask every task."""
    result = TaskResult(client.name)
    for index, task in enumerate(tasks):
        options: dict[str, Any] = {
            "max_tokens": task.max_tokens, "stop": task.stop, "temperature": temperature, "seed": seed + index
        }  # fmt: skip
        completion = (
            client.complete(task.prompt, **options)
            if task.prompt is not None
            else client.chat(task.messages, **options)
        )
        strict, flexible = judge(completion.text, task.answer)
        result.strict.append(strict)
        result.flexible.append(flexible)
        result.completions.append(completion)
        if progress is not None:
            progress(index + 1, len(tasks))
    return result


def judge(text: str, answer: str) -> tuple[bool, bool]:
    """Whether ``text`` gives ``answer``: strictly, and flexibly."""
    expected = _marked(answer) or answer
    given = _marked(text) if _MARK in answer else text
    strict = given is not None and _normal(given) == _normal(expected)
    if _NUMBER.fullmatch(expected.strip()):
        numbers = _NUMBER.findall(text)
        return strict, strict or bool(numbers and _normal(numbers[-1]) == _normal(expected))
    return strict, strict or _normal(expected) in _normal(text)


def _marked(text: str) -> str | None:
    """What follows the last mark on its line."""
    if _MARK not in text:
        return None
    return (text.rsplit(_MARK, 1)[1].strip().splitlines() or [""])[0]


def _normal(text: str) -> str:
    """Case, spaces, thousands' commas, a final full stop and a trailing ``.0`` do not count."""
    text = re.sub(r"(?<=\d),(?=\d)", "", " ".join(text.lower().split())).rstrip(".")
    return re.sub(r"(\d)\.0+$", r"\1", text)


def _task(value: dict[str, Any]) -> Task:
    unknown = set(value) - {"prompt", "messages", "answer", "stop", "max_tokens"}
    if unknown:
        raise ValueError(f"unknown field {sorted(unknown)[0]!r}")
    if ("prompt" in value) == ("messages" in value) or "answer" not in value:
        raise ValueError("needs an answer, and either a prompt or messages")
    stop = value.get("stop", ())
    return Task(
        str(value["answer"]),
        None if "prompt" not in value else str(value["prompt"]),
        tuple(dict(m) for m in value.get("messages", ())),
        (stop,) if isinstance(stop, str) else tuple(stop),
        int(value.get("max_tokens", _MAX_TOKENS)),
    )

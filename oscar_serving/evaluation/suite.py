"""Needles, conversations, drift and custom tasks for several clients side by side: one JSON file, one page."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from oscar_serving.evaluation.client import Client
from oscar_serving.evaluation.drift import drift
from oscar_serving.evaluation.model import EvaluationError
from oscar_serving.evaluation.multiturn import multiturn
from oscar_serving.evaluation.needles import needles
from oscar_serving.evaluation.page import document, table
from oscar_serving.evaluation.tasks import Task, run_tasks

PARTS = ("needles", "multiturn", "drift", "tasks")
Progress = Callable[[str, int, int], None]


def run_suite(
    clients: Sequence[Client],
    out: Path | str | None = None,
    *,
    parts: Sequence[str] = ("needles", "multiturn"),
    filler: str = "",
    lengths: Sequence[int] = (1024, 2048, 4096),
    needle_texts: int = 4,
    conversations: int = 4,
    prompts: Sequence[str] = (),
    max_tokens: int = 256,
    tasks: Sequence[Task] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Ask all clients the same.

    Parameters
    ----------
    clients
        The first one is the reference of the drift: an unquantized cache.
    out
        Folder for ``tasks.json`` and ``tasks.html``.
    parts
        Of :data:`PARTS`.
    filler
        Prose for needles and conversations.
    lengths, needle_texts, conversations
        See :func:`~oscar_serving.evaluation.needles.needles` and
        :func:`~oscar_serving.evaluation.multiturn.multiturn`.
    prompts, max_tokens
        For the drift.
    tasks
        Lines of a task file.

    Returns
    -------
    dict
        What ``tasks.json`` holds: part → results in the order of the clients.
    """
    names = [c.name for c in clients]
    if not names or len(set(names)) < len(names):
        raise EvaluationError(f"clients need distinct names, at least one; got {names}")
    if unknown := sorted(set(parts) - set(PARTS)):
        raise EvaluationError(f"part {unknown[0]!r}: allowed are {', '.join(PARTS)}")
    for part, given, what in (
        ("needles", filler, "filler"),
        ("multiturn", filler, "filler"),
        ("tasks", tasks, "tasks"),
    ):
        if part in parts and not given:
            raise EvaluationError(f"part {part!r} needs {what}")
    if "drift" in parts and (not prompts or len(clients) < 2):
        raise EvaluationError("part 'drift' needs prompts and two clients")
    content: dict[str, Any] = {"format": "oscar-tasks", "clients": names, "seed": seed}
    for part in parts:
        content[part] = []
        for client in clients[1:] if part == "drift" else clients:
            told = _told(progress, f"{part}, {client.name}")
            if part == "needles":
                result: Any = needles(client, filler, lengths=lengths, texts=needle_texts, seed=seed, progress=told)
            elif part == "multiturn":
                result = multiturn(client, filler, conversations=conversations, seed=seed, progress=told)
            elif part == "drift":
                result = drift(clients[0], client, prompts, max_tokens=max_tokens, seed=seed, progress=told)
            else:
                result = run_tasks(client, tasks, seed=seed, progress=told)
            content[part].append(result.to_dict())
    if out is not None:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tasks.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (folder / "tasks.html").write_text(html(content), encoding="utf-8")
    return content


def html(content: dict[str, Any]) -> str:
    """The page of :func:`run_suite`'s results."""
    parts: list[str] = ["<p class=note>± is the standard error.</p>"]
    if "needles" in content:
        lengths = sorted({cell["tokens"] for result in content["needles"] for cell in result["cells"]})
        rows = []
        for result in content["needles"]:
            shares = [[c for c in result["cells"] if c["tokens"] == length] for length in lengths]
            counts = [(sum(c["right"] for c in cells), sum(c["asked"] for c in cells)) for cells in shares]
            rows.append((escape(result["name"]), *(_share(right, asked) for right, asked in counts)))
        parts += ["<h2>Needles found, %, by tokens of the text</h2>", table(("cache", *map(str, lengths)), rows)]
    if "multiturn" in content:
        parts += [
            "<h2>Conversations, %</h2>",
            table(
                ("cache", "right answers", "later turns with a cache hit", "tokens from the cache", "warm equals cold"),
                [
                    (
                        escape(r["name"]),
                        _spread(r["accuracy"]),
                        *(f"{100 * r[k]:.1f}" for k in ("later_turns_with_hit", "hit_rate_tokens", "warm_equals_cold")),
                    )
                    for r in content["multiturn"]
                ],
            ),
        ]
    if "drift" in content:
        parts += [
            f"<h2>Drift from {escape(content['clients'][0])}</h2>",
            table(
                ("cache", "longer by, tokens", "same beginning, %", "equal, %", "cut off, %", "cut off there, %"),
                [
                    (
                        escape(r["name"]),
                        _spread(r["length_change"], 1),
                        _spread(r["same_beginning"]),
                        f"{100 * r['equal']:.1f}",
                        f"{100 * r['truncated']['other']:.1f}",
                        f"{100 * r['truncated']['reference']:.1f}",
                    )
                    for r in content["drift"]
                ],
            ),
        ]
    if "tasks" in content:
        parts += [
            "<h2>Tasks, %</h2>",
            table(
                ("cache", "asked", "strict", "flexible", "cut off", "tokens an answer"),
                [
                    (
                        escape(r["name"]),
                        str(r["asked"]),
                        _spread(r["strict"]),
                        _spread(r["flexible"]),
                        f"{100 * r['truncated']:.1f}",
                        f"{r['mean_tokens']:.1f}",
                    )
                    for r in content["tasks"]
                ],
            ),
        ]
    return document("Tasks on the KV cache", parts)


def _share(right: int, asked: int) -> str:
    share = right / asked
    return _spread({"value": share, "error": (share * (1 - share) / asked) ** 0.5})


def _spread(value: dict[str, float | None], factor: float = 100) -> str:
    mean, error = value["value"], value["error"]
    assert mean is not None
    return f"{factor * mean:.1f}" + ("" if error is None else f" <small>± {factor * error:.1f}</small>")


def _told(progress: Progress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, of: progress(what, done, of)

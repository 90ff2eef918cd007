"""``oscar eval``: configurations of the cache against the unquantized model on held-out text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscar_serving.calibration.texts import Source
from oscar_serving.evaluation import texts as evaluation_texts
from oscar_serving.evaluation.configuration import Configuration
from oscar_serving.evaluation.fidelity import TokenFidelity, buckets, compare, concatenate, summarize
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError
from oscar_serving.evaluation.storage import ExactStorage
from oscar_serving.version import __version__

#: Float32 logits that exist at a time, per model.
_LOGIT_ELEMENTS = 1 << 25

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Result:
    """Metrics of one configuration.

    ``overall`` and the values of ``by_context`` are what :func:`~oscar_serving.evaluation.fidelity.summarize` returns;
    the keys of ``by_context`` are ranges of the number of tokens a query sees, its own included.
    """

    configuration: Configuration
    overall: dict[str, Any]
    by_context: dict[str, dict[str, Any]]
    tokens_per_second: float

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "name": self.configuration.name,
            "bits_per_element": self.configuration.storage.bits_per_element(),
            "cache": self.configuration.storage.describe(),
            "overall": self.overall,
            "by_context": self.by_context,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclass(frozen=True)
class Report:
    """All results of one run and what they were measured on."""

    model: str
    results: list[Result]
    sources: list[Source]
    sequences: int
    tokens: int
    reference_tokens_per_second: float
    dtype: str
    device: str
    date: str
    command: str

    def result(self, name: str) -> Result:
        """The result of that name."""
        return next(r for r in self.results if r.configuration.name == name)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "format": "oscar-evaluation",
            "model": self.model,
            "reference": f"unquantized cache, {self.dtype}",
            "sequences": self.sequences,
            "tokens": self.tokens,
            "sources": [s.to_dict() for s in self.sources],
            "reference_tokens_per_second": self.reference_tokens_per_second,
            "configurations": [r.to_dict() for r in self.results],
            "meta": {
                "date": self.date,
                "device": self.device,
                "dtype": self.dtype,
                "threads": torch.get_num_threads(),
                "versions": {
                    "oscar-serving": __version__,
                    "torch": torch.__version__,
                    "python": sys.version.split()[0],
                },
                "command": self.command,
            },
        }


def evaluate(
    model: EvaluatedModel | Path | str,
    configurations: Sequence[Configuration],
    texts: Sequence[Path | str | tuple[str, str]] = (),
    out: Path | str | None = None,
    *,
    sequences: int = 16,
    tokens: int = 2048,
    progress: Progress | None = None,
) -> Report:
    """Compare each configuration with the unquantized cache, token by token.

    Every query reads its history as decoded from the codes, under the position rule: what a server answers after it has
    generated each token itself (or in prefill mode ``rule``).

    Parameters
    ----------
    model
        A loaded model, or the folder of one (then computed in float32 on the CPU).
    configurations
        What to compare, with distinct names; see :mod:`oscar_serving.evaluation.configuration`.
    texts
        Paths of UTF-8 text files, or ``(name, text)``; without any, the shipped sample. Each gives an equal share of
        the sequences. Take another domain than the calibration's.
    out
        Folder for ``evaluation.json``, the plots and ``report.html``; ``None`` writes nothing.
    sequences, tokens
        How many sequences, of how many tokens.
    progress
        Told ``(what, done, of)`` after each forward pass.
    """
    names = [c.name for c in configurations]
    if not names or len(set(names)) < len(names):
        raise EvaluationError(f"configurations need distinct names, at least one; got {names}")
    judged = model if isinstance(model, EvaluatedModel) else EvaluatedModel.load(model)
    if judged.max_length is not None and tokens > judged.max_length:
        raise EvaluationError(f"tokens={tokens}: {judged.name} was made for at most {judged.max_length}")
    pairs = [t if isinstance(t, tuple) else evaluation_texts.read_texts([t])[0] for t in texts]
    found, sources = evaluation_texts.sequences(
        judged.tokenizer, pairs or evaluation_texts.read_texts([]), count=sequences, tokens=tokens
    )
    storages = [ExactStorage(torch.float32), *(c.storage for c in configurations)]
    seconds = [0.0] * len(storages)
    fidelity: list[list[TokenFidelity]] = [[] for _ in configurations]
    total = len(found) * len(storages)
    for index, sequence in enumerate(found):
        hidden = []
        for at, storage in enumerate(storages):
            begin = time.perf_counter()
            hidden.append(judged.sequence_hidden(sequence[:-1], storage))
            seconds[at] += time.perf_counter() - begin
            if progress is not None:
                name = ["reference", *names][at]
                progress(f"sequence {index + 1}, {name}", index * len(storages) + at + 1, total)
        for target, value in zip(fidelity, _fidelity(judged, hidden, sequence[1:]), strict=True):
            target.append(value)
    speed = [len(found) * tokens / s for s in seconds]
    report = Report(
        judged.name,
        [
            Result(
                configuration,
                summarize(values),
                {f"{a + 1}-{b}": summarize(values, a, b) for a, b in buckets(tokens)},
                speed[at + 1],
            )
            for at, (configuration, values) in enumerate(zip(configurations, fidelity, strict=True))
        ],
        sources,
        len(found),
        tokens,
        speed[0],
        str(judged.model.dtype).removeprefix("torch."),
        str(judged.device),
        datetime.now(UTC).strftime("%Y-%m-%d"),
        " ".join(["oscar", *sys.argv[1:]]),
    )
    if out is not None:
        write(report, Path(out))
    return report


def write(report: Report, folder: Path) -> None:
    """Write ``evaluation.json``, plots and ``report.html``."""
    from oscar_serving.evaluation.page import write_page

    folder.mkdir(parents=True, exist_ok=True)
    content = report.to_dict()
    (folder / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_page(content, folder)


def _fidelity(judged: EvaluatedModel, hidden: list[Tensor], targets: Tensor) -> list[TokenFidelity]:
    """Fidelity of ``hidden[1:]`` to ``hidden[0]``; the logits exist a chunk of positions at a time."""
    chunk = max(1, _LOGIT_ELEMENTS // judged.vocab_size)
    parts: list[list[TokenFidelity]] = [[] for _ in hidden[1:]]
    for start in range(0, len(targets), chunk):
        goal = targets[start : start + chunk].to(judged.device)
        reference, *others = (h[start : start + chunk] for h in hidden)
        expected = judged.logits(reference).log_softmax(-1)
        for target, other in zip(parts, others, strict=True):
            target.append(compare(expected, judged.logits(other).log_softmax(-1), goal))
    return [concatenate(p) for p in parts]

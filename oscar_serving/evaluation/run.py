"""``oscar eval``: configurations of the cache against the unquantized model on held-out text."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscar_serving.calibration import texts as calibration
from oscar_serving.calibration.texts import Source
from oscar_serving.config import OscarConfig
from oscar_serving.evaluation import texts as evaluation_texts
from oscar_serving.evaluation.configuration import Configuration
from oscar_serving.evaluation.fidelity import TokenFidelity, buckets, compare, concatenate, summarize
from oscar_serving.evaluation.grid import AXES, Grid
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError
from oscar_serving.evaluation.state import EvaluationState
from oscar_serving.evaluation.storage import ExactStorage
from oscar_serving.version import __version__

#: Float32 logits that exist at a time, per model.
_LOGIT_ELEMENTS = 1 << 25
_REFERENCE = ExactStorage(torch.float32)

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
    tokens_per_second: float | None

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
    reference_tokens_per_second: float | None
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
    state: Path | str | None = None,
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
    state
        Folder in which results are kept as they come, by content: an interrupted run goes on where it was, and a later
        one with more configurations computes only those.
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
    kept = None if state is None else EvaluationState(Path(state), judged.identity)
    clock = _Clock(len(configurations))
    fidelity: list[list[TokenFidelity]] = [[] for _ in configurations]
    for index, sequence in enumerate(found):
        before = [kept.load(sequence, c.storage.describe()) if kept else None for c in configurations]
        missing = [c for c, one in zip(configurations, before, strict=True) if one is None]
        hidden = []
        for at, storage in enumerate([_REFERENCE, *(c.storage for c in missing)] if missing else []):
            with clock.timing(None if at == 0 else names.index(missing[at - 1].name), tokens):
                hidden.append(judged.sequence_hidden(sequence[:-1], storage))
            if progress is not None:
                name = missing[at - 1].name if at else "reference"
                progress(f"sequence {index + 1}, {name}", index * (len(names) + 1) + at, len(found) * (len(names) + 1))
        computed = iter(_fidelity(judged, hidden, sequence[1:]) if missing else [])
        for at, (configuration, one) in enumerate(zip(configurations, before, strict=True)):
            if one is None:
                value = next(computed)
                if kept is not None:
                    kept.save(sequence, configuration.storage.describe(), value, clock.last[at])
            else:
                value = one[0]
                clock.add(at, one[1], tokens)
            fidelity[at].append(value)
        if progress is not None:
            progress(f"sequence {index + 1}", (index + 1) * (len(names) + 1), len(found) * (len(names) + 1))
    report = Report(
        judged.name,
        [
            Result(
                configuration,
                summarize(values),
                {f"{a + 1}-{b}": summarize(values, a, b) for a, b in buckets(tokens)},
                clock.speed(at),
            )
            for at, (configuration, values) in enumerate(zip(configurations, fidelity, strict=True))
        ],
        sources,
        len(found),
        tokens,
        clock.speed(None),
        str(judged.model.dtype).removeprefix("torch."),
        str(judged.device),
        datetime.now(UTC).strftime("%Y-%m-%d"),
        " ".join(["oscar", *sys.argv[1:]]),
    )
    if out is not None:
        write(report, Path(out))
    return report


def evaluate_grid(
    model: EvaluatedModel | Path | str,
    texts: Sequence[Path | str | tuple[str, str]] = (),
    out: Path | str | None = None,
    *,
    axes: Sequence[str] = AXES,
    calibration_texts: Sequence[Path | str] = (),
    calibration_tokens: int = 16384,
    config: OscarConfig | None = None,
    sequences: int = 4,
    tokens: int = 2048,
    state: Path | str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Calibrate and evaluate the variants of :mod:`oscar_serving.evaluation.grid`.

    Parameters
    ----------
    axes
        Which things to vary.
    calibration_texts
        UTF-8 files; without any, docstrings of Python's standard library, as ``oscar calibrate`` does. A quarter as
        many tokens again are held out to choose on.
    config
        Layout and windows around which to vary.

    The other parameters are those of :func:`evaluate`.
    """
    judged = model if isinstance(model, EvaluatedModel) else EvaluatedModel.load(model)
    named = [(Path(path).name, calibration.file_text(Path(path))) for path in calibration_texts]
    named = named or [("docstrings of Python's standard library", calibration.docstrings())]
    length = min(2048, judged.max_length or 2048)
    found, _ = calibration.sequences(judged.tokenizer, named, calibration_tokens * 5 // 4, length)
    held_out = max(1, len(found) // 5)
    if len(found) < 2:
        raise EvaluationError("the calibration texts are too short: two sequences at least")
    grid = Grid(judged, found[:-held_out], found[-held_out:], config, progress)
    return evaluate(
        judged, list(grid.configurations(axes)), texts, out,
        sequences=sequences, tokens=tokens, state=state, progress=progress,
    )  # fmt: skip


class _Clock:
    """Seconds and tokens of each configuration, and of the reference (``None``)."""

    def __init__(self, configurations: int) -> None:
        keys: list[int | None] = [None, *range(configurations)]
        self._seconds: dict[int | None, float] = dict.fromkeys(keys, 0.0)
        self._tokens: dict[int | None, int] = dict.fromkeys(keys, 0)
        self.last: dict[int | None, float] = dict.fromkeys(keys, 0.0)

    @contextmanager
    def timing(self, key: int | None, tokens: int) -> Iterator[None]:
        """Time the block."""
        begin = time.perf_counter()
        yield
        self.add(key, time.perf_counter() - begin, tokens)

    def add(self, key: int | None, seconds: float, tokens: int) -> None:
        """Count one forward pass."""
        self.last[key] = seconds
        self._seconds[key] += seconds
        self._tokens[key] += tokens

    def speed(self, key: int | None) -> float | None:
        """Tokens a second; ``None`` where nothing was computed."""
        return self._tokens[key] / self._seconds[key] if self._seconds[key] else None


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

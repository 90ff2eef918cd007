"""``oscar eval``: configurations of the cache against the unquantized model on held-out text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

from oscar_serving.calibration import texts as calibration
from oscar_serving.config import OscarConfig
from oscar_serving.evaluation import texts as evaluation_texts
from oscar_serving.evaluation.configuration import Configuration
from oscar_serving.evaluation.fidelity import TokenFidelity, buckets, compare, concatenate, summarize
from oscar_serving.evaluation.grid import AXES, Grid
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError
from oscar_serving.evaluation.report import Report, Result, write
from oscar_serving.evaluation.state import EvaluationState, Pass
from oscar_serving.evaluation.storage import ExactStorage

#: Float32 logits that exist at a time, per model.
_LOGIT_ELEMENTS = 1 << 25
_REFERENCE = ExactStorage(torch.float32)

Progress = Callable[[str, int, int], None]


def evaluate(
    model: EvaluatedModel | Path | str,
    configurations: Sequence[Configuration],
    texts: Sequence[Path | str | tuple[str, str]] = (),
    out: Path | str | None = None,
    *,
    sequences: int = 16,
    tokens: int = 2048,
    limit: int | None = None,
    stride: int = 1,
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
    limit
        Stop after so many of the sequences (they take turns between the texts).
    stride
        Compare every so many positions only: a large vocabulary makes the logits dearer than the model.
    state
        Folder in which results are kept as they come, by content: an interrupted run goes on where it was, and a later
        one with more configurations computes only those.
    progress
        Told ``(what, done, of)`` after each forward pass.
    """
    names = [c.name for c in configurations]
    if not names or len(set(names)) < len(names):
        raise EvaluationError(f"configurations need distinct names, at least one; got {names}")
    if not 1 <= stride <= tokens or (limit is not None and limit < 1):
        raise EvaluationError(f"stride={stride}, limit={limit}: at least 1, and a stride of at most {tokens} tokens")
    judged = model if isinstance(model, EvaluatedModel) else EvaluatedModel.load(model)
    if judged.max_length is not None and tokens > judged.max_length:
        raise EvaluationError(f"tokens={tokens}: {judged.name} was made for at most {judged.max_length}")
    pairs = [t if isinstance(t, tuple) else evaluation_texts.read_texts([t])[0] for t in texts]
    found, sources = evaluation_texts.sequences(
        judged.tokenizer, pairs or evaluation_texts.read_texts([]), count=sequences, tokens=tokens
    )
    found = found[:limit]
    kept = None if state is None else EvaluationState(Path(state), judged.identity, stride)
    steps = len(names) + 1
    passes: list[list[Pass]] = []
    for index, sequence in enumerate(found):

        def told(name: str, done: int, index: int = index) -> None:
            if progress is not None:
                progress(f"sequence {index + 1}, {name}", index * steps + done, len(found) * steps)

        passes.append(_evaluate_sequence(judged, configurations, sequence, stride, kept, told))
    columns = list(zip(*passes, strict=True))
    report = Report(
        judged.name,
        [
            Result(
                configuration,
                summarize([one.fidelity for one in column]),
                {
                    f"{a + 1}-{b}": summarize([one.fidelity for one in column], -(-a // stride), -(-b // stride))
                    for a, b in buckets(tokens)
                },
                len(found) * tokens / sum(one.seconds for one in column),
            )
            for configuration, column in zip(configurations, columns, strict=True)
        ],
        sources,
        len(found),
        tokens,
        stride,
        str(judged.model.dtype).removeprefix("torch."),
        str(judged.device),
        datetime.now(UTC).strftime("%Y-%m-%d"),
        " ".join(["oscar", *sys.argv[1:]]),
    )
    if out is not None:
        write(report, Path(out))
    return report


def _evaluate_sequence(
    judged: EvaluatedModel,
    configurations: Sequence[Configuration],
    sequence: Tensor,
    stride: int,
    kept: EvaluationState | None,
    told: Callable[[str, int], None],
) -> list[Pass]:
    """One pass a configuration; what ``kept`` has is not computed again."""
    caches = [c.storage.describe() for c in configurations]
    found = [kept.load(sequence, cache) if kept else None for cache in caches]
    missing = [at for at, one in enumerate(found) if one is None]
    if missing:
        reference = kept.load_hidden(sequence) if kept else None
        if reference is None:
            reference = judged.sequence_hidden(sequence[:-1], _REFERENCE)
            if kept is not None:
                kept.save_hidden(sequence, reference)
        told("reference", 0)
        hidden = [reference.to(judged.device)]
        seconds = []
        for at in missing:
            begin = time.perf_counter()
            hidden.append(judged.sequence_hidden(sequence[:-1], configurations[at].storage))
            seconds.append(time.perf_counter() - begin)
            told(configurations[at].name, at + 1)
        computed = _fidelity(judged, [h[::stride] for h in hidden], sequence[1:][::stride])
        for at, fidelity, spent in zip(missing, computed, seconds, strict=True):
            found[at] = Pass(fidelity, spent)
            if kept is not None:
                kept.save(sequence, caches[at], Pass(fidelity, spent))
    told("done", len(configurations) + 1)
    return [one for one in found if one is not None]


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
    limit: int | None = None,
    stride: int = 1,
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
        sequences=sequences, tokens=tokens, limit=limit, stride=stride, state=state, progress=progress,
    )  # fmt: skip


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

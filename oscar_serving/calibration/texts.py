"""Token sequences to calibrate on: text files, docstrings of the standard library, or the model's own words."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_SHORTEST_DOCSTRING = 200
_TURN_TOKENS = 512
_BATCH = 8

#: Openings of self-generated text, varied in subject, language and form.
PROMPTS = (
    "Explain how photosynthesis works.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Give me a recipe for a vegetable soup, step by step.",
    "What caused the First World War?",
    "Write a Python function that merges two sorted lists, and explain it.",
    "Compare the advantages of trains and aeroplanes for travel in Europe.",
    "Describe the rules of chess to a child.",
    "Write a polite letter to a landlord about a broken heater.",
    "Summarise the plot of Romeo and Juliet.",
    "How does a refrigerator keep food cold?",
    "List ten ideas for a birthday party and describe each one.",
    "Solve: a train travels 180 km in 2 hours and 15 minutes. What is its average speed?",
    "Schreibe einen kurzen Text über den Herbst im Wald.",
    "Raconte l'histoire de la tour Eiffel.",
    "Write an SQL query that finds the three customers with the most orders.",
    "What is the difference between a virus and a bacterium?",
    "Write a dialogue between a doctor and a patient with a headache.",
    "Explain compound interest with an example.",
    "Describe a walk through a market in Marrakesh.",
    "How do vaccines train the immune system?",
    "Write a poem about the sea in winter.",
    "Explain what a hash table is and when to use one.",
    "Give advice to somebody who starts a new job next week.",
    "Describe the water cycle and why it matters for farming.",
)


class TextError(ValueError):
    """A calibration text cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Source:
    """Where calibration tokens came from."""

    name: str
    sha256: str
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def file_text(path: Path) -> str:
    """Contents of a UTF-8 text file."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(f"text {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TextError(f"text {path}: not UTF-8 ({error.reason} at byte {error.start})") from error
    if not text.strip():
        raise TextError(f"text {path}: is empty")
    return text


def docstrings() -> str:
    """Docstrings of the standard library's top-level modules: prose, code and tables that every installation has."""
    found: list[str] = []
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError, OSError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node)
                if text and len(text) >= _SHORTEST_DOCSTRING:
                    found.append(text)
    return "\n\n".join(sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest()))


def sequences(
    tokenizer: Any, texts: Sequence[tuple[str, str]], tokens: int, length: int
) -> tuple[list[Tensor], list[Source]]:
    """Cut texts into sequences.

    Parameters
    ----------
    texts
        ``(name, text)`` pairs; each gives an equal share, taken evenly over its whole length.
    tokens, length
        Tokens wanted in all, and in a sequence (its beginning-of-sequence token included).

    Returns
    -------
    list of int64 ``[length]``, and where they came from. Fewer than asked for if the texts are short.
    """
    if not texts:
        raise TextError("no calibration text: pass files, or let the model generate")
    start = list(tokenizer("").input_ids)
    body = length - len(start)
    wanted = max(1, -(-tokens // length))
    per_text = [wanted // len(texts) + (i < wanted % len(texts)) for i in range(len(texts))]
    found: list[Tensor] = []
    sources: list[Source] = []
    for (name, text), count in zip(texts, per_text, strict=True):
        ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        pieces = [ids[at : at + body] for at in range(0, max(1, len(ids) - body + 1), body)]
        step = max(1.0, len(pieces) / max(1, count))
        taken = [pieces[int(i * step)] for i in range(min(count, len(pieces)))]
        found += [torch.tensor(start + piece) for piece in taken]
        sources.append(Source(name, hashlib.sha256(text.encode()).hexdigest(), sum(map(len, taken))))
    return [s for s in found if len(s) > len(start)], sources


def generated(
    model: Any, tokenizer: Any, tokens: int, length: int, *, seed: int, progress: Callable[[int, int], None]
) -> tuple[list[Tensor], Source]:
    """Sequences of the model's own words, sampled at temperature 1 from varied openings.

    Answers of up to 512 tokens follow each other in a sequence, each after its prompt (in the model's chat template
    where it has one).
    """
    count = max(1, -(-tokens // length))
    rows: list[int] = []
    turn = 0
    torch.manual_seed(seed)
    while len(rows) < count * length:
        prompts = [PROMPTS[(turn + i) % len(PROMPTS)] for i in range(_BATCH)]
        for ids in _answers(model, tokenizer, prompts):
            rows += ids
        turn += _BATCH
        progress(min(len(rows), count * length), count * length)
    found = [torch.tensor(rows[i * length : (i + 1) * length]) for i in range(count)]
    digest = hashlib.sha256(repr(rows[: count * length]).encode()).hexdigest()
    return found, Source(f"generated by the model, temperature 1, seed {seed}", digest, count * length)


def _answers(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Prompt and sampled answer of each prompt, token ids without padding."""
    if tokenizer.chat_template:
        encoded = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p}], add_generation_prompt=True, return_dict=False
            )
            for p in prompts
        ]
    else:
        encoded = [tokenizer(p + "\n").input_ids for p in prompts]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    width = max(map(len, encoded))
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids.to(model.device), attention_mask=mask.to(model.device), max_new_tokens=_TURN_TOKENS,
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=pad,
        )  # fmt: skip
    end = model.generation_config.eos_token_id
    ends = set(end if isinstance(end, list) else [end])
    answers = []
    for row, prompt in zip(out[:, width:].tolist(), encoded, strict=True):
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        answers.append([*prompt, *row[:stop]])
    return answers

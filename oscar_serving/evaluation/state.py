"""What an interrupted evaluation has done already: one small file a sequence and configuration."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oscar_serving.evaluation.fidelity import TokenFidelity
from oscar_serving.version import __version__


class Pass(NamedTuple):
    """Fidelity of a configuration on one sequence, and how long the forward pass took."""

    fidelity: TokenFidelity
    seconds: float


@dataclass(frozen=True)
class EvaluationState:
    """Results by content: model, computing type, tokens and everything that describes the cache.

    Attributes
    ----------
    folder
        Where they are kept.
    model
        What tells the model apart from others.
    stride
        Of the positions.
    """

    folder: Path
    model: str
    stride: int

    def load(self, sequence: Tensor, cache: dict[str, Any]) -> Pass | None:
        """Result of an earlier run; ``None`` if there is none that can be read."""
        try:
            with safe_open(self._file(sequence, cache), framework="pt") as reader:
                parts = [reader.get_tensor(name) for name in TokenFidelity._fields]
                return Pass(TokenFidelity(*parts), float((reader.metadata() or {})["seconds"]))
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def save(self, sequence: Tensor, cache: dict[str, Any], found: Pass) -> None:
        """Keep a result."""
        self._write(self._file(sequence, cache), dict(found.fidelity._asdict()), {"seconds": repr(found.seconds)})

    def load_hidden(self, sequence: Tensor) -> Tensor | None:
        """Hidden states of the unquantized model; ``None`` if they cannot be read."""
        try:
            with safe_open(self._file(sequence, {"kind": "hidden"}, any_stride=True), framework="pt") as reader:
                return reader.get_tensor("hidden")
        except (OSError, SafetensorError):
            return None

    def save_hidden(self, sequence: Tensor, hidden: Tensor) -> None:
        """Keep the hidden states of the unquantized model."""
        self._write(self._file(sequence, {"kind": "hidden"}, any_stride=True), {"hidden": hidden.cpu()}, {})

    def _write(self, file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(f".{os.getpid()}")
        save_file({name: value.contiguous() for name, value in tensors.items()}, scratch, metadata=metadata)
        scratch.replace(file)

    def _file(self, sequence: Tensor, cache: dict[str, Any], *, any_stride: bool = False) -> Path:
        about = [__version__, self.model, 0 if any_stride else self.stride, cache]
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        digest.update(sequence.numpy().tobytes())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

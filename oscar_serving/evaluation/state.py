"""What an interrupted evaluation has done already: one small file a sequence and configuration."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oscar_serving.evaluation.fidelity import TokenFidelity
from oscar_serving.version import __version__


@dataclass(frozen=True)
class EvaluationState:
    """Results by content: model, computing type, tokens and everything that describes the cache.

    Attributes
    ----------
    folder
        Where they are kept.
    model
        What tells the model apart from others.
    """

    folder: Path
    model: str

    def load(self, sequence: Tensor, cache: dict[str, Any]) -> tuple[TokenFidelity, float] | None:
        """Fidelity and seconds of an earlier run; ``None`` if there is none that can be read."""
        try:
            with safe_open(self._file(sequence, cache), framework="pt") as reader:
                parts = [reader.get_tensor(name) for name in TokenFidelity._fields]
                return TokenFidelity(*parts), float((reader.metadata() or {})["seconds"])
        except (OSError, SafetensorError, KeyError, ValueError):
            return None

    def save(self, sequence: Tensor, cache: dict[str, Any], fidelity: TokenFidelity, seconds: float) -> None:
        """Keep a result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self._file(sequence, cache)
        scratch = file.with_suffix(f".{os.getpid()}")
        tensors = {name: value.contiguous() for name, value in fidelity._asdict().items()}
        save_file(tensors, scratch, metadata={"seconds": repr(seconds)})
        scratch.replace(file)

    def _file(self, sequence: Tensor, cache: dict[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps([__version__, self.model, cache], sort_keys=True).encode())
        digest.update(sequence.numpy().tobytes())
        return self.folder / f"{digest.hexdigest()[:32]}.safetensors"

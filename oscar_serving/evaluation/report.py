"""What an evaluation found: results of configurations, and the files that they are written to."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from oscar_serving.calibration.texts import Source
from oscar_serving.evaluation.configuration import Configuration
from oscar_serving.evaluation.page import write_page
from oscar_serving.version import __version__


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
    stride: int
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
            "stride": self.stride,
            "sources": [s.to_dict() for s in self.sources],
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


def write(report: Report, folder: Path) -> None:
    """Write ``evaluation.json``, plots and ``report.html``."""
    folder.mkdir(parents=True, exist_ok=True)
    content = report.to_dict()
    (folder / "evaluation.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    write_page(content, folder)

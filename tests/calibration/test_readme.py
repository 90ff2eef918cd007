"""The README of an artifact's folder holds the command, the description and the measured quality."""

from __future__ import annotations

import json
from pathlib import Path

from oscar_serving.calibration.readme import write_readme
from tests.calibration.test_artifact import artifact


def test_readme(tmp_path: Path) -> None:
    made = artifact()
    made.metadata["calibration"] = {"command": "oscar calibrate m --out x"}
    made.save(tmp_path)
    assert "Measured" not in write_readme(tmp_path).read_text()
    estimate = {"value": 0.01234, "error": 0.001}
    overall = {"kld_mean": estimate, "top1": {"value": 0.95, "error": None}, "perplexity_change": estimate}
    report = {
        "sequences": 2,
        "tokens": 64,
        "sources": [{"name": "book.txt", "tokens": 128}],
        "configurations": [{"name": "OSCAR", "bits_per_element": 2.25, "overall": overall}],
        "meta": {"command": "oscar eval m"},
    }
    (tmp_path / "evaluation.json").write_text(json.dumps(report))
    text = write_readme(tmp_path).read_text()
    assert "oscar calibrate m --out x" in text
    assert made.fingerprint in text
    assert "| OSCAR | 2.25 | 0.0123 ± 0.0010 | 95.0 % | +1.23 ± 0.10 % |" in text
    assert "2 sequences of 64 tokens from book.txt (128 tokens)" in text

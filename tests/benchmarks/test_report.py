"""Result files become tables; a missed target says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cpu_decode, report
from benchmarks.result import write_result

ROW: dict[str, Any] = {
    "case": "decode, 8K",
    "metric": "time",
    "unit": "ms",
    "ours": 12.345,
    "baselines": {"BF16": 20.0},
    "ratio": 0.617,
    "must": 1.0,
    "aim": 0.5,
    "direction": "lower",
}


def test_a_table_from_a_result_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every number of the row is in it, the missed aim is marked, the device is named."""
    path = write_result("speed", [ROW, {**ROW, "baselines": {"FP8": 1234.5}, "must": None}], "a device", tmp_path)
    report.main([str(path)])
    out = capsys.readouterr().out
    assert "| case | metric | OSCAR | BF16 | FP8 | ratio | must be | aim |" in out
    assert "| decode, 8K | time (ms) | **12.3** | 20 |  | 0.617 | ≤ 1 | ≤ 0.5 **missed** |" in out
    assert "| decode, 8K | time (ms) | **12.3** |  | 1234 | 0.617 |  | ≤ 0.5 **missed** |" in out
    assert "a device" in out


def test_higher_is_better() -> None:
    """The bound turns around."""
    row = {**ROW, "direction": "higher", "ratio": 1.2}
    assert report.bound(row, "must") == "≥ 1"
    assert report.bound({**row, "ratio": 0.9}, "must") == "≥ 1 **missed**"


def test_fills_a_document(tmp_path: Path) -> None:
    """Only between the marks; twice gives the same."""
    path = write_result("speed", [ROW], "a device", tmp_path)
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- results:speed -->\nold\n<!-- /results -->\nafter\n")
    report.main([str(path), "--write", str(document)])
    text = document.read_text()
    assert text.startswith("before\n<!-- results:speed -->\n| case |")
    assert text.endswith("<!-- /results -->\nafter\n")
    assert "old" not in text
    report.main([str(path), "--write", str(document)])
    assert document.read_text() == text


def test_an_unknown_name_is_an_error() -> None:
    """A place for results that do not exist."""
    with pytest.raises(ValueError, match="results:speed: no result file"):
        report.fill("<!-- results:speed -->\n<!-- /results -->", {})


def test_a_row_without_a_field_is_an_error(tmp_path: Path) -> None:
    """Nothing half is written."""
    with pytest.raises(ValueError, match="lacks must"):
        write_result("speed", [{k: v for k, v in ROW.items() if k != "must"}], "a device", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_cpu_benchmark_writes_a_result(tmp_path: Path) -> None:
    """Attention alone, small: the compiled backend, the eager one and BF16 beside it."""
    cpu_decode.main(
        ["--only", "attention", "--contexts", "400", "--tokens", "2", "--out", str(tmp_path), "--threads", "1"]
    )
    (path,) = tmp_path.iterdir()
    (row,) = json.loads(path.read_text())["rows"]
    assert row["ours"] > 0
    assert len(row["baselines"]) == 2

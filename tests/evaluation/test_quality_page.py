"""The quality benchmark's rows and the tables made of them."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import quality, quality_doc
from benchmarks.result import RESULTS


def _configuration(name: str, kld: float) -> dict:
    metrics = {
        "kld_mean": {"value": kld, "error": 0.001}, "kld_median": kld / 2, "kld_tail": kld * 30,
        "top1": {"value": 0.93, "error": 0.002}, "perplexity_change": {"value": 0.01, "error": None},
    }  # fmt: skip
    return {"name": name, "bits_per_element": 2.25, "overall": metrics, "by_context": {"1-256": metrics}}


REPORT = {
    "model": "M", "sequences": 16, "tokens": 2048, "stride": 1,
    "configurations": [_configuration("published recipe", 0.09), _configuration("OSCAR", 0.018)],
}  # fmt: skip
RETRIEVAL = {
    "model": "M",
    "needles": [{"name": "OSCAR", "cells": [{"tokens": 1024, "depth": d, "right": 2, "asked": 4} for d in (0.1, 0.9)]}],
    "multiturn": [{"name": "OSCAR", "asked": 8, "accuracy": {"value": 0.5, "error": 0.1}, "warm_equals_cold": 1.0}],
}


def rows() -> list[dict]:
    return [*quality.fidelity_rows("smollm2", REPORT), *quality.retrieval_rows(RETRIEVAL), *quality.grid_rows(REPORT)]


def test_rows_judge_by_the_criteria():
    ours = {
        row["metric"]: row
        for row in rows()
        if row.get("cache") == "OSCAR" and "context" not in row and "grid" not in row
    }
    assert ours["KLD"]["must"] == 0.025
    assert ours["KLD"]["ratio"] == 0.018
    assert ours["top-1"]["direction"] == "higher"
    assert ours["KLD"]["baselines"] == {"published recipe": 0.09}
    (beaten,) = (row for row in rows() if "against" in row["case"])
    assert beaten["ratio"] == pytest.approx(0.2)
    assert beaten["must"] == pytest.approx(1 / 3)


def test_tables():
    page = "".join(
        f"<!-- table: {name} -->\nSTALE\n<!-- end -->\n"
        for name in ("criteria", "fidelity M", "context M", "grid M", "needles M", "conversations M")
    )
    new = quality_doc.filled(page, rows())
    assert "STALE" not in new
    assert "| OSCAR | 2.25 | 0.0180 ± 0.0010 | 0.0090 | 0.54 | 93.00 ± 0.20 | +1.00 |" in new
    assert "| OSCAR | 50.0 ± 17.7 |" in new
    assert "| 0.2 | 0.3333, aim 0.1667 | reached |" in new
    assert "| 0.018 | 0.025, aim 0.012 | reached |" in new
    assert quality_doc.filled(new, rows()) == new
    with pytest.raises(KeyError):
        quality_doc.filled("<!-- table: unknown -->\n<!-- end -->", rows())


def test_a_missed_criterion_says_so():
    worse = json.loads(json.dumps(REPORT).replace("0.018", "0.05"))
    assert "| 0.05 | 0.025, aim 0.012 | **missed** |" in quality_doc.filled(
        "<!-- table: criteria -->\n<!-- end -->", list(quality.fidelity_rows("smollm2", worse))
    )


@pytest.mark.parametrize("path", quality_doc.PAGES, ids=lambda path: path.name)
def test_the_page_is_what_the_results_say(path):
    page = path.read_text(encoding="utf-8")
    if not list(RESULTS.glob("quality-[0-9]*.json")):
        assert not re.search(r"<!-- table: .*? -->\n\|", page), "tables without a result file"
        return
    assert quality_doc.filled(page, quality_doc.latest()) == page

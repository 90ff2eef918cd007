"""Quality tables of docs/quality.md and the README: ``python -m benchmarks.quality_doc`` rewrites them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "quality.md", ROOT / "README.md"
#: Caches in the README's table.
_README = ("FP8", "INT4 Hadamard", "INT2 unrotated", "INT2 Hadamard", "published recipe", "OSCAR", "OSCAR K4V2")
_MARKED = re.compile(r"(<!-- table: (?P<name>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)
_METRICS = ("KLD", "KLD median", "KLD 99.9 %", "top-1", "perplexity change")
_FORMS = {"KLD": ".4f", "KLD median": ".4f", "KLD 99.9 %": ".2f", "top-1": ".2f", "perplexity change": "+.2f"}


def latest() -> list[dict[str, Any]]:
    """Rows of the newest results, the details included."""
    rows: list[dict[str, Any]] = []
    for name in ("quality", "quality-details"):
        path = max(RESULTS.glob(f"{name}-[0-9]*.json"))
        rows += json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def filled(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with every marked table written anew; a table that is not known raises ``KeyError``."""
    tables = dict(_tables(rows))
    return _MARKED.sub(lambda match: match[1] + tables[match["name"]] + match[3], page)


def _tables(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Name and content: ``readme``, ``criteria``; by model the rest."""
    yield "readme", _short(rows)
    yield "criteria", _criteria(rows)
    for model in dict.fromkeys(row["model"] for row in rows if "model" in row):
        mine = [row for row in rows if row.get("model") == model]
        whole = [r for r in mine if "context" not in r and r["metric"] in _METRICS]
        yield f"fidelity {model}", _by_cache([r for r in whole if "grid" not in r])
        yield f"grid {model}", _by_cache([r for r in whole if "grid" in r])
        yield f"context {model}", _by_context([r for r in mine if "context" in r and r["metric"] == "KLD"], ".4f")
        yield f"needles {model}", _by_context([r for r in mine if r["metric"] == "found"], ".1f")
        talks = [r for r in mine if r["metric"] in ("right answers", "warm equals cold")]
        yield f"conversations {model}", _talks(talks)


def _short(rows: list[dict[str, Any]]) -> str:
    whole = [r for r in rows if r["metric"] in ("KLD", "top-1") and not {"context", "grid"} & r.keys() and "cache" in r]
    models = list(dict.fromkeys(row["model"] for row in whole))
    values = {(row["cache"], row["model"], row["metric"]): row for row in whole}
    body = []
    for cache in _README:
        if all((cache, model, "KLD") in values for model in models):
            cells = [_value(values[cache, m, metric], _FORMS[metric]) for m in models for metric in ("KLD", "top-1")]
            body.append((cache, f"{values[cache, models[0], 'KLD']['bits']:.2f}", *cells))
    head = [f"{model}: {metric}" for model in models for metric in ("KLD", "top-1 %")]
    return _markdown(("cache", "bits", *head), body)


def _criteria(rows: list[dict[str, Any]]) -> str:
    body = []
    for row in rows:
        if row["must"] is None:
            continue
        met = _meets(row, row["must"])
        aimed = "" if row["aim"] is None else " (aim too)" if _meets(row, row["aim"]) else ""
        shown = f"{row['ratio']:.4g}"
        limits = f"{row['must']:.4g}" + ("" if row["aim"] is None else f", aim {row['aim']:.4g}")
        body.append((row["case"], row["metric"], shown, limits, ("reached" + aimed) if met else "**missed**"))
    return _markdown(("what", "metric", "measured", "must", ""), body)


def _meets(row: dict[str, Any], limit: float) -> bool:
    return bool(row["ratio"] <= limit if row["direction"] == "lower" else row["ratio"] >= limit)


def _by_cache(rows: list[dict[str, Any]]) -> str:
    body = []
    for cache in dict.fromkeys(row["cache"] for row in rows):
        values = {row["metric"]: row for row in rows if row["cache"] == cache}
        cells = [_value(values[m], _FORMS[m]) for m in _METRICS]
        body.append((cache, f"{values['KLD']['bits']:.2f}", *cells))
    return _markdown(("cache", "bits", "KLD", "median", "99.9 %", "top-1 %", "perplexity %"), body)


def _by_context(rows: list[dict[str, Any]], form: str) -> str:
    contexts = list(dict.fromkeys(row["context"] for row in rows))
    body = []
    for cache in dict.fromkeys(row["cache"] for row in rows):
        values = {row["context"]: row for row in rows if row["cache"] == cache}
        body.append((cache, *(_value(values[c], form) for c in contexts)))
    return _markdown(("cache", *contexts), body)


def _talks(rows: list[dict[str, Any]]) -> str:
    body = []
    for cache in dict.fromkeys(row["cache"] for row in rows):
        values = {row["metric"]: row for row in rows if row["cache"] == cache}
        body.append((cache, *(_value(values[m], ".1f") for m in ("right answers", "warm equals cold"))))
    return _markdown(("cache", "right answers %", "warm equals cold %"), body)


def _value(row: dict[str, Any], form: str) -> str:
    error = "" if row["error"] is None else f" ± {row['error']:{form.lstrip('+')}}"
    return f"{row['ours']:{form}}{error}"


def _markdown(head: tuple[str, ...], body: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8"), latest()), encoding="utf-8")


if __name__ == "__main__":
    main()

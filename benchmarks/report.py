"""Markdown tables from result files.

    python -m benchmarks.report                      the newest file of each benchmark, to standard output
    python -m benchmarks.report FILE …               these
    python -m benchmarks.report --write README.md    fill the document's marked places

A place is marked by ``<!-- results:NAME -->`` and ``<!-- /results -->`` on lines of their own; NAME is the benchmark.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.result import RESULTS

PLACE = re.compile(r"(<!-- results:(?P<name>[\w.-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)


def main(argv: Sequence[str] | None = None) -> None:
    """Print, or write into documents."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--write", type=Path, nargs="+", metavar="DOCUMENT", default=[])
    options = parser.parse_args(argv)
    results = {}
    for path in options.files or sorted(RESULTS.glob("*.json")):  # a later date replaces an earlier one
        result = json.loads(path.read_text())
        results[result["meta"]["name"]] = result
    for document in options.write:
        document.write_text(fill(document.read_text(), results))
    if not options.write:
        print("\n\n".join(f"## {name}\n\n{table(result)}" for name, result in sorted(results.items())))


def fill(text: str, results: dict[str, dict[str, Any]]) -> str:
    """``text`` with the tables in its marked places.

    Raises
    ------
    ValueError
        A place names a benchmark that has no result file.
    """

    def replacement(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in results:
            raise ValueError(f"results:{name}: no result file of that name; there are {', '.join(sorted(results))}")
        return f"{match[1]}{table(results[name])}\n{match[3]}"

    return PLACE.sub(replacement, text)


def table(result: dict[str, Any]) -> str:
    """One table of a result file, with a line on where the numbers come from."""
    meta, rows = result["meta"], result["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["baselines"]))
    head = ["case", "metric", "OSCAR", *names, "ratio", "must be", "aim"]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for row in rows:
        baselines = [number(row["baselines"].get(name)) for name in names]
        bounds = [bound(row, "must"), bound(row, "aim")]
        unit = f"{row['metric']} ({row['unit']})" if row["unit"] else row["metric"]
        lines.append([row["case"], unit, f"**{number(row['ours'])}**", *baselines, number(row["ratio"]), *bounds])
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    source = f"{meta['device']}; {versions}; commit {meta['commit'][:9]}, {meta['date'][:10]}; `{meta['command']}`"
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{source}"


def bound(row: dict[str, Any], kind: str) -> str:
    """What the ratio must or should be; one that it is not says so."""
    limit, ratio = row[kind], row["ratio"]
    if limit is None:
        return ""
    lower = row["direction"] == "lower"
    met = ratio is not None and (ratio <= limit if lower else ratio >= limit)
    return f"{'≤' if lower else '≥'} {number(limit)}{'' if met else ' **missed**'}"


def number(value: float | None) -> str:
    """Three digits, or as many as a whole number has."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()

"""Quality of the 2-bit cache on the models that install from the package index, into one result file.

::

    python -m benchmarks.texts texts
    python -m benchmarks.quality fidelity smollm2 --texts texts --state state     # hours on two cores; can be resumed
    python -m benchmarks.quality retrieval smollm2 --texts texts --state state
    python -m benchmarks.quality grid smollm2 --texts texts --state state
    python -m benchmarks.quality write --state state          # benchmarks/results/quality*-<date>.json

Each step leaves a JSON file in the state folder; ``write`` makes rows of all of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import write_result
from oscar_serving.calibration import Artifact, ArtifactError, find_artifact, texts
from oscar_serving.calibration.recipe import PRESETS, Recipe
from oscar_serving.config import KV_CACHE_DTYPES
from oscar_serving.evaluation.configuration import Configuration, baselines, bf16, calibrated
from oscar_serving.evaluation.grid import AXES, Grid
from oscar_serving.evaluation.model import EvaluatedModel
from oscar_serving.evaluation.multiturn import multiturn
from oscar_serving.evaluation.needles import needles
from oscar_serving.evaluation.run import evaluate
from oscar_serving.evaluation.simulated import SimulatedClient
from oscar_serving.models import get_model

SEQUENCES, TOKENS = 16, 2048
CALIBRATION_TOKENS = 16384
#: The published method at our bits and windows: one rotation a layer, proxy target, quantile clips; then with our clip,
#: per layer and per head.
RECIPES: dict[str, Recipe] = {
    "published recipe": PRESETS["paper"],
    "per layer, shrink": replace(PRESETS["oscar"], per_head=False),
    "per head, shrink": PRESETS["oscar"],
}
#: Model → configuration → metric → (must, aim).
CRITERIA: dict[str, dict[str, dict[str, tuple[float, float | None]]]] = {
    "smollm2": {
        "OSCAR": {"KLD": (0.025, 0.012), "top-1": (91.5, 94.0), "perplexity change": (2.5, None)},
        "OSCAR K4V2": {"KLD": (0.0045, 0.0025), "top-1": (96.3, None)},
    },
    "gemma3-270m": {
        "OSCAR": {"KLD": (0.12, 0.05), "top-1": (80.5, 88.0), "perplexity change": (13.0, None)},
        "OSCAR K4V2": {"KLD": (0.010, 0.006), "top-1": (95.5, None)},
    },
}
#: Metrics of whole sequences that go into ``quality-<date>.json``; the rest is in ``quality-details-<date>.json``.
MAIN = ("KLD", "top-1", "perplexity change")
#: KLD of ours / KLD of the published recipe.
BEATEN_MUST, BEATEN_AIM = 1 / 3, 1 / 6


def main(arguments: list[str]) -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("fidelity", "retrieval", "grid", "write"))
    parser.add_argument("model", nargs="?", help="a name that `oscar models list` shows")
    parser.add_argument("--state", type=Path, required=True, help="folder for everything that is kept between runs")
    parser.add_argument("--texts", type=Path, help="folder that benchmarks.texts wrote")
    parser.add_argument("--artifact", default="auto", help="auto or a folder")
    parser.add_argument("--limit", type=int, help="only the first so many of the 16 sequences")
    parser.add_argument("--stride", type=int, default=1, help="compare every so many positions")
    parser.add_argument("--axes", nargs="+", default=list(AXES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--needle-texts", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    if options.step == "write":
        found = list(rows(options.state))
        main_rows = [row for row in found if row["metric"] in MAIN and not {"context", "grid"} & row.keys()]
        print(write_result("quality", main_rows, _device(options.device)))
        details = [row for row in found if row not in main_rows]
        print(write_result("quality-details", details, _device(options.device)))
        return
    if options.model is None or options.texts is None:
        parser.error("a model and --texts are needed")
    model = EvaluatedModel.load(get_model(options.model), device=options.device)
    content = {"fidelity": fidelity, "retrieval": retrieval, "grid": grid}[options.step](model, options)
    options.state.mkdir(parents=True, exist_ok=True)
    (options.state / f"{options.step}-{options.model}.json").write_text(json.dumps(content, indent=1) + "\n")


def fidelity(model: EvaluatedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Baselines, the published recipe, and the shipped artifact on held-out text."""
    calibrator = Calibrator(model, options)
    chosen = baselines(model.config, calibrator.grid.center)
    chosen += [calibrated(name, calibrator.artifact(name, recipe)) for name, recipe in RECIPES.items()]
    chosen += [calibrated(name, artifact) for name, artifact in shipped(model, options)]
    out = options.state / f"report-{options.model}"
    report = evaluate(
        model, chosen, evaluation_texts(options), out, sequences=SEQUENCES, tokens=TOKENS, limit=options.limit,
        stride=options.stride, state=options.state / "tokens", progress=say,
    )  # fmt: skip
    return report.to_dict()


def grid(model: EvaluatedModel, options: argparse.Namespace) -> dict[str, Any]:
    """The ablations, on fewer sequences."""
    calibrator = Calibrator(model, options)
    chosen: list[Configuration] = []
    for configuration in calibrator.grid.configurations(options.axes):
        chosen.append(configuration)
        print(configuration.name, file=sys.stderr, flush=True)
    report = evaluate(
        model, chosen, evaluation_texts(options), options.state / f"grid-report-{options.model}",
        sequences=SEQUENCES, tokens=TOKENS, limit=options.limit, state=options.state / "tokens", progress=say,
    )  # fmt: skip
    return report.to_dict()


def retrieval(model: EvaluatedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Needles and conversations on BF16, on the published recipe and on the shipped artifact."""
    filler = max(evaluation_texts(options), key=lambda path: path.stat().st_size).read_text(encoding="utf-8")
    calibrator = Calibrator(model, options)
    chosen = [bf16(), *(calibrated(name, artifact) for name, artifact in shipped(model, options))]
    chosen.append(calibrated("published recipe", calibrator.artifact("published recipe", RECIPES["published recipe"])))
    content: dict[str, Any] = {"model": model.name, "needles": [], "multiturn": []}
    for configuration in chosen:
        client = SimulatedClient(model, configuration)
        told = _telling(configuration.name)
        found = needles(client, filler, lengths=options.lengths, texts=options.needle_texts, progress=told)
        content["needles"].append(found.to_dict())
        content["multiturn"].append(multiturn(client, filler, conversations=4, progress=told).to_dict())
    return content


class Calibrator:
    """Artifacts of recipes, calibrated once and kept in the state folder."""

    def __init__(self, model: EvaluatedModel, options: argparse.Namespace) -> None:
        self._folder: Path = options.state / f"artifacts-{options.model}"
        wanted = CALIBRATION_TOKENS * 5 // 4
        named = [("docstrings of Python's standard library", texts.docstrings())]
        found, _ = texts.sequences(model.tokenizer, named, wanted, TOKENS)
        held_out = len(found) // 5
        self.grid = Grid(model, found[:-held_out], found[-held_out:], progress=say)

    def artifact(self, name: str, recipe: Recipe) -> Artifact:
        """The artifact of a recipe."""
        folder = self._folder / re.sub(r"\W+", "-", name)
        try:
            return Artifact.load(folder)
        except ArtifactError:
            made = self.grid.artifact(recipe, self.grid.center)
            made.save(folder)
            return made


def shipped(model: EvaluatedModel, options: argparse.Namespace) -> list[tuple[str, Artifact]]:
    """The artifact that is served, at the bits of both cache types."""
    artifact = Artifact.load(find_artifact(get_model(options.model), options.artifact))
    artifact.check_model(model.config)
    names = {"oscar_int2": "OSCAR", "oscar_k4v2": "OSCAR K4V2"}
    return [(names[dtype], artifact.for_bits(*bits)) for dtype, bits in KV_CACHE_DTYPES.items()]


def evaluation_texts(options: argparse.Namespace) -> list[Path]:
    """The texts, in a fixed order."""
    return sorted(options.texts.glob("*.txt"))


def rows(state: Path) -> Iterator[dict[str, Any]]:
    """Rows of everything in the state folder."""
    for path in sorted(state.glob("fidelity-*.json")):
        yield from fidelity_rows(path.stem.removeprefix("fidelity-"), json.loads(path.read_text()))
    for path in sorted(state.glob("retrieval-*.json")):
        yield from retrieval_rows(json.loads(path.read_text()))
    for path in sorted(state.glob("grid-*.json")):
        yield from grid_rows(json.loads(path.read_text()))


def fidelity_rows(name: str, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each cache costs, in all and by context; criteria where there are some; and ours against the recipe."""
    where = _where(report)
    values = {c["name"]: _metrics(c["overall"]) for c in report["configurations"]}
    for c in report["configurations"]:
        others = {n: v for n, v in values.items() if n != c["name"]}
        for metric, (value, error) in values[c["name"]].items():
            must, aim = CRITERIA.get(name, {}).get(c["name"], {}).get(metric, (None, None))
            baselines = {n: v[metric][0] for n, v in others.items()} if c["name"] in CRITERIA.get(name, {}) else {}
            yield _row(f"{where}: {c['name']}", metric, value, error, baselines, must=must, aim=aim) | _label(report, c)
        for context, part in c["by_context"].items():
            for metric, (value, error) in _metrics(part).items():
                case = f"{where}: {c['name']}, context {context}"
                yield _row(case, metric, value, error) | _label(report, c) | {"context": context}
    judge = "published recipe"
    if {"OSCAR", judge} <= values.keys():
        kld = {n: v["KLD"][0] for n, v in values.items()}
        yield _row(
            f"{where}: OSCAR against the {judge}", "KLD", kld["OSCAR"], None, {judge: kld[judge]}, judge=judge,
            must=BEATEN_MUST, aim=BEATEN_AIM,
        )  # fmt: skip


def retrieval_rows(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Needles by length, and conversations."""
    counts: dict[tuple[str, int], tuple[int, int]] = {}
    for result in content["needles"]:
        for cell in result["cells"]:
            right, asked = counts.get((result["name"], cell["tokens"]), (0, 0))
            counts[result["name"], cell["tokens"]] = right + cell["right"], asked + cell["asked"]
    for (name, tokens), (right, asked) in counts.items():
        share = right / asked
        case = f"{content['model']}, needles in {tokens} tokens, {asked} asked: {name}"
        row = _row(case, "found", 100 * share, 100 * (share * (1 - share) / asked) ** 0.5)
        yield row | {"model": content["model"], "cache": name, "context": str(tokens)}
    for result in content["multiturn"]:
        label = {"model": content["model"], "cache": result["name"]}
        case = f"{content['model']}, conversations, {result['asked']} asked: {result['name']}"
        accuracy = result["accuracy"]
        yield _row(case, "right answers", 100 * accuracy["value"], 100 * accuracy["error"]) | label
        yield _row(case, "warm equals cold", 100 * result["warm_equals_cold"], None) | label


def grid_rows(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row a variant and metric."""
    for c in report["configurations"]:
        for metric, (value, error) in _metrics(c["overall"]).items():
            yield (
                _row(f"grid, {_where(report)}: {c['name']}", metric, value, error) | _label(report, c) | {"grid": True}
            )


def _where(report: dict[str, Any]) -> str:
    every = "" if report["stride"] == 1 else f", every {report['stride']}th position"
    return f"{report['model']}, {report['sequences']} sequences of {report['tokens']} tokens{every}"


def _label(report: dict[str, Any], configuration: dict[str, Any]) -> dict[str, Any]:
    """Parts of the case, for those who read it by machine."""
    return {
        "model": report["model"], "cache": configuration["name"], "bits": configuration["bits_per_element"],
        "sequences": report["sequences"],
    }  # fmt: skip


def _metrics(overall: dict[str, Any]) -> dict[str, tuple[float, float | None]]:
    """Value and standard error of what is reported."""

    def percent(key: str) -> tuple[float, float | None]:
        value, error = overall[key]["value"], overall[key]["error"]
        return 100 * value, None if error is None else 100 * error

    return {
        "KLD": (overall["kld_mean"]["value"], overall["kld_mean"]["error"]),
        "KLD median": (overall["kld_median"], None),
        "KLD 99.9 %": (overall["kld_tail"], None),
        "top-1": percent("top1"),
        "perplexity change": percent("perplexity_change"),
    }


def _row(
    case: str,
    metric: str,
    ours: float,
    error: float | None,
    others: dict[str, float] | None = None,
    *,
    judge: str | None = None,
    must: float | None = None,
    aim: float | None = None,
) -> dict[str, Any]:
    """A row; without a baseline that judges, the criteria are about the value itself."""
    return {
        "case": case, "metric": metric, "unit": "nats" if metric.startswith("KLD") else "%",
        "ours": ours, "error": error, "baselines": others or {},
        "ratio": ours / others[judge] if judge and others else ours, "must": must, "aim": aim,
        "direction": "lower" if metric.startswith("KLD") or metric == "perplexity change" else "higher",
    }  # fmt: skip


def say(what: str, done: int, of: int) -> None:
    """Progress on standard error."""
    print(f"\r{what} {done}/{of}\033[K", end="", file=sys.stderr, flush=True)


def _telling(name: str) -> Callable[[int, int], None]:
    return lambda done, of: say(name, done, of)


def _device(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"


if __name__ == "__main__":
    main(sys.argv[1:])

"""Quality of the 2-bit cache on the models that install from the package index, into one result file.

::

    python -m benchmarks.texts texts python -m benchmarks.quality fidelity smollm2 --texts texts --state state     #
    hours on two cores; goes on if stopped python -m benchmarks.quality retrieval smollm2 --texts texts --state state
    python -m benchmarks.quality grid smollm2 --texts texts --state state python -m benchmarks.quality write --state
    state                              # benchmarks/results/quality-<date>.json

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

TOKENS = 2048
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
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--axes", nargs="+", default=list(AXES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096])
    parser.add_argument("--needle-texts", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    if options.step == "write":
        print(write_result("quality", list(rows(options.state)), _device(options.device)))
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
        model, chosen, evaluation_texts(options), out, sequences=options.sequences, tokens=TOKENS,
        state=options.state / "tokens", progress=say,
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
        sequences=options.sequences, tokens=TOKENS, state=options.state / "tokens", progress=say,
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
    """One row a configuration of ours and metric, everything else as baselines; and the comparison with the recipe."""
    where = f"{report['model']}, {report['sequences']} sequences of {report['tokens']} tokens"
    values = {c["name"]: _metrics(c["overall"]) for c in report["configurations"]}
    bits = {c["name"]: c["bits_per_element"] for c in report["configurations"]}
    for ours in ("OSCAR", "OSCAR K4V2"):
        for metric in values[ours]:
            value, error = values[ours][metric]
            must, aim = CRITERIA.get(name, {}).get(ours, {}).get(metric, (None, None))
            others = {c: v[metric][0] for c, v in values.items() if c != ours}
            higher = metric == "top-1"
            unit = "nats" if metric.startswith("KLD") else "%"
            case = f"{where}, {ours} ({bits[ours]:.2f} bits)"
            yield _row(case, metric, unit, value, others, None, must, aim, higher, error=error)
    judge = "published recipe"
    kld = {c: v["KLD"][0] for c, v in values.items()}
    yield _row(
        f"{where}, OSCAR", "KLD / KLD of the published recipe", "ratio", kld["OSCAR"], {judge: kld[judge]}, judge,
        BEATEN_MUST, BEATEN_AIM, False,
    )  # fmt: skip
    for c in report["configurations"]:
        for context, part in c["by_context"].items():
            value, error = _metrics(part)["KLD"]
            case = f"{where}, {c['name']}, context {context}"
            yield _row(case, "KLD by context", "nats", value, {}, None, None, None, False, error=error)
    for c in report["configurations"]:
        for metric, (value, error) in _metrics(c["overall"]).items():
            case = f"{where}, {c['name']} ({bits[c['name']]:.2f} bits)"
            unit = "nats" if metric.startswith("KLD") else "%"
            yield _row(case, f"{metric}, each cache", unit, value, {}, None, None, None, metric == "top-1", error=error)


def retrieval_rows(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Needles by length, and conversations."""
    shares: dict[int, dict[str, tuple[int, int]]] = {}
    for result in content["needles"]:
        for cell in result["cells"]:
            right, asked = shares.setdefault(cell["tokens"], {}).get(result["name"], (0, 0))
            shares[cell["tokens"]][result["name"]] = right + cell["right"], asked + cell["asked"]
    for tokens, counts in shares.items():
        percent = {name: 100 * right / asked for name, (right, asked) in counts.items()}
        for ours in ("OSCAR", "OSCAR K4V2"):
            share, asked = percent[ours] / 100, counts[ours][1]
            error = 100 * (share * (1 - share) / asked) ** 0.5
            others = {n: v for n, v in percent.items() if n != ours}
            case = f"{content['model']}, needles in {tokens} tokens, {ours}"
            yield _row(case, "found", "%", percent[ours], others, None, None, None, True, error=error)
    for result in content["multiturn"]:
        case = f"{content['model']}, conversations, {result['name']}"
        accuracy = result["accuracy"]
        yield _row(
            case, "right answers", "%", 100 * accuracy["value"], {}, None, None, None, True,
            error=100 * accuracy["error"],
        )  # fmt: skip
        yield _row(case, "warm answer equals cold", "%", 100 * result["warm_equals_cold"], {}, None, None, None, True)


def grid_rows(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row a variant and metric."""
    where = f"{report['model']}, grid, {report['sequences']} sequences of {report['tokens']} tokens"
    for c in report["configurations"]:
        case = f"{where}, {c['name']} ({c['bits_per_element']:.2f} bits)"
        for metric, (value, error) in _metrics(c["overall"]).items():
            unit = "nats" if metric.startswith("KLD") else "%"
            yield _row(case, metric, unit, value, {}, None, None, None, metric == "top-1", error=error)


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
    unit: str,
    ours: float,
    others: dict[str, float],
    judge: str | None,
    must: float | None,
    aim: float | None,
    higher: bool,
    *,
    error: float | None = None,
) -> dict[str, Any]:
    """A row; without a baseline that judges, the criteria are about the value itself."""
    return {
        "case": case, "metric": metric, "unit": unit, "ours": ours, "error": error, "baselines": others,
        "ratio": ours / others[judge] if judge else ours, "must": must, "aim": aim,
        "direction": "higher" if higher else "lower",
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

"""Plots of an evaluation, as PNG bytes."""

from __future__ import annotations

import io
from typing import Any

#: Distinguishable without colour vision (Okabe and Ito), and by marker.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
_MARKERS = "osD^vPX*"
#: What is drawn at the bottom of a logarithmic axis: below, float32 arithmetic is all that is seen.
_FLOOR = 1e-7


def by_context(report: dict[str, Any]) -> bytes:
    """KL divergence and top-1 agreement against the length of the context, one line a configuration."""
    figure, (left, right) = _figure(2)
    for index, configuration in enumerate(report["configurations"]):
        style = _style(index)
        ends = [int(key.split("-")[1]) for key in configuration["by_context"]]
        values = list(configuration["by_context"].values())
        kld = [max(_FLOOR, v["kld_mean"]["value"]) for v in values]
        left.errorbar(ends, kld, [v["kld_mean"]["error"] or 0 for v in values], label=configuration["name"], **style)
        top1 = [100 * v["top1"]["value"] for v in values]
        right.errorbar(ends, top1, [100 * (v["top1"]["error"] or 0) for v in values], **style)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens of context, up to")
    left.set_yscale("log")
    left.set_ylabel("KL divergence from the unquantized model (nats)")
    right.set_ylabel("same first choice (%)")
    _legend(figure, left)
    return _png(figure)


def by_bits(report: dict[str, Any]) -> bytes:
    """KL divergence and change of perplexity against stored bits an element, one point a configuration."""
    figure, (left, right) = _figure(2)
    for index, configuration in enumerate(report["configurations"]):
        style = _style(index)
        overall, bits = configuration["overall"], configuration["bits_per_element"]
        kld = overall["kld_mean"]
        left.errorbar([bits], [max(_FLOOR, kld["value"])], [kld["error"] or 0], label=configuration["name"], **style)
        change = overall["perplexity_change"]
        right.errorbar([bits], [max(_FLOOR, 100 * change["value"])], [100 * (change["error"] or 0)], **style)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([2, 4, 8, 16], ["2", "4", "8", "16"])
        axes.set_xlabel("stored bits an element, scales included")
    left.set_ylabel("KL divergence from the unquantized model (nats)")
    right.set_ylabel("increase of perplexity (%)")
    _legend(figure, left)
    return _png(figure)


def _figure(count: int) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * count, 4.2), layout="constrained")
    axes = figure.subplots(1, count)
    for one in axes:
        one.grid(alpha=0.25, which="major")
        one.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _style(index: int) -> dict[str, Any]:
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": "-" if index < len(_COLOURS) else "--",
        "markersize": 5,
        "linewidth": 1.4,
        "capsize": 2,
    }


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize="small")


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()

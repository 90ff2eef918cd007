"""One self-contained HTML page of an evaluation."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import Any

from oscar_serving.evaluation import plots

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; white-space: nowrap; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom-width: 2px; }
tbody tr:hover { background: var(--soft); } small, .note { opacity: .75; }
img { max-width: 100%; background: white; border-radius: 4px; } code { font-size: .9em; overflow-wrap: anywhere; }
"""


def write_page(report: dict[str, Any], folder: Path) -> Path:
    """Write ``report.html`` and its plots for a report in JSON form; returns the page."""
    images = {"context.png": plots.by_context(report), "bits.png": plots.by_bits(report)}
    for name, png in images.items():
        (folder / name).write_bytes(png)
    page = folder / "report.html"
    page.write_text(html(report, images), encoding="utf-8")
    return page


def html(report: dict[str, Any], images: dict[str, bytes]) -> str:
    """The page; ``images`` are PNG bytes by file name."""
    model = escape(report["model"])
    contexts = list(report["configurations"][0]["by_context"])
    sources = "; ".join(escape(f"{s['name']} (sha256 {s['sha256'][:12]})") for s in report["sources"])
    meta = report["meta"]
    versions = ", ".join(f"{name} {version}" for name, version in meta["versions"].items())
    parts = [
        f"<p class=note>{report['sequences']} sequences of {report['tokens']} tokens, against the "
        f"{escape(report['reference'])}"
        + ("" if report["stride"] == 1 else f", compared at every {report['stride']}th position")
        + ". Every query reads its history as decoded, under the position rule. "
        "± is the standard error over sequences.</p>",
        "<h2>Overall</h2>",
        table(
            ("cache", "bits", "KLD mean", "median", "99.9 %", "top-1 %", "perplexity", "change %", "tokens/s"),
            [_overall(c) for c in report["configurations"]],
        ),
        f"<p class=note>Perplexity of the unquantized model: "
        f"{report['configurations'][0]['overall']['reference_perplexity']:.3f}. "
        "Bits are those of an element outside the windows, scales included.</p>",
        _image("quality against bits", images["bits.png"]),
        "<h2>By length of the context</h2>",
        _image("quality against context", images["context.png"]),
        "<h3>KL divergence, mean</h3>",
        table(("cache", *contexts), [_row(c, contexts, "kld_mean", 1, ".4g") for c in report["configurations"]]),
        "<h3>Top-1 agreement, %</h3>",
        table(("cache", *contexts), [_row(c, contexts, "top1", 100, ".2f") for c in report["configurations"]]),
        "<h3>Change of perplexity, %</h3>",
        table(
            ("cache", *contexts),
            [_row(c, contexts, "perplexity_change", 100, "+.2f") for c in report["configurations"]],
        ),
        "<h2>How it was measured</h2>",
        f"<p>Texts: {sources}.<br>{escape(meta['date'])}, {escape(meta['device'])}, {escape(meta['dtype'])}, "
        f"{escape(versions)}.<br><code>{escape(meta['command'])}</code></p>",
        "<h3>Caches</h3>",
        table(
            ("cache", "settings"),
            [
                (escape(c["name"]), f"<code>{escape(', '.join(f'{k} {v}' for k, v in c['cache'].items()))}</code>")
                for c in report["configurations"]
            ],
        ),
    ]
    return document(f"{model}: quality of the KV cache", parts)


def document(title: str, parts: list[str]) -> str:
    """A whole page of HTML parts; ``title`` is HTML already."""
    head = (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><h1>{title}</h1>"
    )
    return "\n".join([head, *parts]) + "</html>\n"


def _overall(configuration: dict[str, Any]) -> tuple[str, ...]:
    overall = configuration["overall"]
    return (
        escape(configuration["name"]),
        f"{configuration['bits_per_element']:.2f}",
        _estimate(overall["kld_mean"], 1, ".4g"),
        f"{overall['kld_median']:.3g}",
        f"{overall['kld_tail']:.3g}",
        _estimate(overall["top1"], 100, ".2f"),
        f"{overall['perplexity']:.3f}",
        _estimate(overall["perplexity_change"], 100, "+.2f"),
        f"{configuration['tokens_per_second']:.0f}",
    )


def _row(configuration: dict[str, Any], contexts: list[str], metric: str, factor: float, form: str) -> tuple[str, ...]:
    values = (configuration["by_context"][c][metric] for c in contexts)
    return (escape(configuration["name"]), *(_estimate(v, factor, form) for v in values))


def _estimate(value: dict[str, float | None], factor: float, form: str) -> str:
    mean, error = value["value"], value["error"]
    assert mean is not None
    spread = "" if error is None else f" <small>± {error * factor:{form.lstrip('+')}}</small>"
    return f"{mean * factor:{form}}{spread}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Cells are HTML already, the head is text."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _image(alt: str, png: bytes) -> str:
    return f"<p><img alt='{escape(alt)}' src='data:image/png;base64,{base64.b64encode(png).decode()}'></p>"

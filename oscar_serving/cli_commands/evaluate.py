"""``oscar eval``: how far a cache's answers are from the unquantized model's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from oscar_serving.evaluation.report import Report


def evaluate(
    model: Annotated[str, typer.Argument(help="A name that `oscar models list` shows, or a model folder.")],
    artifact: Annotated[str, typer.Option(help="Calibration artifact: auto or a folder.")] = "auto",
    text: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="UTF-8 text of another domain than the calibration's; may be given more than once. "
            "Default: the shipped sample.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for evaluation.json, plots and report.html.")
    ] = None,
    baselines: Annotated[
        bool, typer.Option(help="Also BF16, FP8, INT4 and INT2 with a Hadamard rotation, and unrotated INT2.")
    ] = True,
    configuration: Annotated[
        list[str] | None,
        typer.Option(help="One more cache, such as 'wide=auto,recent=512' or 'hadamard,shrink=0.8'; may be repeated."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences to compare on.")] = 16,
    tokens: Annotated[int, typer.Option(min=16, help="Tokens in each.")] = 2048,
    grid: Annotated[
        bool, typer.Option("--grid", help="Ablations instead: calibrate and compare variants, one thing at a time.")
    ] = False,
    axis: Annotated[
        list[str] | None, typer.Option(help="With --grid, what to vary, such as rotation or clip; default: everything.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Stop after so many of the sequences.")] = None,
    stride: Annotated[int, typer.Option(min=1, help="Compare every so many positions.")] = 1,
    state: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder to keep results in: a later run computes only what is missing."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs, such as cpu, cuda or mps.")] = "cpu",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Type that the model computes in.")
    ] = "float32",
) -> None:
    """Compare MODEL on its 2-bit cache with itself on an unquantized one.

    KL divergence, top-1 agreement and perplexity by context length, every query reading its history as decoded.
    """
    import torch

    from oscar_serving.calibration import Artifact, find_artifact
    from oscar_serving.cli_commands.models import resolve_model
    from oscar_serving.cli_commands.progress import bars
    from oscar_serving.evaluation import configuration as kinds
    from oscar_serving.evaluation.grid import AXES
    from oscar_serving.evaluation.model import EvaluatedModel
    from oscar_serving.evaluation.run import evaluate as run
    from oscar_serving.evaluation.run import evaluate_grid

    if axis and not grid:
        raise typer.BadParameter("--axis belongs to --grid")
    folder = resolve_model(model)
    judged = EvaluatedModel.load(folder, dtype=getattr(torch, dtype), device=device)
    if grid:
        with bars() as progress:
            report = evaluate_grid(
                judged, text or (), out, sequences=sequences, tokens=tokens, limit=limit, stride=stride, state=state,
                progress=progress, axes=axis or AXES,
            )  # fmt: skip
        show(report)
        return
    calibrated = Artifact.load(find_artifact(folder, artifact))
    calibrated.check_model(judged.config)
    chosen = kinds.baselines(judged.config, calibrated.config) if baselines else []
    chosen.append(kinds.calibrated("OSCAR", calibrated))
    chosen += [kinds.parse(short, folder, judged.config) for short in configuration or ()]
    with bars() as progress:
        report = run(
            judged,
            chosen,
            text or (),
            out,
            sequences=sequences,
            tokens=tokens,
            limit=limit,
            stride=stride,
            state=state,
            progress=lambda _, done, of: progress("evaluating", done, of),
        )
    show(report)
    if out is not None:
        typer.echo(out / "report.html")


def show(report: Report) -> None:
    """Print the overall results as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table("cache", title=f"{report.model}: {report.sequences} sequences of {report.tokens} tokens")
    for heading in ("bits", "KLD mean", "median", "99.9 %", "top-1 %", "perplexity"):
        table.add_column(heading, justify="right")
    for result in report.results:
        overall = result.overall
        table.add_row(
            result.configuration.name,
            f"{result.configuration.storage.bits_per_element():.2f}",
            f"{overall['kld_mean']['value']:.4f}",
            f"{overall['kld_median']:.4f}",
            f"{overall['kld_tail']:.3f}",
            f"{100 * overall['top1']['value']:.1f}",
            f"{overall['perplexity']:.2f}",
        )
    Console().print(table)

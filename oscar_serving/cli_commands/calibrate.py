"""``oscar calibrate``: rotations, means and clips of a model from its own activations."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer


def calibrate(
    model: Annotated[str, typer.Argument(help="A name that `oscar models list` shows, or a model folder.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the artifact; an interrupted run goes on.")],
    text: Annotated[
        list[Path] | None,
        typer.Option(exists=True, dir_okay=False, help="UTF-8 text to calibrate on; may be given more than once."),
    ] = None,
    self_generate: Annotated[
        bool, typer.Option("--self-generate", help="Let the model write text to calibrate on, also beside --text.")
    ] = False,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens to calibrate on.")] = 16384,
    preset: Annotated[
        Literal["default", "oscar", "paper", "hadamard", "none"],
        typer.Option(
            help="default chooses what errs least per layer and head; paper is the published recipe, oscar its targets "
            "per head with true scores."
        ),
    ] = "default",
    sequence_length: Annotated[int, typer.Option(min=64, help="Tokens in a sequence.")] = 2048,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps", "map"],
        typer.Option(help="Where the model runs; map spreads it over all GPUs and main memory."),
    ] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Type that the model computes in.")
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Seed of generated text.")] = 0,
) -> None:
    """Calibrate MODEL and write the artifact that `serve` and `eval` take.

    Without --text and --self-generate it reads the docstrings of Python's standard library.
    """
    from oscar_serving.calibration.run import calibrate as run
    from oscar_serving.cli_commands.models import resolve_model
    from oscar_serving.cli_commands.progress import bars

    with bars() as progress:
        written = run(
            resolve_model(model),
            out,
            texts=text or (),
            self_generate=self_generate,
            tokens=tokens,
            preset=preset,
            sequence_length=sequence_length,
            device=device,
            dtype=dtype,
            seed=seed,
            command=shlex.join(["oscar", *sys.argv[1:]]),
            progress=progress,
        )
    typer.echo(written)

"""``oscar import-zoo``: published rotation files → an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def import_zoo(
    k_rotation: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Published K rotation (.pt).")],
    v_rotation: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Published V rotation (.pt).")],
    model: Annotated[str, typer.Option(help="Known name or folder of the model that they were made for.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the artifact.")],
    tokens: Annotated[int, typer.Option(min=256, help="Tokens to choose clips on.")] = 8192,
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps", "map"], typer.Option(help="Where the model runs.")
    ] = "auto",
) -> None:
    """Convert rotation files of the public RotationZoo, checked against the model.

    The rotations stay as they are; clips, which the files do not hold, are chosen on the model's own activations.
    """
    from oscar_serving.calibration.zoo import import_zoo as convert
    from oscar_serving.cli_commands.models import resolve_model
    from oscar_serving.cli_commands.progress import bars

    with bars() as progress:
        written = convert(
            k_rotation, v_rotation, resolve_model(model), out, tokens=tokens, device=device, progress=progress
        )
    typer.echo(written)

"""``oscar import-zoo``: published rotation files → an artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_zoo(
    k_rotation: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Published K rotation (.pt).")],
    v_rotation: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="Published V rotation (.pt).")],
    model: Annotated[str, typer.Option(help="Known name or folder of the model that they were made for.")],
    out: Annotated[Path, typer.Option(help="Folder to write the artifact to.")],
) -> None:
    """Convert rotation files of the public RotationZoo, checked against the model."""
    from oscar_serving.calibration.zoo import import_zoo as convert
    from oscar_serving.cli_commands.models import resolve_model

    typer.echo(convert(k_rotation, v_rotation, resolve_model(model), out))

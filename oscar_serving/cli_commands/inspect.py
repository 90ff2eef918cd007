"""``oscar inspect``: what a calibration artifact holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def inspect(artifact: Annotated[Path, typer.Argument(exists=True, help="Artifact folder or file.")]) -> None:
    """Print what an artifact was made for, from and with, and how well it did."""
    from oscar_serving.calibration.artifact import Artifact
    from oscar_serving.calibration.inspect import describe

    typer.echo(describe(Artifact.load(artifact)))

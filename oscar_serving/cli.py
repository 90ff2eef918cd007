"""The ``oscar`` command. Heavy imports are inside the commands, so that ``--help`` answers at once."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from oscar_serving.cli_commands import (
    bench,
    calibrate,
    doctor,
    evaluate,
    evaluate_tasks,
    import_zoo,
    inspect,
    models,
    plan,
    serve,
)
from oscar_serving.version import __version__

app = typer.Typer(
    name="oscar",
    help="2-bit KV caches for long-context serving of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command("serve")(serve.serve)
app.add_typer(models.app, name="models")
app.command("calibrate")(calibrate.calibrate)
app.command("inspect")(inspect.inspect)
app.command("plan")(plan.plan)
app.command("eval")(evaluate.evaluate)
app.command("eval-tasks")(evaluate_tasks.evaluate_tasks)
app.command("import-zoo")(import_zoo.import_zoo)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"oscar-serving {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an error came from, for bug reports.")
    ] = False,
) -> None:
    """Options of every command; ``main`` reads ``--traceback`` itself, since errors arrive there."""


def main() -> None:
    """Run the command line; an error is one line on standard error and exit status 1."""
    try:
        app()
    except (ValueError, OSError, ImportError, RuntimeError, LookupError) as error:
        if "--traceback" in sys.argv:
            raise
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        sys.exit(f"error: {kind}{' '.join(str(error).split())}")
    except Exception as error:  # of a library, such as a damaged file of weights; or a bug
        if "--traceback" in sys.argv:
            raise
        first = (str(error).strip().splitlines() or ["no message"])[0]
        sys.exit(f"error: {type(error).__name__}: {first} (`oscar --traceback …` shows where)")

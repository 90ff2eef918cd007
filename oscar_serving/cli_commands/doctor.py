"""``oscar doctor``: what this machine can run, and what stands in the way."""

from __future__ import annotations

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for bug reports.")] = False,
) -> None:
    """Check the installation; exit status 1 when something is broken."""
    import json

    from oscar_serving.doctor import diagnose

    report = diagnose()
    typer.echo(json.dumps(report.as_dict(), indent=2) if as_json else report.as_text())
    raise typer.Exit(0 if report.healthy else 1)

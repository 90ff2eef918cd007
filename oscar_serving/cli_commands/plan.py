"""``oscar plan``: how many tokens and requests fit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from oscar_serving.cli_commands.sizes import format_size, parse_size

if TYPE_CHECKING:
    from oscar_serving.plan import Plan


def plan(
    model: Annotated[
        str, typer.Argument(help="A known name, a model folder or a config.json; weights are not needed.")
    ],
    memory: Annotated[
        int,
        typer.Option(
            parser=parse_size,
            metavar="SIZE",
            help="Memory for the KV cache, beside weights and activations, such as 80GiB.",
        ),
    ],
    context: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a request to count requests for; may be repeated. Default: 4K to 128K."),
    ] = None,
    sink: Annotated[int | None, typer.Option(min=0, help="First tokens kept in BF16.")] = None,
    recent: Annotated[int | None, typer.Option(min=1, help="Last tokens kept in BF16.")] = None,
    sliding: Annotated[
        Literal["same", "bounded"],
        typer.Option(
            help="Sliding-window layers: same as the others (embedded engine), or bounded and in BF16 (vLLM)."
        ),
    ] = "same",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share the KV heads.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the tokens and concurrent requests that fit in BF16, FP8 and 2-bit caches, windows and scales included."""
    import json
    from functools import partial

    from oscar_serving.cli_commands.models import resolve_model
    from oscar_serving.plan import CONTEXTS
    from oscar_serving.plan import plan as make_plan

    path = Path(model).expanduser()
    source = path if path.is_file() else resolve_model(model)
    make = partial(
        make_plan, source, memory, contexts=context or CONTEXTS, sliding=sliding, tensor_parallel=tensor_parallel
    )
    made = make()
    windows = {name: value for name, value in (("sink", sink), ("recent", recent)) if value is not None}
    if windows:
        made = make(config=made.config.with_(**windows))
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=2))
    else:
        show(made)


def show(made: Plan) -> None:
    """Print a plan as a table."""
    from rich.console import Console
    from rich.table import Table

    shape = f"{made.layers} layers, {made.kv_heads} KV heads of {made.head_dim}"
    title = f"{made.model}: {shape}, {format_size(made.memory_bytes)}"
    table = Table("cache", title=title)
    lengths = list(made.caches[0].requests)
    columns = ["bits", "bytes a token", "fewer", "fixed a request", "tokens"]
    for heading in (*columns, *(f"requests of {length}" for length in lengths)):
        table.add_column(heading, justify="right")
    for cache in made.caches:
        table.add_row(
            cache.name,
            f"{cache.bits_per_element:.2f}",
            f"{cache.bytes_per_token:.0f}",
            f"{made.ratio(cache):.2f} x",
            format_size(cache.bytes_per_request),
            str(cache.tokens),
            *(str(cache.requests[length]) for length in lengths),
        )
    Console().print(table)

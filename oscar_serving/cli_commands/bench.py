"""``oscar bench``: speed of the embedded engine on this machine."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from oscar_serving.cli_commands.sizes import format_size, parse_size


def bench(
    model: Annotated[str, typer.Argument(help="A name that `oscar models list` shows, or a model folder.")],
    artifact: Annotated[str, typer.Option(help="Calibration artifact: auto, a folder, hadamard or none.")] = "auto",
    kv_cache_dtype: Annotated[
        list[str] | None, typer.Option(help="Cache to measure; may be repeated. Default: oscar_int2 and bf16.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompt tokens; may be repeated. Default: 1024 and 4096.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that each generates.")] = 64,
    kv_cache_memory: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Memory for the KV cache.")
    ] = "1GiB",  # type: ignore[assignment]  # typer parses the default too
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where the model runs.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="Type that the model computes in.")
    ] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
) -> None:
    """Measure prefill and decode of MODEL with random prompts, one cache after the other."""
    from rich.console import Console
    from rich.table import Table

    from oscar_serving.cli_commands.models import resolve_model
    from oscar_serving.engines.hf import Engine, EngineOptions
    from oscar_serving.speed import measure

    folder = resolve_model(model)
    contexts = context or [1024, 4096]
    table = Table("cache", title=f"{model}: {batch} at once, {new_tokens} new tokens each")
    for heading in ("context", "first token", "decode tok/s", "bytes a token", "pool"):
        table.add_column(heading, justify="right")
    choices = [
        EngineOptions(
            kv_cache_dtype=name,
            artifact=artifact,
            kv_cache_memory=kv_cache_memory,
            max_num_seqs=batch,
            device=device,
            dtype=dtype,
            threads=threads,
        )
        for name in kv_cache_dtype or ["oscar_int2", "bf16"]
    ]
    for options in choices:
        engine = Engine.load(folder, options)
        engine.start()
        try:
            engine.warmup()
            for length in contexts:
                speed = measure(engine, context=length, batch=batch, new_tokens=new_tokens)
                table.add_row(
                    options.kv_cache_dtype,
                    str(length),
                    f"{speed.first_token_seconds:.2f} s",
                    f"{speed.decode_tokens_per_second:.1f}",
                    f"{speed.bytes_per_token:.0f}",
                    format_size(speed.pool_bytes),
                )
        finally:
            engine.shutdown(drain=False)
    Console().print(table)

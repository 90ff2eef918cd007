"""``oscar serve``: the embedded OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from oscar_serving.cli_commands.models import resolve_model
from oscar_serving.cli_commands.sizes import format_size, parse_size

if TYPE_CHECKING:
    from oscar_serving.engines.hf import Engine

KvCacheDtype = Literal["oscar_int2", "oscar_k4v2", "srft_int4", "srft_k8v4", "bf16"]
LogLevel = Literal["critical", "error", "warning", "info", "debug"]


def serve(
    model: Annotated[str, typer.Argument(help="A name that `oscar models list` shows, or a model folder.")],
    artifact: Annotated[
        str,
        typer.Option(help="Calibration artifact: auto, a folder, or hadamard | none to serve uncalibrated."),
    ] = "auto",
    kv_cache_dtype: Annotated[
        KvCacheDtype,
        typer.Option(
            help="oscar_int2: K and V 2 bits; oscar_k4v2: K 4, V 2; srft_int4: both 4 and srft_k8v4: K 8, V 4, on "
            "Apple GPUs and CPUs; bf16: for comparison."
        ),
    ] = "oscar_int2",
    kv_cache_memory: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Memory for the KV cache, such as 2GiB.")
    ] = "1GiB",  # type: ignore[assignment]  # typer parses the default too
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, help="Longest prompt plus answer in tokens; default: the model's own limit."),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Requests computed together.")] = 16,
    max_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens computed in one step.")] = 512,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get status 429.")] = 512,
    prefill_mode: Annotated[
        Literal["raw", "rule"],
        typer.Option(help="raw: exact inside a chunk; rule: the same result however the prompt is cut."),
    ] = "raw",
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the cache of equal prompt beginnings.")] = True,
    sink: Annotated[int | None, typer.Option(min=0, help="First tokens kept in BF16; default: the artifact's.")] = None,
    recent: Annotated[
        int | None, typer.Option(min=1, help="Last tokens kept in BF16; default: the artifact's.")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(min=16, help="Tokens a page, a multiple of 16; default: the artifact's.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Where the model runs.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type that the model computes in."),
    ] = "auto",
    seed: Annotated[int, typer.Option(help="Base seed of requests that bring none.")] = 0,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: torch's choice.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all, then set an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OSCAR_API_KEY", show_envvar=True, help="Key that every request must carry."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name clients ask for, may be given more than once; default: MODEL as given."),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Jinja file in place of the model's own template."),
    ] = None,
    tool_parser: Annotated[
        Literal["auto", "hermes", "none"],
        typer.Option(help="Read tool calls out of answers: hermes is <tool_call>{json}</tool_call>."),
    ] = "auto",
    max_body_size: Annotated[
        int, typer.Option(parser=parse_size, metavar="SIZE", help="Largest request body.")
    ] = "32MiB",  # type: ignore[assignment]
    drain_timeout: Annotated[
        int, typer.Option(min=0, max=86400, help="Seconds that running requests get to finish after SIGTERM.")
    ] = 60,
    log_level: Annotated[LogLevel, typer.Option(help="What to log.")] = "info",
    log_format: Annotated[Literal["text", "json"], typer.Option(help="How to log it, on standard error.")] = "text",
) -> None:
    """Serve MODEL over the OpenAI API on a 2-bit KV cache."""
    folder = resolve_model(model)  # before the heavy imports: a wrong name is told at once
    from oscar_serving.calibration.texts import file_text
    from oscar_serving.engines.hf import Engine, EngineOptions
    from oscar_serving.server import ServerSettings, bind, run_server

    names = tuple(served_model_name or [model.rstrip("/").rsplit("/", 1)[-1]])
    options = EngineOptions(
        kv_cache_dtype=kv_cache_dtype,
        artifact=artifact,
        kv_cache_memory=kv_cache_memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_waiting=max_waiting,
        prefill_mode=prefill_mode,
        prefix_caching=prefix_caching,
        sink=sink,
        recent=recent,
        page_size=page_size,
        device=device,
        dtype=dtype,
        seed=seed,
        threads=threads,
        model_id=names[0],
    )
    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key,
        served_model_names=names,
        model_root=str(folder.resolve()),
        chat_template=file_text(chat_template) if chat_template else None,
        tool_parser=tool_parser,
        max_body_bytes=max_body_size,
        drain_timeout=drain_timeout,
        log_level=log_level,
        log_format=log_format,
    )
    listener = bind(settings)
    engine = Engine.load(folder, options)
    for line in start_lines(engine, options.kv_cache_dtype):
        typer.echo(line)
    run_server(engine, settings, listener, lambda url: typer.echo(f"ready      {url}/v1"))


def start_lines(engine: Engine, kv_cache_dtype: str) -> list[str]:
    """What the server says about itself before it listens."""
    stats = engine.stats()
    pool = stats.quantized.bytes + stats.windows.bytes
    lines = [
        f"model      {engine.model_id} (context {engine.max_model_len} tokens)",
        f"kv cache   {kv_cache_dtype}, {stats.bytes_per_token:.0f} bytes a token",
    ]
    config = engine.config
    if config is not None:
        lines[1] += f" (K {config.k_bits} bits, V {config.v_bits} bits, scales {config.scale_dtype})"
        lines.append(f"windows    first {config.sink} and last {config.recent} tokens in {config.window_dtype}")
        lines.append(f"artifact   {engine.artifact.fingerprint if engine.artifact else 'none'}")
    if engine.options.srft:
        lines.append("windows    none: every token is read from its codes; per-channel factors are ones")
    lines.append(f"capacity   {stats.capacity_tokens} tokens in {format_size(pool)}")
    lines.append(f"kernels    {engine.backend.name} on {engine.device}")
    return lines

"""``oscar eval-tasks``: needles, conversations, drift and task files, on servers or on simulated caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from oscar_serving.evaluation.client import Client


def evaluate_tasks(
    target: Annotated[
        list[str], typer.Argument(help="Addresses of servers, as http://…/v1 or NAME=http://…/v1; or one model.")
    ],
    configuration: Annotated[
        list[str] | None, typer.Option(help="With a model, a cache such as bf16, auto or 'wide=auto,recent=512'.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="needles, multiturn, drift or tasks; default: what there is input for.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Prose to hide facts in. Default: the sample.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="One prompt a line, for the drift.")
    ] = None,
    tasks: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="One task a line, as JSON.")] = None,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for tasks.json and tasks.html.")] = None,
    length: Annotated[
        list[int] | None, typer.Option(min=64, help="Tokens of a text with needles; may be repeated.")
    ] = None,
    needle_texts: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 4,
    conversations: Annotated[int, typer.Option(min=1, help="Conversations to hold.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest free answer.")] = 256,
    api_key: Annotated[
        str | None, typer.Option(envvar="OSCAR_API_KEY", show_envvar=True, help="Key of the servers.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of texts and sampling.")] = 0,
) -> None:
    """Ask servers, or a model on simulated caches, for facts in long texts and answers to tasks."""
    from oscar_serving.cli_commands.progress import bars
    from oscar_serving.evaluation.suite import run_suite
    from oscar_serving.evaluation.tasks import read_tasks
    from oscar_serving.evaluation.texts import read_texts

    offered = {"needles": True, "multiturn": True, "drift": prompts is not None, "tasks": tasks is not None}
    lines = prompts.read_text(encoding="utf-8").splitlines() if prompts else []
    clients = _clients(target, configuration or [], api_key)
    with bars() as progress:
        content = run_suite(
            clients,
            out,
            parts=part or [name for name, there in offered.items() if there],
            filler=read_texts([text] if text else [])[0][1],
            lengths=length or (1024, 2048, 4096),
            needle_texts=needle_texts,
            conversations=conversations,
            prompts=[line for line in lines if line.strip()],
            max_tokens=max_tokens,
            tasks=read_tasks(tasks) if tasks else (),
            seed=seed,
            progress=progress,
        )
    for line in summary(content):
        typer.echo(line)
    if out is not None:
        typer.echo(out / "tasks.html")


def summary(content: dict[str, Any]) -> list[str]:
    """One line a part and client."""
    lines = []
    for result in content.get("needles", ()):
        right, asked = (sum(cell[key] for cell in result["cells"]) for key in ("right", "asked"))
        lines.append(f"needles    {result['name']}: {right} of {asked}")
    for result in content.get("multiturn", ()):
        warm = f"warm equals cold {100 * result['warm_equals_cold']:.0f} %"
        lines.append(f"multiturn  {result['name']}: {100 * result['accuracy']['value']:.1f} % right, {warm}")
    for result in content.get("drift", ()):
        longer = f"{result['length_change']['value']:+.1f} tokens"
        lines.append(f"drift      {result['name']}: {longer}, {100 * result['equal']:.0f} % equal")
    for result in content.get("tasks", ()):
        strict, flexible = (100 * result[key]["value"] for key in ("strict", "flexible"))
        lines.append(f"tasks      {result['name']}: strict {strict:.1f} %, flexible {flexible:.1f} %")
    return lines


def _clients(targets: Sequence[str], configurations: Sequence[str], api_key: str | None) -> list[Client]:
    from oscar_serving.cli_commands.models import resolve_model
    from oscar_serving.evaluation.configuration import parse
    from oscar_serving.evaluation.endpoint import EndpointClient
    from oscar_serving.evaluation.model import EvaluatedModel
    from oscar_serving.evaluation.simulated import SimulatedClient

    split = [_address(target) for target in targets]
    if all(url for _, url in split):
        if configurations:
            raise typer.BadParameter("--configuration belongs to a model, not to servers")
        return [EndpointClient(url, api_key=api_key, name=name or url) for name, url in split if url]
    if len(targets) != 1:
        raise typer.BadParameter("give addresses of servers (http://…/v1), or one model")
    folder = resolve_model(targets[0])
    judged = EvaluatedModel.load(folder)
    return [
        SimulatedClient(judged, parse(short, folder, judged.config)) for short in configurations or ("bf16", "auto")
    ]


def _address(target: str) -> tuple[str | None, str | None]:
    """Name and URL; no URL if the target is none."""
    name, separator, rest = target.partition("=")
    if separator and rest.startswith(("http://", "https://")):
        return name, rest
    return None, target if target.startswith(("http://", "https://")) else None

"""The ``oscar`` command from outside."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from oscar_serving import __version__
from oscar_serving.cli import app
from oscar_serving.cli_commands.models import resolve_model
from oscar_serving.cli_commands.serve import serve
from oscar_serving.cli_commands.sizes import format_size, parse_size
from oscar_serving.engines.hf import EngineOptions
from oscar_serving.server import ServerSettings

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(info.name for info in app.registered_commands if info.name)
HEAVY = ("torch", "transformers", "numpy", "pydantic", "fastapi", "safetensors", "matplotlib")


def oscar(*arguments: str, env: dict[str, str] | None = None) -> Any:
    """Run the command in this process, where that is enough."""
    return CliRunner().invoke(app, list(arguments), env=env, terminal_width=200)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS), ("models",), ("models", "get")])
def test_help_of_every_command(command: tuple[str, ...]) -> None:
    result = oscar(*command, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


def test_every_command_and_option_is_documented() -> None:
    sections = dict(part.split("\n", 1) for part in (ROOT / "docs" / "cli.md").read_text().split("\n## ")[1:])
    assert set(sections) == {*COMMANDS, "models"}
    for command in COMMANDS:
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", oscar(command, "--help").output)) - {"--help"}
        missing = [option for option in options if f"`{option}" not in sections[command]]
        missing = [option for option in missing if f"{option} " not in sections[command]]
        assert not missing, command


def test_help_and_version_import_nothing_heavy() -> None:
    """What makes the command answer at once."""
    code = (
        "import sys; from oscar_serving.cli import app\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "sys.exit(f'imported: {loaded}' if loaded else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version() -> None:
    assert oscar("--version").output == f"oscar-serving {__version__}\n"


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (("--kv-cache-dtype", "int3"), "oscar_int2"),
        (("--kv-cache-memory", "lots"), "2GiB"),
        (("--kv-cache-memory", "0"), "2GiB"),
        (("--kv-cache-memory", "-1GiB"), "2GiB"),
        (("--prefill-mode", "fast"), "rule"),
        (("--recent", "0"), "--recent"),
        (("--sink", "-1"), "--sink"),
        (("--page-size", "7"), "--page-size"),
        (("--drain-timeout", "1000000000000"), "--drain-timeout"),
        (("--max-num-seqs", "0"), "--max-num-seqs"),
        (("--port", "70000"), "--port"),
        (("--device", "tpu"), "mps"),
        (("--dtype", "int8"), "bfloat16"),
        (("--chat-template", "/nowhere/at.all"), "--chat-template"),
        (("--unknown",), "--unknown"),
    ],
)
def test_bad_options_of_serve_are_refused_before_anything_is_loaded(options: tuple[str, ...], names: str) -> None:
    result = oscar("serve", "smollm2", *options)
    assert result.exit_code == 2
    assert names in result.output


@pytest.mark.parametrize("model", ["no-such-model", "../../../etc", "/etc/passwd", ""])
def test_unknown_model(model: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"model {model!r}")):
        resolve_model(model)


def test_error_is_one_line_unless_asked() -> None:
    command = [sys.executable, "-m", "oscar_serving"]
    done = subprocess.run([*command, "serve", "no-such-model"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: model 'no-such-model': neither a known name (")
    assert len(done.stderr.strip().splitlines()) == 1
    done = subprocess.run([*command, "--traceback", "serve", "no-such-model"], capture_output=True, text=True)
    assert "Traceback" in done.stderr


def defaults(function: Callable[..., None]) -> dict[str, Any]:
    """Default of each option, as the command would pass it on."""
    sizes = {"kv_cache_memory", "max_body_size"}
    return {
        name: parse_size(parameter.default) if name in sizes else parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }


@pytest.mark.parametrize(
    ("options", "renamed"),
    [
        (EngineOptions, {"model_id": None}),
        (
            ServerSettings,
            {
                "max_body_bytes": "max_body_size",
                "served_model_names": None,
                "model_root": None,
                "body_timeout": None,
            },
        ),
    ],
)
def test_defaults_are_those_of_the_configuration(options: type, renamed: dict[str, str | None]) -> None:
    cli = defaults(serve)
    for field in dataclasses.fields(options):
        name = renamed.get(field.name, field.name)
        if name is not None:
            assert cli[name] == field.default, name


def test_doctor() -> None:
    result = oscar("doctor", "--json")
    report = json.loads(result.output)
    assert result.exit_code == (0 if report["healthy"] else 1)
    assert report["healthy"], report["problems"]
    assert report["oscar"] == __version__
    assert report["versions"]["torch"]
    assert "cpu" in report["devices"]
    assert report["backends"]["cpu"]
    text = oscar("doctor").output
    assert report["versions"]["torch"] in text
    assert text.rstrip().endswith("all well")


def test_doctor_reports_what_is_broken(tmp_path: Any) -> None:
    broken = tmp_path / "some-model"
    broken.mkdir()
    (broken / "oscar.safetensors").write_bytes(b"\xff" * 100)
    result = oscar("doctor", "--json", env={"OSCAR_ARTIFACTS": str(tmp_path)})
    assert result.exit_code == 1
    [problem] = json.loads(result.output)["problems"]
    assert str(broken) in problem


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("2GB", 2 * 10**9),
        ("1.5 MiB", 3 << 19),
        ("512k", 512 << 10),
        ("17", 17),
        ("17B", 17),
        ("0.5TiB", 1 << 39),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2XiB", "-2GiB", "1e3", "0.1B", "nan", "9" * 50, "2 G i B", "٢GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a size"):
        parse_size(text)


def test_sizes_are_shown() -> None:
    assert [format_size(size) for size in (17, 1536, 5 << 30, 3 << 41)] == [
        "17 B",
        "1.50 KiB",
        "5.00 GiB",
        "6.00 TiB",
    ]

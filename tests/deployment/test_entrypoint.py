"""``docker/entrypoint.sh``: what it refuses, and the embedded server that it becomes."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

from .conftest import KEY
from .tools import DOCKER, run

ENTRY = DOCKER / "entrypoint.sh"
PATH = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"


@pytest.mark.parametrize(
    ("arguments", "variables", "reason"),
    [
        (("vllm",), {"OSCAR_API_KEY": KEY}, "name a model first"),
        (("vllm", "--port", "1"), {"OSCAR_API_KEY": KEY}, "name a model first"),
        (("vllm", "/models/m"), {}, "no API key"),
        (("sglang", "/models/m"), {"OSCAR_API_KEY": ""}, "no API key"),
        (("embedded", "/models/m"), {"OSCAR_API_KEY_FILE": "/nowhere"}, "cannot read the API key in /nowhere"),
        (("embedded", "/models/m"), {"OSCAR_API_KEY_FILE": "/dev/null"}, "no API key"),
        (("other", "/models/m"), {"OSCAR_API_KEY": KEY}, "unknown engine other"),
    ],
)
def test_refusals(arguments: tuple[str, ...], variables: dict[str, str], reason: str) -> None:
    done = run(ENTRY, *arguments, env={"PATH": PATH, **variables})
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {reason}")
    assert done.stderr.count("\n") == 1
    assert KEY not in done.stderr


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
def test_embedded_server_with_the_key_of_a_file(model_folder: Path, tmp_path: Path) -> None:
    """The process is the server itself, so that signals reach it; nothing of it shows the key."""
    (tmp_path / "key").write_text(f"{KEY}\n")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OSCAR_")},
        "PATH": PATH, "OSCAR_API_KEY_FILE": str(tmp_path / "key"),
    }  # fmt: skip
    options = ["--artifact", "hadamard", "--kv-cache-memory", "8MiB", "--threads", "1", "--port", "0"]
    command = [ENTRY, "embedded", model_folder, *options]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            ready = next((line for line in server.stdout if line.startswith("ready")), None)
            assert ready is not None, "the server did not start"
            port = ready.split()[1].removesuffix("/v1").rpartition(":")[2]
            command_line = Path(f"/proc/{server.pid}/cmdline").read_text()
            assert "serve" in command_line
            assert KEY not in command_line
            url = f"http://127.0.0.1:{port}"
            done = run("python3", DOCKER / "healthcheck.py", url, env={"PATH": PATH, "OSCAR_API_KEY": KEY})
            assert done.returncode == 0, done.stderr
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_key_reaches_the_engines_off_the_command_line(engine: str, tmp_path: Path) -> None:
    """The engine is a program that shows its arguments and where it would find the key."""
    program = tmp_path / engine
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\necho "variable: ${VLLM_API_KEY:-}"\ncat "$4" 2>/dev/null\n:\n')
    program.chmod(0o755)
    key = "it's a key"
    variables = {"PATH": f"{tmp_path}:{PATH}", "OSCAR_API_KEY": key, "TMPDIR": str(tmp_path)}
    done = run(ENTRY, engine, "/models/m", "--served-model-name", "my model", env=variables)
    assert done.returncode == 0, done.stderr
    arguments, _, where = done.stdout.partition("variable: ")
    assert key not in arguments
    assert arguments.splitlines()[:2] == ["serve", "/models/m"]
    assert arguments.splitlines()[-2:] == ["--served-model-name", "my model"]
    if engine == "vllm":
        assert where == f"{key}\n"
    else:
        assert where == "\napi-key: 'it''s a key'\n"
        [options] = tmp_path.glob("*.yaml")
        assert options.stat().st_mode & 0o077 == 0

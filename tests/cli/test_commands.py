"""Commands that compute, one after the other on a tiny model, as a user runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from oscar_serving.calibration import Artifact
from oscar_serving.calibration.zoo import export_zoo
from oscar_serving.cli import app

from ..server.tiny import CONTEXT, build_model


def oscar(*arguments: str | Path, code: int = 0) -> str:
    """What a command prints."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"Sentence number {index} says little." for index in range(400)))
    return path


@pytest.fixture(scope="module")
def artifact(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "tiny"
    said = oscar("calibrate", model, "--out", out, "--text", text, "--tokens", "512", "--sequence-length", "128")
    assert said.strip() == str(out / "oscar.safetensors")
    return out


def test_calibrated_artifact_is_described(artifact: Path) -> None:
    said = oscar("inspect", artifact)
    for word in ("tiny", "llama, 2 layers, 4/2 heads of 16", "K 2 bits", "text.txt", "command", "fingerprint"):
        assert word in said


def test_eval_writes_its_report(model: Path, artifact: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["--artifact", artifact, "--text", text, "--out", tmp_path, "--sequences", "1", "--tokens", "400"]
    said = oscar("eval", model, *arguments, "--no-baselines", "--configuration", "plain=hadamard,recent=64")
    assert "OSCAR" in said
    assert "plain" in said
    assert (tmp_path / "report.html").is_file()
    report = json.loads((tmp_path / "evaluation.json").read_text())
    assert [each["name"] for each in report["configurations"]] == ["OSCAR", "plain"]


def test_plan(model: Path) -> None:
    made = json.loads(oscar("plan", model, "--memory", "64MiB", "--context", "512", "--recent", "128", "--json"))
    assert made["memory_bytes"] == 64 << 20
    assert made["max_model_len"] == CONTEXT
    assert made["config"]["recent"] == 128
    assert [list(cache["requests"]) for cache in made["caches"]] == [["512"]] * 4
    assert made == json.loads(
        oscar("plan", model / "config.json", "--memory", "64MiB", "--context", "512", "--recent", "128", "--json")
    ) | {"model": made["model"]}
    assert "K2 V2" in oscar("plan", model, "--memory", "64MiB")


def test_bench(model: Path, artifact: Path) -> None:
    arguments = ["--artifact", artifact, "--context", "96", "--new-tokens", "4", "--batch", "2", "--threads", "1"]
    said = oscar("bench", model, *arguments, "--kv-cache-memory", "32MiB")
    assert "oscar_int2" in said
    assert "bf16" in said


@pytest.mark.parametrize("command", ["calibrate", "eval"])
def test_truncated_weights_are_one_line(model: Path, tmp_path: Path, command: str) -> None:
    folder = shutil.copytree(model, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    options = ["--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "oscar_serving", command, str(folder), *options], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.strip().startswith("error: SafetensorError: ")  # an empty line ends the progress bars
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_import_zoo(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    from transformers import LlamaConfig

    files = tmp_path / "k.pt", tmp_path / "v.pt"
    export_zoo(Artifact.plain(LlamaConfig(**config), "hadamard"), *files)
    oscar("import-zoo", *files, "--model", model, "--out", tmp_path / "out", "--tokens", "512")
    assert "tiny" in oscar("inspect", tmp_path / "out")


def test_pickle_that_would_run_code_is_refused(model: Path, tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "was-run",)

    torch.save({"format_version": 1, "layers": Malicious()}, tmp_path / "bad.pt")
    command = [sys.executable, "-m", "oscar_serving", "import-zoo", tmp_path / "bad.pt", tmp_path / "bad.pt"]
    done = subprocess.run([*command, "--model", model, "--out", tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "refused" in done.stderr
    assert not (tmp_path / "was-run").exists()


@pytest.mark.parametrize("damage", ["truncated", "missing", "empty"])
def test_damaged_artifact_is_one_line(artifact: Path, tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    whole = (artifact / "oscar.safetensors").read_bytes()
    if damage != "missing":
        (folder / "oscar.safetensors").write_bytes(whole[: len(whole) // 2] if damage == "truncated" else b"")
    done = subprocess.run(
        [sys.executable, "-m", "oscar_serving", "inspect", folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert str(folder) in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1

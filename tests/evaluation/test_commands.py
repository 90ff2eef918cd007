"""``oscar eval --grid`` and ``oscar eval-tasks`` as a user calls them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from oscar_serving.cli import app
from oscar_serving.engines.hf import Engine
from oscar_serving.evaluation.texts import read_texts
from tests.server.conftest import serve


def oscar(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], terminal_width=200)


def test_tasks_on_servers_and_on_a_simulated_cache(load: Callable[..., Engine], model_folder: Path, tmp_path: Path):
    tasks, prompts, text = tmp_path / "tasks.jsonl", tmp_path / "prompts.txt", tmp_path / "text.txt"
    tasks.write_text(json.dumps({"prompt": "2+2=", "answer": "4", "max_tokens": 4}) + "\n")
    prompts.write_text("one\n\ntwo\n")
    text.write_text(read_texts([])[0][1][:20_000])
    common = (
        "--tasks", tasks, "--prompts", prompts, "--text", text, "--length", 800, "--needle-texts", 1,
        "--conversations", 1, "--max-tokens", 4,
    )  # fmt: skip
    with serve(load()) as one:
        done = oscar("eval-tasks", f"first={one.url}/v1", f"{one.url}/v1", *common, "--out", tmp_path / "served")
    assert done.exit_code == 0, done.output
    assert "needles    first: 0 of 5" in done.output
    assert "100 % equal" in done.output
    assert json.loads((tmp_path / "served" / "tasks.json").read_text())["clients"][0] == "first"
    done = oscar(
        "eval-tasks", model_folder, "--configuration", "bf16", "--configuration", "h=hadamard,recent=16", *common
    )
    assert done.exit_code == 0, done.output
    assert "tasks      h: strict 0.0 %" in done.output
    assert oscar("eval-tasks", "http://a/v1", "--configuration", "bf16").exit_code == 2
    assert oscar("eval-tasks", "a", "b").exit_code == 2


def test_grid(model_folder: Path, tmp_path: Path):
    done = oscar(
        "eval", model_folder, "--grid", "--axis", "reference", "--sequences", 1, "--tokens", 400, "--out", tmp_path,
        "--state", tmp_path / "state", "--stride", 2,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    names = [c["name"] for c in json.loads((tmp_path / "evaluation.json").read_text())["configurations"]]
    assert names == ["reference: BF16", "reference: FP8", "reference: INT4 Hadamard"]
    assert len(list((tmp_path / "state").iterdir())) == 4
    assert oscar("eval", model_folder, "--axis", "clip").exit_code == 2

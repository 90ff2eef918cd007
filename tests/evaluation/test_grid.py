"""The ablation grid on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_serving.config import OscarConfig
from oscar_serving.evaluation.grid import AXES, Grid
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError
from oscar_serving.evaluation.run import evaluate_grid
from oscar_serving.evaluation.storage import OscarStorage
from oscar_serving.evaluation.texts import read_texts, sequences
from tests.engine.tiny import byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def judged() -> EvaluatedModel:
    return EvaluatedModel(tiny_model("qwen3"), byte_tokenizer(), "tiny")


def test_every_axis(judged: EvaluatedModel):
    found, _ = sequences(judged.tokenizer, read_texts([]), count=3, tokens=119)
    config = OscarConfig(group_size=16, sink=4, recent=16, scale_dtype="float8_e4m3")
    grid = Grid(judged, found[:2], found[2:], config)
    made = {c.name: c.storage for c in grid.configurations()}
    assert {name.split(":")[0] for name in made} == set(AXES)
    assert {name for name in made if name.startswith("group")} == {
        f"group: {size} {kind}" for size in (32,) for kind in ("float8_e4m3", "float16")
    }
    oscar = {name: s for name, s in made.items() if isinstance(s, OscarStorage)}
    layers = {name: s.artifact.layers[0] for name, s in oscar.items()}
    # What each axis is about differs.
    assert not layers["rotation: per head"].k_rotation.equal(layers["rotation: per layer"].k_rotation)
    assert layers["rotation: per layer"].k_rotation[0].equal(layers["rotation: per layer"].k_rotation[1])
    assert layers["rotation: none"].k_rotation[0].diagonal().min() == 1
    assert not layers["parts: without P"].k_rotation.equal(layers["parts: U H P"].k_rotation)
    assert not layers["k target: k"].k_rotation.equal(layers["k target: q"].k_rotation)
    assert not layers["v target: v"].v_rotation.equal(layers["v target: scores"].v_rotation)
    assert layers["clip: none"].k_shrink.min() == 1
    assert layers["clip: shrink"].k_shrink.min() < 1
    assert oscar["clip: quantile .96/.92"].quantile_clip == (0.96, 0.92)
    assert oscar["levels: Lloyd-Max"].config.levels == "lloyd_max"
    assert (oscar["windows: 0/1"].sink, oscar["windows: 0/1"].recent) == (0, 1)
    assert oscar["bits: K4 V2"].config.k_bits == 4
    assert len(oscar["bits: K4 in the first and last 2 layers"].layer_bits) == 2
    with pytest.raises(EvaluationError, match="axis 'colour'"):
        list(grid.configurations(["colour"]))


def test_evaluating_an_axis(judged: EvaluatedModel, tmp_path: Path):
    text = tmp_path / "calibration.txt"
    text.write_text(read_texts([])[0][1][:30_000])
    report = evaluate_grid(
        judged, (), tmp_path / "out", axes=["reference", "windows"], calibration_texts=[text],
        calibration_tokens=6000, sequences=2, tokens=500,
    )  # fmt: skip
    kld = {r.configuration.name: r.overall["kld_mean"]["value"] for r in report.results}
    assert next(iter(kld)) == "reference: BF16"
    assert kld["windows: 0/1"] > kld["windows: 64/256"] > kld["windows: 128/512"] >= 0
    assert (tmp_path / "out" / "report.html").is_file()

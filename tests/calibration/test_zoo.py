"""Published rotation files: read, refused, imported, exported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oscar_serving.calibration import Artifact, ArtifactError
from oscar_serving.calibration.recipe import PRESETS
from oscar_serving.calibration.run import calibrate_model, collect
from oscar_serving.calibration.zoo import export_zoo, import_zoo, read_zoo
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import spectral_rotation
from tests.calibration.tiny import tiny_folder, tiny_model, tiny_tokens

CONFIG = OscarConfig(sink=4, recent=8, scale_dtype="float8_e4m3")


def entry(layer: int, target: Tensor) -> dict[str, Any]:
    values = torch.linalg.eigvalsh(target).flip(-1)
    return {"layer_id": layer, "rotation": spectral_rotation(target).float(), "eigenvalues": values.float()}


def content(version: Any, targets: dict[int, Tensor], *, text_keys: bool = False) -> dict[str, Any]:
    per_layer = version in (1, "identity-v1")
    return {
        "format_version": version,
        "objective": "qqt",
        "source_grouping": "layer" if per_layer else "per_kv_head",
        "layers": {str(i) if text_keys else i: entry(i, t.mean(0) if per_layer else t) for i, t in targets.items()},
    }


def random_targets(seed: int = 0, layers: int = 2, heads: int = 2, d: int = 16) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(layers, heads, 99, d, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(layers, heads, d, d, generator=generator, dtype=torch.float64)
    return dict(enumerate(x.mT @ x))


def save(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("zoo") / "tiny", "llama")


@pytest.fixture(scope="module")
def targets(model: Path) -> dict[int, Tensor]:
    from oscar_serving.calibration.run import load_model

    loaded, _ = load_model(model, device="cpu", dtype="auto")
    return {layer: m.qq for layer, m in collect(loaded, tiny_tokens(2, 60), CONFIG).items()}


@pytest.mark.parametrize(("version", "dims"), [(1, 2), ("identity-v1", 2), (2, 3)])
@pytest.mark.parametrize("text_keys", [True, False])
def test_formats_are_read(tmp_path: Path, version: Any, dims: int, text_keys: bool) -> None:
    targets = random_targets()
    zoo = read_zoo(save(tmp_path / "k.pt", content(version, targets, text_keys=text_keys)))
    assert sorted(zoo.rotations) == [0, 1]
    assert zoo.rotations[0].dim() == dims
    wanted = targets[1] if dims == 3 else targets[1].mean(0)
    assert torch.equal(zoo.rotations[1], spectral_rotation(wanted).float())


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/oscar-zoo-was-executed",)


def damaged(change: Any) -> dict[str, Any]:
    value = content(1, random_targets())
    change(value)
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (content(3, random_targets()), "format 3 is not supported"),
        (content(4, random_targets()), "format_version 4: allowed"),
        (damaged(lambda v: v.pop("format_version")), "format_version None"),
        (damaged(lambda v: v.update(format_version=[1])), "format_version"),
        (damaged(lambda v: v["layers"][0]["rotation"].mul_(1.01)), "layer 0: .*not orthogonal"),
        (damaged(lambda v: v["layers"][1]["rotation"].fill_(torch.nan)), "layer 1: .*not orthogonal"),
        (damaged(lambda v: v["layers"][1].update(rotation=torch.eye(16)[None])), "layer 1: rotation"),
        (damaged(lambda v: v["layers"][1].update(rotation="R")), "layer 1: rotation str"),
        (damaged(lambda v: v["layers"][1].update(layer_id=0)), "layer 1: .*layer_id"),
        (damaged(lambda v: v["layers"].update(x={})), "layer key 'x'"),
        (damaged(lambda v: v.update(layers={})), "not a rotation file"),
        ([1, 2], "not a rotation file"),
        ({"format_version": 1, "layers": {0: Malicious()}}, "refused"),
    ],
)
def test_others_are_refused(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_zoo(save(tmp_path / "k.pt", value))
    assert not Path("/tmp/oscar-zoo-was-executed").exists()


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    file = save(tmp_path / "k.pt", content(1, random_targets()))
    whole = file.read_bytes()
    for size in (0, 10, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(ArtifactError):
            read_zoo(file)
    with pytest.raises(ArtifactError, match="cannot be read"):
        read_zoo(tmp_path / "nowhere.pt")


@pytest.mark.parametrize("version", [1, 2])
def test_import(tmp_path: Path, model: Path, targets: dict[int, Tensor], version: int) -> None:
    file = save(tmp_path / "k.pt", content(version, targets))
    written = import_zoo(file, file, model, tmp_path / "out", config=CONFIG, tokens=240, sequence_length=60)
    artifact = Artifact.load(written)
    wanted = targets[1] if version == 2 else targets[1].mean(0)
    rotation = spectral_rotation(wanted).float().expand(2, 16, 16)
    assert torch.equal(artifact.layers[1].k_rotation, rotation)
    assert (artifact.layers[0].k_shrink < 1).any()
    assert artifact.model_id == "tiny"
    assert artifact.metadata["calibration"]["format"] == version


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (random_targets(layers=3), r"layers: file 3 .*model 2"),
        (random_targets(d=32), "head size: file 32, model 16"),
        (random_targets(heads=4), "KV heads: file 4, model 2"),
        (random_targets(), "made for another model"),
    ],
)
def test_files_of_another_model_are_refused(
    tmp_path: Path, model: Path, wrong: dict[int, Tensor], message: str
) -> None:
    file = save(tmp_path / "k.pt", content(2, wrong))
    with pytest.raises(ArtifactError, match=message):
        import_zoo(file, file, model, tmp_path / "out", config=CONFIG, tokens=120, sequence_length=60)
    assert not (tmp_path / "out").exists()


def test_export_round_trip(tmp_path: Path) -> None:
    made = calibrate_model(tiny_model("llama"), tiny_tokens(2, 60), recipe=PRESETS["oscar"], config=CONFIG)
    export_zoo(made, tmp_path / "x" / "k.pt", tmp_path / "x" / "v.pt")
    zoo = read_zoo(tmp_path / "x" / "v.pt")
    assert zoo.version == 2
    assert all(torch.equal(zoo.rotations[i], made.layers[i].v_rotation) for i in (0, 1))
    file = torch.load(tmp_path / "x" / "k.pt", weights_only=True)
    assert file["objective"] == "cov_eig_hadamard_perhead"
    assert file["layers"][1]["rotation"].shape == (2, 16, 16)
    with_means = calibrate_model(
        tiny_model("llama"), tiny_tokens(2, 60), recipe=PRESETS["default"].__class__(means=("plain",)), config=CONFIG
    )
    with pytest.raises(ArtifactError, match="subtracts means"):
        export_zoo(with_means, tmp_path / "k.pt", tmp_path / "v.pt")

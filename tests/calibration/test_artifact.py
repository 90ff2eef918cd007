"""The artifact: round trip, validation, model check, search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig, LlamaConfig, Qwen3Config

from oscar_serving.calibration import Architecture, Artifact, ArtifactError, Clip, find_artifact
from oscar_serving.calibration.artifact import FILE_NAME, FORMAT, FORMAT_VERSION
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import LayerTransform, spectral_rotation
from tests.maps import apart


def llama(**options: object) -> LlamaConfig:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    return LlamaConfig(**{**sizes, "head_dim": 16, **options})


def artifact(seed: int = 0, **model: object) -> Artifact:
    generator = torch.Generator().manual_seed(seed)

    def rotation() -> torch.Tensor:
        x = torch.randn(2, 50, 16, generator=generator, dtype=torch.float64)
        return spectral_rotation(x.mT @ x).float()

    def positive(scale: float = 1.0) -> torch.Tensor:
        return torch.rand(2, generator=generator) * 0.5 * scale + 0.4

    mean = torch.randn(2, 16, generator=generator)
    layers = {
        i: LayerTransform(*apart(rotation()), rotation(), mean, -mean, positive(), positive(), positive(), positive())
        for i in range(2)
    }
    clips = {(i, "k", 4): Clip(positive(), positive()) for i in range(2)}
    config = OscarConfig(scale_dtype="float8_e4m3", sink=32)
    return Artifact(layers, config, Architecture.of(llama()), {"model": {"id": "m", **model}}, clips)


def test_round_trip(tmp_path: Path) -> None:
    made = artifact()
    made.save(tmp_path)
    read = Artifact.load(tmp_path)
    assert read.config == made.config
    assert read.metadata == made.metadata
    assert read.architecture == made.architecture
    assert read.fingerprint == made.fingerprint == Artifact.load(tmp_path / FILE_NAME).fingerprint
    for index, transform in made.layers.items():
        assert torch.equal(read.layers[index].k_rotation, transform.k_rotation)
        assert torch.equal(read.layers[index].q_rotation, transform.q_rotation)
        assert torch.equal(read.layers[index].v_unit, transform.v_unit)
    assert torch.equal(read.clips[1, "k", 4].shrink, made.clips[1, "k", 4].shrink)
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]


def test_fingerprint_sees_every_field() -> None:
    made = artifact()
    seen = {made.fingerprint, artifact(1).fingerprint, replace(made, config=OscarConfig()).fingerprint}
    for name in ("q_rotation", "k_mean", "v_shrink", "k_unit"):
        changed = replace(made.layers[1], **{name: getattr(made.layers[1], name) * 0.5})
        seen.add(replace(made, layers={0: made.layers[0], 1: changed}).fingerprint)
    assert len(seen) == 7


def test_for_bits_swaps_the_clips_and_back() -> None:
    made = artifact()
    four = made.for_bits(4, 2)
    assert (four.config.k_bits, four.config.v_bits) == (4, 2)
    assert torch.equal(four.layers[0].k_shrink, made.clips[0, "k", 4].shrink)
    assert torch.equal(four.layers[0].v_shrink, made.layers[0].v_shrink)
    assert four.fingerprint != made.fingerprint
    assert four.for_bits(2, 2).fingerprint == made.fingerprint
    with pytest.raises(ArtifactError, match="no clip for 4-bit V"):
        made.for_bits(2, 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t["layers.0.k_rotation"].mul_(1.01), "do not belong together"),
        (lambda t: t["layers.1.v_mean"].fill_(torch.nan), "not finite"),
        (lambda t: t["layers.1.v_shrink"].fill_(0.0), r"\(0, 1\]"),
        (lambda t: t["layers.1.v_unit"].fill_(0.0), "positive"),
        (lambda t: t["clips.0.k4.unit"].fill_(torch.inf), "not finite"),
        (lambda t: t.pop("layers.0.k_mean"), "k_mean"),
        (lambda t: t.update({"layers.0.k_mean": torch.zeros(2, 8)}), "k_mean"),
        (lambda t: t.update({"layers.0.k_mean": torch.zeros(2, 16, dtype=torch.float16)}), "float16"),
        (lambda t: t.update({"layers.2.k_mean": torch.zeros(2, 16)}), "unknown tensors"),
        (lambda t: t.update({"clips.9.k4.shrink": torch.ones(2), "clips.9.k4.unit": torch.ones(2)}), "9"),
    ],
)
def test_damaged_tensors_are_refused(tmp_path: Path, damage, message: str) -> None:  # type: ignore[no-untyped-def]
    file = artifact().save(tmp_path)
    from safetensors import safe_open

    with safe_open(file, "pt") as reader:
        metadata = reader.metadata()
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format_version": 3}, "format version 3"),
        ({"architecture": {}}, "architecture"),
        ({"config": {"sink": -1}}, "sink"),
        ({"config": {"surprise": 1}}, "surprise"),
        ({"metadata": {"calibration": None}}, r"metadata\.calibration"),
    ],
)
def test_odd_headers_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = artifact().save(tmp_path)
    header = {
        "format_version": FORMAT_VERSION,
        "architecture": artifact().architecture.to_dict(),
        "config": {},
        "metadata": {},
        **change,
    }
    save_file(load_file(file), file, metadata={FORMAT: json.dumps(header)})
    with pytest.raises(ArtifactError, match=message):
        Artifact.load(file)


def test_other_files_are_refused(tmp_path: Path) -> None:
    file = artifact().save(tmp_path)
    whole = file.read_bytes()
    for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match="truncated"):
            Artifact.load(tmp_path)
    save_file({"x": torch.ones(1)}, file)
    with pytest.raises(ArtifactError, match="not an OSCAR artifact"):
        Artifact.load(tmp_path)
    with pytest.raises(ArtifactError, match="no such artifact"):
        Artifact.load(tmp_path / "nowhere")


def test_another_model_is_refused_with_both_values() -> None:
    made = artifact()
    made.check_model(llama())
    with pytest.raises(ArtifactError, match=r"kv_heads: artifact 2, model 4"):
        made.check_model(llama(num_key_value_heads=4))
    with pytest.raises(ArtifactError, match=r"rope: artifact .*10000.*, model .*500000"):
        made.check_model(llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}))
    with pytest.raises(ArtifactError, match=r"model_type: artifact llama, model qwen3"):
        made.check_model(Qwen3Config(num_hidden_layers=2))


def test_both_names_of_the_rope_type_agree() -> None:
    """SGLang writes ``type`` beside ``rope_type`` into the configuration that it loads."""
    both = llama()
    both.rope_parameters = {**both.rope_parameters, "type": both.rope_parameters["rope_type"]}
    artifact().check_model(both)
    old = llama()
    old.rope_parameters = {"rope_theta": old.rope_parameters["rope_theta"], "type": "default"}
    artifact().check_model(old)
    kinds = Gemma3TextConfig(num_hidden_layers=3)
    before = Architecture.of(kinds).rope
    kinds.rope_parameters = {k: {**v, "type": v["rope_type"]} for k, v in kinds.rope_parameters.items()}
    assert Architecture.of(kinds).rope == before


def test_plain_has_a_transform_a_cached_layer() -> None:
    config = Gemma3TextConfig(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1, head_dim=96)
    for rotation in ("hadamard", "none"):
        plain = Artifact.plain(config, rotation)  # type: ignore[arg-type]
        plain.validate()
        plain.check_model(config)
        assert sorted(plain.layers) == [0, 1, 2]
        assert plain.layers[0].k_rotation.shape == (1, 96, 96)
        assert plain.config.rotation == rotation
        assert plain.for_bits(4, 2).config.k_bits == 4
    with pytest.raises(ArtifactError, match="allowed"):
        Artifact.plain(config, "random")  # type: ignore[arg-type]


def test_cached_layers_leave_out_linear_attention() -> None:
    types = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
    assert replace(Architecture.of(llama()), layers=4, layer_types=tuple(types)).cached_layers() == [1, 3]


def model_folder(path: Path, fill: float) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    save_file({"model.layers.0.self_attn.k_proj.weight": torch.full((16, 4), fill)}, path / "model.safetensors")
    return path


def test_other_weights_of_the_same_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fine-tuned model keeps its base's name in its configuration, and wants a calibration of its own."""
    from oscar_serving.calibration.architecture import weights_digest

    base, tuned = model_folder(tmp_path / "base", 1.0), model_folder(tmp_path / "tuned", 2.0)
    (tuned / "config.json").write_text('{"_name_or_path": "maker/base"}')
    shelf = tmp_path / "shelf"
    artifact(id="base", weights_digest=weights_digest(base)).save(shelf / "a")
    monkeypatch.setenv("OSCAR_ARTIFACTS", str(shelf))
    assert find_artifact(base) == shelf / "a"
    with pytest.raises(ArtifactError, match="no calibration artifact for tuned"):
        find_artifact(tuned)
    with pytest.raises(ArtifactError, match=r"made for other weights, those of base .*oscar calibrate"):
        find_artifact(tuned, shelf / "a")


def test_an_unreadable_artifact_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, shelf = model_folder(tmp_path / "one", 1.0), tmp_path / "shelf"
    (shelf / "a").mkdir(parents=True)
    (shelf / "a" / "oscar.safetensors").write_bytes(b"nonsense")
    artifact(id="one").save(shelf / "b")
    monkeypatch.setenv("OSCAR_ARTIFACTS", str(shelf))
    assert find_artifact(one) == shelf / "b"
    with pytest.raises(ArtifactError, match=r"no calibration artifact for other .*oscar.safetensors"):
        find_artifact(model_folder(tmp_path / "other", 2.0))


@pytest.mark.parametrize("metadata", [None, [], {"model": "m"}])
def test_a_header_that_does_not_name_its_model_is_refused(tmp_path: Path, metadata: object) -> None:
    model, file = model_folder(tmp_path / "one", 1.0), artifact().save(tmp_path / "a")
    header = {"format_version": FORMAT_VERSION, "metadata": metadata}
    save_file(load_file(file), file, metadata={FORMAT: json.dumps(header)})
    with pytest.raises(ArtifactError, match="damaged header"):
        find_artifact(model, file)


def test_find_by_name_weights_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_serving.calibration.architecture import weights_digest

    one, other = model_folder(tmp_path / "one", 1.0), model_folder(tmp_path / "other", 2.0)
    assert weights_digest(one) != weights_digest(other)
    with pytest.raises(ArtifactError, match="no calibration artifact for one"):
        find_artifact(one)
    shelf = tmp_path / "shelf"
    artifact(id="else", weights_digest=weights_digest(other)).save(shelf / "b")
    artifact(id="ONE").save(shelf / "a")
    monkeypatch.setenv("OSCAR_ARTIFACTS", str(shelf))
    assert find_artifact(one) == shelf / "a"
    assert find_artifact(other) == shelf / "b"
    assert find_artifact(other, shelf / "b") == shelf / "b"
    assert find_artifact(other, shelf / "a") == shelf / "a"  # it does not know its weights
    artifact(id="one").save(one)
    assert find_artifact(one) == one
    with pytest.raises(ArtifactError, match="no such artifact"):
        find_artifact(one, tmp_path / "nowhere")
    monkeypatch.setenv("OSCAR_ARTIFACTS", str(tmp_path / "nowhere"))
    with pytest.raises(ArtifactError, match="not a folder"):
        find_artifact(other)

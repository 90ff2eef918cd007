"""``calibrate`` from a model folder: texts, resuming, refusals, what the artifact says about itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oscar_serving.calibration import Artifact, ArtifactError, find_artifact
from oscar_serving.calibration.inspect import describe
from oscar_serving.calibration.run import STATE_FILE, calibrate, collect
from oscar_serving.calibration.texts import TextError, docstrings, generated, sequences
from oscar_serving.config import ConfigError, OscarConfig
from tests.calibration.tiny import tiny_folder, tiny_model, tiny_tokens

CONFIG = OscarConfig(sink=4, recent=8, scale_dtype="float8_e4m3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("run") / "tiny", "llama")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("".join(f"Line {i} of a book about nothing much.\n" for i in range(80)))
    return path


def test_calibrate_writes_an_artifact_that_is_found(tmp_path: Path, model: Path, text: Path) -> None:
    out = tmp_path / "out"
    calibrate(model, out, texts=[text], tokens=480, sequence_length=60, config=CONFIG, command="oscar calibrate")
    artifact = Artifact.load(out)
    calibration = artifact.metadata["calibration"]
    assert calibration["tokens"] == 600
    assert calibration["fit_tokens"] == 480
    assert calibration["texts"][0]["name"] == "book.txt"
    assert artifact.model_id == "tiny"
    assert [p.name for p in out.iterdir()] == ["oscar.safetensors"]
    with pytest.raises(ArtifactError, match="no calibration artifact"):
        find_artifact(model)
    assert find_artifact(model, out) == out
    told = describe(artifact)
    for word in ("tiny", "llama", "book.txt", "600 tokens", "oscar calibrate", artifact.fingerprint, "float8_e4m3"):
        assert word in told, told


def test_the_same_run_gives_the_same_artifact(tmp_path: Path, model: Path, text: Path) -> None:
    prints = set()
    for name in ("a", "b"):
        calibrate(model, tmp_path / name, texts=[text], tokens=240, sequence_length=60, config=CONFIG)
        prints.add(Artifact.load(tmp_path / name).fingerprint)
    assert len(prints) == 1


def test_an_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_serving.calibration.run._SAVE_SECONDS", 0.0)
    tiny, tokens, state = tiny_model("qwen3"), tiny_tokens(4, 40), tmp_path / STATE_FILE
    whole = collect(tiny, tokens, CONFIG)

    class Stopped(Exception):
        pass

    def stop(stage: str, done: int, total: int) -> None:
        if done == 3:
            raise Stopped

    with pytest.raises(Stopped):
        collect(tiny, tokens, CONFIG, state=state, progress=stop)
    steps: list[int] = []
    resumed = collect(tiny, tokens, CONFIG, state=state, progress=lambda stage, done, total: steps.append(done))
    assert steps == [3, 4]
    for layer, sums in whole.items():
        for name, value in sums.state().items():
            assert torch.equal(resumed[layer].state()[name], value), name
    steps.clear()  # other tokens: the state does not count
    collect(
        tiny, tiny_tokens(4, 40, seed=9), CONFIG, state=state, progress=lambda stage, done, total: steps.append(done)
    )
    assert steps[0] == 0
    state.write_bytes(state.read_bytes()[:100])
    steps.clear()
    collect(tiny, tokens, CONFIG, state=state, progress=lambda stage, done, total: steps.append(done))
    assert steps[0] == 0


def test_an_interrupted_run_of_another_model_is_not_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tuned model has the architecture and the tokens of its base, and other moments."""
    monkeypatch.setattr("oscar_serving.calibration.run._SAVE_SECONDS", 0.0)
    base, tuned, tokens, state = tiny_model("llama"), tiny_model("llama"), tiny_tokens(3, 40), tmp_path / STATE_FILE
    tuned.model.layers[1].self_attn.v_proj.weight.data[0] *= 1.5
    collect(base, tokens, CONFIG, state=state)
    sums = collect(tuned, tokens, CONFIG, state=state)
    assert torch.equal(sums[1].vv, collect(tuned, tokens, CONFIG)[1].vv)
    assert [p.name for p in tmp_path.iterdir()] == [STATE_FILE]


def test_a_folder_that_cannot_be_written_is_known_before_the_work(
    tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_serving.calibration.run.calibrate_model", None)
    with pytest.raises(ArtifactError, match=r"book\.txt.out: the artifact cannot be written there"):
        calibrate(model, text / "out", texts=[text], tokens=240, sequence_length=60, config=CONFIG)


def test_self_generation_is_mixed_in(tmp_path: Path, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_serving.calibration.texts._TURN_TOKENS", 16)
    options = {"tokens": 240, "sequence_length": 60, "config": CONFIG, "self_generate": True}
    calibrate(model, tmp_path / "both", texts=[text], **options)  # type: ignore[arg-type]
    calibrate(model, tmp_path / "own", **options)  # type: ignore[arg-type]
    both, own = (Artifact.load(tmp_path / n).metadata["calibration"]["texts"] for n in ("both", "own"))
    assert [t["name"].split()[0] for t in both] == ["book.txt", "generated"]
    assert [t["name"].split()[0] for t in own] == ["generated"]
    assert own[0]["tokens"] == 300


def test_generation_depends_on_the_seed_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_serving.calibration.texts._TURN_TOKENS", 16)
    from oscar_serving.calibration.run import load_model

    loaded, tokenizer = load_model(model, device="cpu", dtype="auto")
    rows = [generated(loaded, tokenizer, 100, 50, seed=s, progress=lambda *_: None)[0] for s in (0, 0, 1)]
    assert torch.equal(torch.stack(rows[0]), torch.stack(rows[1]))
    assert not torch.equal(torch.stack(rows[0]), torch.stack(rows[2]))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"preset": "best"}, ConfigError, "preset='best'"),
        ({"tokens": 0}, ConfigError, "tokens=0"),
        ({"device": "tpu"}, ConfigError, "device='tpu'"),
        ({"config": OscarConfig(group_size=24)}, ConfigError, "group_size=24"),
        ({"texts": ["nowhere.txt"]}, TextError, "nowhere.txt: No such file"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, model: Path, options: dict, error: type, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(error, match=message):
        calibrate(model, tmp_path / "out", **{"tokens": 100, "sequence_length": 50, **options})
    assert not (tmp_path / "out").exists()


def test_bad_texts_and_models_are_refused(tmp_path: Path, model: Path) -> None:
    for name, data, message in (
        ("a", b"\xff\xfe", "not UTF-8"),
        ("b", b" \n", "is empty"),
        ("c", b"abc", "hold 3 tokens"),
    ):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(TextError, match=message):
            calibrate(model, tmp_path / "out", texts=[tmp_path / name])
    with pytest.raises(ArtifactError, match=r"no config\.json"):
        calibrate(tmp_path, tmp_path / "out")


class Words:
    """A tokenizer that gives each character its code, after a beginning-of-sequence token."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Words:
        self.input_ids = [1] * add_special_tokens + [ord(c) for c in text]
        return self


def test_sequences_share_texts_evenly_and_start_with_bos() -> None:
    found, sources = sequences(Words(), [("a", "a" * 100 + "b" * 100), ("c", "c" * 200)], tokens=40, length=11)
    assert [len(s) for s in found] == [11] * 4
    assert [s[0].item() for s in found] == [1] * 4
    assert ["".join(map(chr, s[1:3].tolist())) for s in found] == ["aa", "bb", "cc", "cc"]
    assert [s.tokens for s in sources] == [20, 20]
    short, _ = sequences(Words(), [("a", "abc")], tokens=100, length=50)
    assert [s.tolist() for s in short] == [[1, 97, 98, 99]]


def test_docstrings_are_plenty_and_always_the_same() -> None:
    text = docstrings()
    assert len(text) > 300_000
    assert text == docstrings()

"""The whole evaluation on a tiny model, and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oscar_serving.calibration import Artifact
from oscar_serving.evaluation.configuration import Configuration, baselines, bf16, calibrated, parse, plain
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError
from oscar_serving.evaluation.run import evaluate
from oscar_serving.evaluation.storage import ExactStorage, OscarStorage
from oscar_serving.evaluation.texts import read_texts, sequences
from tests.engine.tiny import CONFIGS, byte_tokenizer, tiny_model


@pytest.fixture(scope="module")
def judged() -> EvaluatedModel:
    return EvaluatedModel(tiny_model("llama"), byte_tokenizer(), "tiny <llama>")


def test_evaluation_and_report(judged: EvaluatedModel, tmp_path: Path):
    chosen = [
        Configuration("exact", ExactStorage(torch.float32)),
        *baselines(judged.config, plain("x", judged.config, "none", sink=4, recent=16).storage.config),
    ]
    told: list[tuple[str, int, int]] = []
    report = evaluate(judged, chosen, (), tmp_path, sequences=3, tokens=300, progress=lambda *step: told.append(step))
    kld = {r.configuration.name: r.overall["kld_mean"]["value"] for r in report.results}
    assert kld["exact"] == 0
    assert 0 < kld["BF16"] < kld["INT4 Hadamard"] < kld["INT2 Hadamard"]
    assert kld["FP8"] < kld["INT4 Hadamard"]
    assert report.result("exact").overall["top1"]["value"] == 1
    assert list(report.result("exact").by_context) == ["1-256", "257-300"]
    assert told[-1][1:] == (21, 21)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)

    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert content["sequences"] == 3
    assert [c["name"] for c in content["configurations"]][:2] == ["exact", "BF16"]
    assert content["configurations"][5]["cache"]["recent"] == 16
    assert content["sources"][0]["name"] == "devils-dictionary.txt"
    page = (tmp_path / "report.html").read_text()
    assert "INT2 Hadamard" in page
    assert "tiny &lt;llama&gt;" in page
    assert "http" not in page.replace("http-equiv", "")  # nothing is loaded from elsewhere
    for name in ("context.png", "bits.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_logits_in_chunks_give_the_same(judged: EvaluatedModel, monkeypatch: pytest.MonkeyPatch):
    chosen = [plain("a", judged.config, "hadamard", sink=4, recent=16)]
    whole = evaluate(judged, chosen, (), sequences=2, tokens=80).results[0].overall
    monkeypatch.setattr("oscar_serving.evaluation.run._LOGIT_ELEMENTS", 257 * 7)
    parts = evaluate(judged, chosen, (), sequences=2, tokens=80).results[0].overall
    assert parts["kld_mean"]["value"] == pytest.approx(whole["kld_mean"]["value"], rel=1e-4)


def test_an_interrupted_run_goes_on(judged: EvaluatedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first, second = (plain(n, judged.config, n, sink=4, recent=16) for n in ("hadamard", "none"))
    computed: list[int] = []
    real = EvaluatedModel.sequence_hidden

    def counted(self, tokens, storage):
        computed.append(id(storage))
        if len(computed) == 4:
            raise KeyboardInterrupt
        return real(self, tokens, storage)

    monkeypatch.setattr(EvaluatedModel, "sequence_hidden", counted)
    with pytest.raises(KeyboardInterrupt):
        evaluate(judged, [first], (), sequences=2, tokens=80, state=tmp_path)
    both = evaluate(judged, [first, second], (), sequences=2, tokens=80, state=tmp_path)
    # 4 until the interruption, then the second configuration of one sequence and both of the other, and references.
    assert computed.count(id(first.storage)) == 2 + 1  # the one that was interrupted
    assert computed.count(id(second.storage)) == 2
    monkeypatch.undo()
    fresh = evaluate(judged, [first, second], (), sequences=2, tokens=80)
    for a, b in zip(both.results, fresh.results, strict=True):
        assert a.overall == b.overall
        assert a.tokens_per_second
    with monkeypatch.context() as patch:
        patch.setattr(EvaluatedModel, "sequence_hidden", None)  # nothing is computed
        assert evaluate(judged, [second], (), sequences=2, tokens=80, state=tmp_path).results[0].overall == (
            fresh.results[1].overall
        )


def test_every_third_position_of_the_first_sequences(judged: EvaluatedModel, tmp_path: Path):
    chosen = [plain("a", judged.config, "none", sink=4, recent=16)]
    whole = evaluate(judged, chosen, (), sequences=3, tokens=300, limit=2, state=tmp_path)
    third = evaluate(judged, chosen, (), sequences=3, tokens=300, limit=2, stride=3, state=tmp_path)
    assert whole.sequences == third.sequences == 2
    assert whole.results[0].overall["positions"] == 600
    assert third.results[0].overall["positions"] == 200
    assert [c["positions"] for c in third.results[0].by_context.values()] == [2 * 86, 2 * 14]
    few, all_ = (r.results[0].overall["kld_mean"]["value"] for r in (third, whole))
    assert few == pytest.approx(all_, rel=0.3)
    assert few != all_
    with pytest.raises(EvaluationError, match="stride=0"):
        evaluate(judged, chosen, (), stride=0)


def test_what_cannot_be_evaluated(judged: EvaluatedModel):
    with pytest.raises(EvaluationError, match="distinct"):
        evaluate(judged, [bf16(), bf16()], ())
    with pytest.raises(EvaluationError, match="at most 2048"):
        evaluate(judged, [bf16()], (), tokens=4096)
    with pytest.raises(EvaluationError, match="3 sequences of 101 tokens"):
        evaluate(judged, [bf16()], [("short", "x" * 350)], sequences=5, tokens=100)


def test_sequences_are_spread_over_the_texts():
    tokenizer = byte_tokenizer()
    found, sources = sequences(tokenizer, [("a", "a" * 1000), ("b", "b" * 1000)], count=4, tokens=99)
    assert [len(s) for s in found] == [100] * 4
    assert [chr(s[0]) for s in found] == ["a", "b", "a", "b"]
    assert [s.name for s in sources] == ["a", "b"]


def test_the_sample_is_prose():
    (name, text), = read_texts([])  # fmt: skip
    assert name == "devils-dictionary.txt"
    assert 100_000 < len(text.encode()) <= 200_000


def test_short_forms():
    model, config = Path("m"), CONFIGS["llama"]
    assert parse("bf16", model, config).name == "bf16"
    made = parse("wide=hadamard,recent=512,sink=128,k_bits=4,shrink=0.7,layers=0-1:4/4", model, config)
    assert made.name == "wide"
    assert isinstance(made.storage, OscarStorage)
    assert (made.storage.config.recent, made.storage.config.sink, made.storage.config.k_bits) == (512, 128, 4)
    assert made.storage.layer_bits == {0: (4, 4), 1: (4, 4)}
    assert made.storage.artifact.layers[0].k_shrink.tolist() == pytest.approx([0.7, 0.7])
    clipped = parse("none,quantile=0.96/0.92,levels=lloyd_max", model, config).storage
    assert isinstance(clipped, OscarStorage)
    assert clipped.quantile_clip == (0.96, 0.92)
    assert clipped.config.levels == "lloyd_max"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hadamard,colour=red", "unknown field 'colour'"),
        ("hadamard,recent=many", "cannot read 'recent=many'"),
        ("hadamard,k_bits=3", "k_bits=3"),
        ("bf16,recent=4", "bf16 has no options"),
        ("hadamard,layers=0:2", "cannot read"),
        ("nowhere/at/all", "no such artifact"),
    ],
)
def test_short_forms_that_are_wrong(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse(text, Path("m"), CONFIGS["llama"])


def test_an_artifact_by_path(tmp_path: Path):
    config = CONFIGS["llama"]
    artifact = Artifact.plain(config)
    artifact.save(tmp_path)
    made = parse(f"mine={tmp_path},recent=32", Path("m"), config)
    assert isinstance(made.storage, OscarStorage)
    assert made.storage.config.recent == 32
    with pytest.raises(ValueError, match="head_dim: artifact 16, model 80"):
        parse(str(tmp_path), Path("m"), CONFIGS["llama-mha-80"])
    with pytest.raises(EvaluationError, match="shrink is calibrated"):
        parse(f"{tmp_path},shrink=0.5", Path("m"), config)
    with pytest.raises(EvaluationError, match="calibrate one for this group size"):
        calibrated("x", artifact, group_size=8)

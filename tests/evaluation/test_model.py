"""The model that reads through a simulated cache."""

from __future__ import annotations

import pytest
import torch

from oscar_serving.evaluation.configuration import bf16, fp8, plain
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError, SimulatedCache
from oscar_serving.evaluation.storage import ExactStorage
from tests.engine.tiny import CONFIGS, byte_tokenizer, tiny_model

FAMILIES = sorted(CONFIGS)


def evaluated(family: str) -> EvaluatedModel:
    return EvaluatedModel(tiny_model(family), byte_tokenizer(), family)


def tokens(count: int = 90) -> torch.Tensor:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exact_cache_gives_the_models_own_logits(family: str):
    judged = evaluated(family)
    own = judged.model(input_ids=tokens()[None], use_cache=False).logits[0].float()
    through = judged.logits(judged.sequence_hidden(tokens(), ExactStorage(torch.float32)))
    assert torch.allclose(through, own, rtol=1e-3, atol=1e-3 * float(own.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_give_what_the_whole_gives(family: str):
    judged = evaluated(family)
    for made in (
        plain("q", judged.config, "hadamard", sink=4, recent=16), bf16(), fp8(judged.config),
    ):  # fmt: skip
        whole = judged.sequence_hidden(tokens(), made.storage)
        cache = SimulatedCache(made.storage, growing=True)
        ids = tokens()
        parts = [judged.extend(ids[a:b], cache) for a, b in ((0, 40), (40, 41), (41, 42), (42, 90))]
        assert cache.length == 90
        # A rounding difference may move one code to its neighbour.
        assert torch.allclose(torch.cat(parts), whole, atol=0.05 * float(whole.abs().max())), made.name


def test_buffers_that_grow_keep_what_they_hold(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("oscar_serving.evaluation.model._GROWTH", 8)
    judged = evaluated("llama")
    for made in (plain("q", judged.config, "hadamard", sink=4, recent=16), bf16()):
        whole = judged.sequence_hidden(tokens(), made.storage)
        cache = SimulatedCache(made.storage, growing=True)
        parts = [judged.extend(piece, cache) for piece in tokens().split(7)]
        assert torch.allclose(torch.cat(parts), whole, atol=0.05 * float(whole.abs().max())), made.name


def test_truncating_forgets():
    judged = evaluated("llama")
    storage = plain("q", judged.config, "hadamard", sink=4, recent=16).storage
    cache = SimulatedCache(storage, growing=True)
    ids = tokens()
    judged.extend(ids[:50], cache)
    first = judged.extend(ids[50:60], cache)
    cache.truncate(50)
    judged.extend(tokens(300)[200:260], cache)
    cache.truncate(50)
    assert torch.equal(judged.extend(ids[50:60], cache), first)
    with pytest.raises(EvaluationError, match="truncate"):
        cache.truncate(61)


def test_windows_keep_early_positions_exact():
    judged = evaluated("llama")
    exact = judged.sequence_hidden(tokens(), ExactStorage(torch.float32))
    made = plain("q", judged.config, "none", sink=8, recent=24, window_dtype="float32")
    rough = judged.sequence_hidden(tokens(), made.storage)
    difference = (exact - rough).abs().amax(-1)
    # The query at position 32 is the first that reads a code: position 8 has left the recent 24.
    assert float(difference[:32].max()) < 1e-3
    assert float(difference[40:].min()) > 1e-2


def test_a_head_that_is_not_known_is_refused():
    model = tiny_model("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 3
        return out

    model.forward = scaled
    with pytest.raises(EvaluationError, match="logits"):
        EvaluatedModel(model, byte_tokenizer())


def test_the_model_is_left_as_it_was():
    judged = evaluated("llama")
    before = judged.model.config._attn_implementation
    judged.sequence_hidden(tokens(), ExactStorage())
    assert judged.model.config._attn_implementation == before

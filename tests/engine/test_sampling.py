"""Sampling against plain definitions: candidates, penalties, seeds, log-probabilities."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.engines.hf.params import RequestError, SamplingParams
from oscar_serving.engines.hf.sampling import SamplerState, sample, token_logprobs

VOCAB = 300


def state(seed: int = 1, prompt: tuple[int, ...] = (), **params: Any) -> SamplerState:
    return SamplerState(SamplingParams(**params), prompt, vocab_size=VOCAB, seed=seed)


def draws(logits: torch.Tensor, count: int, **params: Any) -> Counter[int]:
    one = state(**params)
    return Counter(sample(logits[None], [one])[0] for _ in range(count))  # type: ignore[misc]


def logits_of(seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [7, 9]] = 2.0
    assert sample(logits, [state(temperature=0.0)]) == [7]


def test_draws_follow_the_distribution() -> None:
    logits = torch.full((VOCAB,), -torch.inf)
    logits[[3, 5, 8]] = torch.tensor([0.0, math.log(2.0), math.log(5.0)])
    got = draws(logits, 4000)
    assert set(got) == {3, 5, 8}
    for token, share in ((3, 1 / 8), (5, 2 / 8), (8, 5 / 8)):
        assert abs(got[token] / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)
    hot = draws(logits, 4000, temperature=0.5)
    assert abs(hot[8] / 4000 - 25 / 30) < 0.03


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 20]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
    scale=st.sampled_from([0.01, 3.0]),  # nearly uniform: the nucleus is larger than the first candidates looked at
)
def test_only_allowed_candidates_are_drawn(seed: int, top_k: int, top_p: float, min_p: float, scale: float) -> None:
    logits = logits_of(seed, scale)
    probability = torch.softmax(logits.double(), 0)
    order = probability.argsort(descending=True).tolist()
    allowed = order[: top_k or VOCAB]
    total, mass, nucleus = float(probability[allowed].sum()), 0.0, []
    for token in allowed:
        nucleus.append(token)
        mass += float(probability[token])
        if mass >= top_p * total * (1 - 1e-9):
            break
    allowed = nucleus if top_p < 1 else allowed
    best = float(probability.max())
    candidates = {t for t in allowed if float(probability[t]) >= min_p * best}
    got = draws(logits, 60, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    assert set(got) <= candidates
    if len(candidates) <= 2:
        assert candidates == set(draws(logits, 300, top_k=top_k, top_p=top_p, min_p=min_p))


def test_a_request_draws_the_same_alone_or_in_a_batch() -> None:
    rows = torch.stack([logits_of(s) for s in range(6)])
    alone = [[sample(rows[i : i + 1], [one])[0] for _ in range(5)] for i in range(6) for one in [state(seed=i)]]
    batch = [state(seed=i) for i in range(6)]
    together = [sample(rows, batch) for _ in range(5)]
    assert [list(column) for column in zip(*together, strict=True)] == alone
    assert len({tuple(a) for a in alone}) > 1


def test_penalties_and_bias() -> None:
    logits = torch.zeros(VOCAB)
    logits[[10, 11, 12, 13]] = torch.tensor([2.0, -2.0, 3.0, 1.0])
    one = state(
        prompt=(10, 11),
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={13: 7.0},
    )
    one.record(12)
    one.record(12)
    got = one.penalise(logits)
    assert got[[10, 11, 13]].tolist() == [1.0, -4.0, 8.0]  # prompt tokens: repetition only
    assert got[12].item() == 3.0 / 2.0 - 0.5 - 2 * 0.25
    assert got[20].item() == 0.0
    assert logits[10].item() == 2.0  # the input is untouched
    banned = state(temperature=0.0, logit_bias={12: -100.0})
    assert sample(logits[None], [banned]) == [10]


def test_recording_happens_on_sampling() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 5]] = torch.tensor([1.0, 0.9])
    one = state(temperature=0.0, presence_penalty=0.5)
    assert [sample(logits, [one])[0] for _ in range(2)] == [4, 5]


def test_logprobs_are_raw_and_rounded_alike() -> None:
    logits = torch.stack([logits_of(s) for s in range(70)]).bfloat16()  # more rows than are done at a time
    tokens = logits.argmax(-1).tolist()
    entries = token_logprobs(logits, tokens, [row % 4 for row in range(70)])
    expected = torch.log_softmax(logits.float(), -1)
    for row, entry in enumerate(entries):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(float(expected[row, tokens[row]]), abs=1e-6)
        assert len(entry.top) == row % 4
        if entry.top:
            assert entry.top[0][1] == entry.logprob  # exactly
            assert [v for _, v in entry.top] == sorted((v for _, v in entry.top), reverse=True)


def test_a_row_with_nan_gives_no_token_and_leaves_the_others_alone() -> None:
    rows = torch.stack([logits_of(0), logits_of(1), logits_of(2)])
    rows[1, 17] = torch.nan
    for temperature in (0.0, 1.0):
        got = sample(rows, [state(temperature=temperature) for _ in range(3)])
        assert got[1] is None
        assert got[0] is not None
        assert got[2] is not None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1), ("max_tokens", 1.5), ("temperature", -0.1), ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.1), ("top_k", -2), ("min_p", 2.0), ("seed", 2**64), ("seed", True), ("stop", ("",)),
        ("stop_token_ids", (-1,)), ("logprobs", 101), ("prompt_logprobs", -1), ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0), ("frequency_penalty", -2.5), ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
    ],
)  # fmt: skip
def test_bad_parameters_are_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})
    assert caught.value.code == "invalid_parameter"
    assert caught.value.param == field

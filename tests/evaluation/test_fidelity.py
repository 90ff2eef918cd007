"""Metrics on distributions whose answers are known."""

from __future__ import annotations

import math

import pytest
import torch

from oscar_serving.evaluation.fidelity import Estimate, TokenFidelity, buckets, compare, concatenate, summarize


def test_compare_on_two_choices():
    reference = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    got = compare(reference, other, torch.tensor([0, 1]))
    assert got.kld[0].item() == pytest.approx(0.5 * math.log(3))  # .75 ln 3 - .25 ln 3
    assert got.kld[1].item() == 0
    assert got.agrees.tolist() == [0, 1]
    assert got.nll[0].item() == pytest.approx(math.log(4))
    assert got.reference_nll[0].item() == pytest.approx(math.log(4 / 3))


def test_compare_agrees_with_torch():
    reference, other = torch.randn(2, 20, 300).log_softmax(-1).unbind()
    got = compare(reference, other, torch.zeros(20, dtype=torch.long))
    expected = torch.nn.functional.kl_div(other, reference, reduction="none", log_target=True).sum(-1)
    assert torch.allclose(got.kld, expected, atol=1e-5)


def test_estimates():
    assert Estimate.of([1.0, 3.0]) == Estimate(2.0, 1.0)
    assert Estimate.of([5.0]).to_dict() == {"value": 5.0, "error": None}


def test_summary_of_known_values():
    kld = torch.arange(1000).float()
    one = TokenFidelity(kld, torch.ones(1000), torch.full((1000,), 2.0), torch.full((1000,), 2.0 + math.log(1.1)))
    two = TokenFidelity(kld + 2, torch.zeros(1000), one.reference_nll, one.nll)
    got = summarize([one, two])
    assert got["positions"] == 2000
    assert got["kld_mean"]["value"] == pytest.approx(500.5)
    assert got["kld_mean"]["error"] == pytest.approx(1.0)
    assert got["kld_median"] == pytest.approx(500, abs=1)
    assert got["kld_tail"] == pytest.approx(999, abs=1)
    assert got["top1"]["value"] == 0.5
    assert got["perplexity_change"]["value"] == pytest.approx(0.1, abs=1e-6)
    assert got["perplexity_change"]["error"] == pytest.approx(0, abs=1e-6)
    assert got["reference_perplexity"] == pytest.approx(math.exp(2))
    assert summarize([one, two], 10, 20)["kld_mean"]["value"] == pytest.approx(15.5)


def test_buckets_cover_every_position_once():
    assert buckets(2048) == [(0, 256), (256, 512), (512, 1024), (1024, 2048)]
    assert buckets(700) == [(0, 256), (256, 512), (512, 700)]
    assert buckets(100) == [(0, 100)]


def test_concatenation_keeps_order():
    part = TokenFidelity(*(torch.tensor([float(i)]) for i in range(4)))
    joined = concatenate([part, part])
    assert [t.tolist() for t in joined] == [[0, 0], [1, 1], [2, 2], [3, 3]]

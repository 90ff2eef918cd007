"""Endpoint and simulated cache: both answer alike, since both read the history by the position rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from oscar_serving.engines.hf import Engine
from oscar_serving.evaluation.configuration import bf16, plain
from oscar_serving.evaluation.drift import DriftResult, drift
from oscar_serving.evaluation.endpoint import EndpointClient
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError
from oscar_serving.evaluation.multiturn import multiturn
from oscar_serving.evaluation.needles import needles
from oscar_serving.evaluation.served_fidelity import _position, served_fidelity
from oscar_serving.evaluation.simulated import SimulatedClient
from tests.server.conftest import serve

PROMPTS = [("abcdefgh " * 40)[: 150 + 31 * i] + str(i) for i in range(4)]


@pytest.fixture(scope="module")
def judged(model_folder: Path) -> EvaluatedModel:
    return EvaluatedModel.load(model_folder)


@pytest.fixture(scope="module")
def rule(load: Callable[..., Engine]) -> Iterator[EndpointClient]:
    """A server on a Hadamard INT2 cache in mode ``rule``."""
    with serve(load(prefill_mode="rule")) as running:
        client = EndpointClient(running.url + "/v1", name="served")
        yield client
        client.close()


@pytest.fixture(scope="module")
def exact(load: Callable[..., Engine]) -> Iterator[EndpointClient]:
    """A server on a BF16 cache."""
    with serve(load(kv_cache_dtype="bf16")) as running:
        client = EndpointClient(running.url + "/v1")
        yield client
        client.close()


def simulated(judged: EvaluatedModel) -> SimulatedClient:
    return SimulatedClient(judged, plain("simulated", judged.config, "hadamard", sink=16, recent=32))


def test_the_simulation_says_what_the_server_says(judged: EvaluatedModel, rule: EndpointClient):
    mine = simulated(judged)
    agree = 0
    for prompt in PROMPTS:
        served, local = (c.complete(prompt, max_tokens=24) for c in (rule, mine))
        assert served.prompt_tokens == local.prompt_tokens == len(mine.encode(prompt)) == len(rule.encode(prompt))
        assert served.tokens == local.tokens
        # The tiny model's bytes are no valid UTF-8; a decoder that works in steps replaces runs of them differently.
        agree += served.text.replace("\ufffd", "") == local.text.replace("\ufffd", "")
    # Rounding may tip one near tie.
    assert agree >= len(PROMPTS) - 1
    rough = SimulatedClient(judged, plain("none", judged.config, "none", sink=0, recent=1))
    assert [rough.complete(p, max_tokens=24).text for p in PROMPTS] != [
        mine.complete(p, max_tokens=24).text for p in PROMPTS
    ]


def test_chat_of_both(judged: EvaluatedModel, rule: EndpointClient):
    messages = [{"role": "user", "content": "tell me about " + "rivers " * 20}]
    served, local = (c.chat(messages, max_tokens=12) for c in (rule, simulated(judged)))
    assert served.text == local.text
    assert served.prompt_tokens == local.prompt_tokens


def test_a_prefix_is_kept_and_changes_nothing(judged: EvaluatedModel):
    warm, cold = simulated(judged), simulated(judged)
    warm.complete(PROMPTS[3], max_tokens=5)
    again = warm.complete(PROMPTS[3] + " and more", max_tokens=20)
    assert again.cached_tokens >= len(warm.encode(PROMPTS[3]))
    fresh = cold.complete(PROMPTS[3] + " and more", max_tokens=20)
    assert (again.text, fresh.cached_tokens) == (fresh.text, 0)
    warm.forget()
    assert warm.complete(PROMPTS[0], max_tokens=1).cached_tokens == 0


def test_stop_strings_and_sampling(judged: EvaluatedModel):
    client = SimulatedClient(judged, bf16())
    whole = client.complete(PROMPTS[0], max_tokens=20)
    assert not whole.finished
    cut = client.complete(PROMPTS[0], max_tokens=20, stop=[whole.text[5:7]])
    assert cut.finished
    assert whole.text.startswith(cut.text)
    assert whole.text[5:7] not in cut.text
    drawn = [client.complete(PROMPTS[0], max_tokens=20, temperature=1.5, seed=s).text for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(EvaluationError, match="at most 2048 together"):
        client.complete(PROMPTS[0], max_tokens=4000)


def test_endpoint_errors(rule: EndpointClient):
    with pytest.raises(EvaluationError, match="answered 400"):
        rule.complete("x", max_tokens=10**6)
    with pytest.raises(EvaluationError, match=r"127\.0\.0\.1:9"):
        EndpointClient("http://127.0.0.1:9/v1", "m").complete("x", max_tokens=1)


def test_needles_find_what_a_copying_client_finds():
    result = needles(_Copier(), _FILLER, lengths=[300, 600], depths=[0.2, 0.8], texts=2, keys=5)
    assert result.accuracy() == (1.0, 0.0)
    assert {cell: asked for cell, (_, asked) in result.cells.items()} == {
        (300, 0.2): 2, (300, 0.8): 2, (600, 0.2): 2, (600, 0.8): 2,
    }  # fmt: skip
    lost = needles(_Copier(reach=1500), _FILLER, lengths=[300, 1200], depths=[0.1, 0.9], texts=2)
    assert lost.cells[300, 0.1] == (2, 2)
    assert lost.cells[1200, 0.1] == (0, 2)
    assert lost.cells[1200, 0.9] == (2, 2)
    assert lost.accuracy(1200) == (0.5, 0.25)
    lengths = [len(_Copier.asked[0]), len(_Copier.asked[-1])]
    assert 0.8 * 300 * 4 < lengths[0] <= 300 * 4 + 60
    with pytest.raises(EvaluationError, match="too short"):
        needles(_Copier(), _FILLER[:3000], lengths=[6000])
    with pytest.raises(EvaluationError, match="keys=1"):
        needles(_Copier(), _FILLER, keys=1)


def test_multiturn_through_a_server_hits_its_cache(rule: EndpointClient):
    result = multiturn(rule, _FILLER, conversations=2, turns=3, tokens_per_turn=60)
    content = result.to_dict()
    assert content["later_turns_with_hit"] == 1.0
    assert content["hit_rate_tokens"] > 0.5
    assert content["warm_equals_cold"] == 1.0
    assert content["asked"] == 6


def test_multiturn_counts_right_answers():
    result = multiturn(_Copier(), _FILLER, conversations=2, turns=4, tokens_per_turn=100)
    assert result.accuracy() == (1.0, 0.0)


def test_drift_between_two_servers(rule: EndpointClient, exact: EndpointClient):
    same = drift(exact, exact, PROMPTS, max_tokens=16)
    assert same.length_change.value == 0
    assert same.same_beginning.value == 1
    other = drift(exact, rule, PROMPTS, max_tokens=16, chat=True)
    assert isinstance(other, DriftResult)
    assert other.to_dict()["prompts"] == 4
    assert other.same_beginning.value < 1


def test_served_fidelity(rule: EndpointClient, exact: EndpointClient, model_folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    sequences = [torch.tensor(tokenizer(_FILLER[i * 400 : i * 400 + 300]).input_ids) for i in range(2)]
    nothing = served_fidelity(exact, exact, sequences, top=4)
    assert nothing["kld_mean"]["value"] < 1e-6
    assert nothing["top1"]["value"] == 1
    rough = served_fidelity(rule, exact, sequences, top=4)
    assert rough["kld_mean"]["value"] > 1e-3
    assert rough["perplexity"] != rough["reference_perplexity"]
    sampled = served_fidelity(rule, exact, sequences, top=4, mode="next", stride=40)
    assert sampled["positions"] == 2 * len(range(16, 300, 40))
    assert "perplexity" not in sampled
    assert sampled["kld_mean"]["value"] > 1e-4


def test_coarse_kld_is_a_lower_bound():
    reference, other = torch.randn(2, 50).log_softmax(-1).unbind()
    true = float((reference.exp() * (reference - other)).sum())
    told = [{str(i): float(p[i]) for i in p.topk(5).indices.tolist()} for p in (reference, other)]
    told[1] |= {str(i): float(other[i]) for i in map(int, told[0])}
    kld, _, _, _ = _position((None, told[0]), (None, told[1]))
    assert 0 <= kld <= true + 1e-6


class _Copier:
    """Answers a question by looking for its beginning in the last ``reach`` characters of the text."""

    name = "copier"
    asked: list[str] = []  # noqa: RUF012

    def __init__(self, reach: int = 10**9) -> None:
        self.reach = reach

    def encode(self, text: str) -> list[int]:
        return [0] * (len(text) // 4)

    def complete(self, prompt, *, max_tokens, stop=(), temperature=0.0, seed=0):
        from oscar_serving.evaluation.client import Completion

        self.asked.append(prompt)
        text, start = prompt[-self.reach :], prompt.rsplit("Answer: ", 1)[1]
        if start.endswith("has"):  # of a conversation: the fact has no article, the question names the thing
            item = prompt.rsplit("How many ", 1)[1].split()[0]
            before = text.split(f" {item}.", 1)[0]
            return Completion(" " + before.rsplit(" ", 1)[1] + f" {item}.", 4, True, 1, 0)
        start = start.replace("The special", "The special")
        found = text.find(start)
        answer = text[found + len(start) :].split(".")[0] if found >= 0 else " nothing"
        return Completion(answer + ".", 4, True, 1, 0)


_FILLER = " ".join(
    f"On the {n}th day the traveller walked past {n * 3} houses and wrote a letter about the weather."
    for n in range(200)
)

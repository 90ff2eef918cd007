"""``/v1/completions`` over HTTP."""

from __future__ import annotations

from .conftest import Served


def test_shape_and_usage(served: Served) -> None:
    answer = served.complete(prompt="hello", max_tokens=5, ignore_eos=True)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    [choice] = answer["choices"]
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 5, 10)


def test_sixteen_tokens_unless_told(served: Served) -> None:
    assert served.complete(prompt="hello", ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_prompt_in_its_four_forms(served: Served) -> None:
    texts = ["one", "two!"]
    ids = [served.client.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    alone = [served.complete(prompt=text)["choices"][0]["text"] for text in texts]
    assert alone[0] != alone[1]
    for prompt in (texts, ids):
        answer = served.complete(prompt=prompt)
        assert [choice["text"] for choice in answer["choices"]] == alone
        assert [choice["index"] for choice in answer["choices"]] == [0, 1]
        assert answer["usage"]["prompt_tokens"] == 7
    assert served.complete(prompt=ids[1])["choices"][0]["text"] == alone[1]


def test_n_choices_differ_and_follow_from_the_seed(served: Served) -> None:
    fields = {
        "prompt": ["a", "b"],
        "n": 3,
        "seed": 11,
        "temperature": 1.0,
        "max_tokens": 8,
        "ignore_eos": True,
    }
    first, second = served.complete(**fields), served.complete(**fields)
    texts = [choice["text"] for choice in first["choices"]]
    assert texts == [choice["text"] for choice in second["choices"]]
    assert len(set(texts)) == 6
    assert [choice["index"] for choice in first["choices"]] == list(range(6))
    assert first["usage"]["prompt_tokens"] == 2
    assert first["usage"]["completion_tokens"] == 48


def test_stop_string_is_cut_and_named(served: Served) -> None:
    whole = served.complete(prompt="abc", max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    stop = whole[5:8]
    [choice] = served.complete(prompt="abc", max_tokens=40, ignore_eos=True, stop=["\0\0\0", stop])["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_stop_token(served: Served) -> None:
    answer = served.complete(prompt="abc", max_tokens=9, ignore_eos=True, logit_bias={"65": 100})
    assert answer["choices"][0]["finish_reason"] == "length"
    [choice] = served.complete(prompt="abc", max_tokens=9, logit_bias={"65": 100}, stop_token_ids=[65])["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 65)


def test_logit_bias_and_penalties_reach_the_sampler(served: Served) -> None:
    forced = served.complete(prompt="abc", max_tokens=6, ignore_eos=True, logit_bias={"40": 100})
    letter = forced["choices"][0]["text"][0]
    assert forced["choices"][0]["text"] == letter * 6
    penalised = served.complete(
        prompt="abc", max_tokens=6, ignore_eos=True, logit_bias={"40": 3, "41": 2.9}, presence_penalty=2.0
    )
    assert penalised["choices"][0]["text"] != letter * 6


def test_logprobs(served: Served) -> None:
    [choice] = served.complete(prompt="abc", max_tokens=4, ignore_eos=True, logprobs=3)["choices"]
    scored = choice["logprobs"]
    assert len(scored["tokens"]) == len(scored["token_logprobs"]) == len(scored["text_offset"]) == 4
    for token, logprob, top in zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())  # greedy: exactly equal floats


def test_logprob_of_a_token_outside_the_top_is_reported_beside_it(served: Served) -> None:
    fields = {"prompt": "abc", "max_tokens": 1, "logprobs": 1, "logit_bias": {"40": 100}}
    scored = served.complete(**fields)["choices"][0]["logprobs"]
    [top], [token], [logprob] = scored["top_logprobs"], scored["tokens"], scored["token_logprobs"]
    assert len(top) == 2
    assert top[token] == logprob < max(top.values())  # the bias does not count as the model's opinion


def test_echo_scores_the_prompt_as_lm_evaluation_harness_asks(served: Served) -> None:
    ids = served.client.post("/tokenize", json={"prompt": "hello there"}).json()["tokens"]
    answer = served.complete(prompt=[ids, ids[:4]], max_tokens=1, logprobs=1, echo=True, seed=1234)
    for choice, prompt in zip(answer["choices"], (ids, ids[:4]), strict=True):
        scored = choice["logprobs"]
        assert len(scored["token_logprobs"]) == len(prompt) + 1
        assert scored["token_logprobs"][0] is None
        assert scored["top_logprobs"][0] is None
        assert all(logprob <= 0 for logprob in scored["token_logprobs"][1:])
        assert scored["token_logprobs"][-1] == max(scored["top_logprobs"][-1].values())
        assert scored["text_offset"] == [sum(map(len, scored["tokens"][:i])) for i in range(len(prompt) + 1)]
    assert answer["choices"][0]["text"].startswith("hello there")
    # The same prompt scored by continuing it token by token.
    continued = served.complete(prompt=ids[:4], max_tokens=1, logprobs=5, logit_bias={str(ids[4]): 100})
    expected = continued["choices"][0]["logprobs"]["token_logprobs"][0]
    assert abs(answer["choices"][0]["logprobs"]["token_logprobs"][4] - expected) < 1e-4


def test_echo_without_generation(served: Served) -> None:
    [choice] = served.complete(prompt="abc", max_tokens=0, echo=True, logprobs=0)["choices"]
    assert choice["text"] == "abc"
    assert len(choice["logprobs"]["tokens"]) == 3


def test_second_turn_reports_cached_tokens(served: Served) -> None:
    prompt = "the same beginning again and again, long enough for pages " * 3
    served.complete(prompt=prompt, max_tokens=4, ignore_eos=True)
    again = served.complete(prompt=prompt, max_tokens=4, ignore_eos=True)
    assert 0 < again["usage"]["prompt_tokens_details"]["cached_tokens"] < len(prompt)


def test_nulls_and_unknown_fields_are_harmless(served: Served) -> None:
    plain = served.complete(prompt="abc", ignore_eos=True)["choices"][0]["text"]
    nulls = dict.fromkeys(("n", "stop", "logprobs", "seed", "suffix", "logit_bias", "best_of", "stream", "top_k"))
    answer = served.complete(prompt="abc", ignore_eos=True, user="me", metadata={"a": 1}, zebra=[1], **nulls)
    assert answer["choices"][0]["text"] == plain

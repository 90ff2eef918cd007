"""``/v1/chat/completions`` over HTTP."""

from __future__ import annotations

import json

from .conftest import Served


def _prompt_text(served: Served, **fields: object) -> str:
    tokens = served.client.post("/tokenize", json=fields).json()["tokens"]
    return served.client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_shape(served: Served) -> None:
    answer = served.chat(max_tokens=3, ignore_eos=True)
    assert answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_both_names_of_the_token_limit(served: Served) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        assert served.chat(ignore_eos=True, **{name: 4})["usage"]["completion_tokens"] == 4


def test_template_gets_roles_and_joined_parts(served: Served) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user", "content": "c"},
    ]
    assert _prompt_text(served, messages=messages) == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )


def test_continue_final_message(served: Served) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "so far"}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 1, "temperature": 0}
    answer = served.client.post("/v1/chat/completions", json=body).json()
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nso far"
    assert answer["usage"]["prompt_tokens"] == served.client.post("/tokenize", json={"prompt": text}).json()["count"]


def test_tools_reach_the_template_unless_none_is_to_be_called(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    text = _prompt_text(served, messages=[{"role": "user", "content": "x"}], tools=tools)
    assert json.loads(text[text.index("<tools>") + 7 : text.index("</tools>")]) == tools
    with_tools = served.chat(max_tokens=1, tools=tools)["usage"]["prompt_tokens"]
    without = served.chat(max_tokens=1)["usage"]["prompt_tokens"]
    assert served.chat(max_tokens=1, tools=tools, tool_choice="none")["usage"]["prompt_tokens"] == without < with_tools


def test_logprobs_are_rounded_alike_and_carry_bytes(served: Served) -> None:
    [choice] = served.chat(max_tokens=4, ignore_eos=True, logprobs=True, top_logprobs=2)["choices"]
    entries = choice["logprobs"]["content"]
    assert len(entries) == 4
    for entry in entries:
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]
        assert len(entry["bytes"]) == 1  # every token of this vocabulary is a byte
    assert served.chat(max_tokens=2, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_no_replacement_character_from_a_split_one(served: Served) -> None:
    """Random bytes cut by the token limit: what is incomplete at the end is not sent as U+FFFD."""
    euro = served.client.post("/tokenize", json={"prompt": "€"}).json()["tokens"]
    assert len(euro) == 3
    answer = served.complete(prompt="a", max_tokens=2, ignore_eos=True, logit_bias={str(euro[0]): 100})
    assert "\ufffd" not in answer["choices"][0]["text"][-1:]

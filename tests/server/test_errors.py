"""Bad input: an OpenAI error with the right status, never 422, never 500, and nothing computed."""

from __future__ import annotations

from typing import Any

import pytest

from oscar_serving.server import ServerSettings, create_app

from .conftest import Served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def error_of(response: Any, status: int) -> Any:
    """The error of a response with this status, in OpenAI's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "x",}', "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b'{"prompt": "\xff"}', "not valid UTF-8"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "x", "temperature": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"prompt": "x", "temperature": 1e999}', "too large"),
        (b'{"prompt": "x", "zebra": 1e999}', "too large"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}", "nests deeper"),
        (b'{"prompt": ' + b"[" * 100_000, "nests deeper"),
        (b'{"a": ' * 5000 + b"1" + b"}" * 5000, "nests deeper"),
    ],
)
def test_malformed_bodies(served: Served, raw: bytes, says: str) -> None:
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        error = error_of(served.client.post(path, content=raw, headers={"Content-Type": "application/json"}), 400)
        assert says in error["message"]
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": None}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": [[]]}, "prompt"),
        (TEXT, {"prompt": ["a", ""]}, "prompt"),
        (TEXT, {"prompt": ["a", 1]}, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, "prompt"),
        (TEXT, {"prompt": [True]}, "prompt"),
        (TEXT, {"prompt": [-1]}, "prompt"),
        (TEXT, {"prompt": [10**6]}, "prompt"),
        (TEXT, {"prompt": [10**30]}, "prompt"),
        (TEXT, {"prompt": {"a": 1}}, "prompt"),
        (TEXT, {"prompt": ["x"] * 300}, "prompt"),
        (TEXT, {"prompt": ["x"] * 20, "n": 20}, "n"),
        (TEXT, {"prompt": "x", "n": 0}, "n"),
        (TEXT, {"prompt": "x", "n": 10**9}, "n"),
        (TEXT, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        (TEXT, {"prompt": "x", "max_tokens": True}, "max_tokens"),
        (TEXT, {"prompt": "x", "temperature": -0.1}, "temperature"),
        (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature"),
        (TEXT, {"prompt": "x", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "x", "top_p": 1.01}, "top_p"),
        (TEXT, {"prompt": "x", "min_p": 2}, "min_p"),
        (TEXT, {"prompt": "x", "top_k": -2}, "top_k"),
        (TEXT, {"prompt": "x", "seed": 2**63}, "seed"),
        (TEXT, {"prompt": "x", "stop": ""}, "stop"),
        (TEXT, {"prompt": "x", "stop": [""]}, "stop.0"),
        (TEXT, {"prompt": "x", "stop": 5}, "stop"),
        (TEXT, {"prompt": "x", "logprobs": 101}, "logprobs"),
        (TEXT, {"prompt": "x", "logprobs": True}, "logprobs"),
        (TEXT, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias.a"),
        (TEXT, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias.1"),
        (TEXT, {"prompt": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
        (TEXT, {"prompt": "x", "stop_token_ids": [99999]}, "stop_token_ids"),
        (TEXT, {"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
        (TEXT, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hello"}, "messages"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
        ),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**HELLO, "logprobs": 2}, "logprobs"),
        (CHAT, {**HELLO, "tools": [{"type": "function"}]}, "tools.0.function"),
        (CHAT, {**HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (
            CHAT,
            {**HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_bad_values_name_their_field(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    error = error_of(served.client.post(path, json=body), 400)
    assert error["param"] == param
    assert param.partition(".")[0] in error["message"]


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (TEXT, "best_of", 2),
        (TEXT, "suffix", "end"),
        (TEXT, "use_beam_search", True),
        (TEXT, "guided_regex", "a+"),
        (TEXT, "min_tokens", 3),
        (TEXT, "truncate_prompt_tokens", 3),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "response_format", {"type": "json_schema", "json_schema": {}}),
        (CHAT, "audio", {"voice": "x"}),
        (CHAT, "modalities", ["text", "audio"]),
        (CHAT, "tool_choice", "required"),
        (CHAT, "tool_choice", {"type": "function", "function": {"name": "f"}}),
        (CHAT, "functions", [{"name": "f"}]),
        (CHAT, "chat_template", "{{ x }}"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(served: Served, path: str, field: str, value: Any) -> None:
    body = {"prompt": "x"} if path == TEXT else HELLO
    error = error_of(served.client.post(path, json={**body, field: value}), 400)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (TEXT, "best_of", 1),
        (TEXT, "suffix", ""),
        (TEXT, "use_beam_search", False),
        (TEXT, "min_tokens", 0),
        (CHAT, "response_format", {"type": "text"}),
        (CHAT, "modalities", ["text"]),
        (CHAT, "tool_choice", "auto"),
        (CHAT, "functions", []),
    ],
)
def test_their_harmless_values_are_served(served: Served, path: str, field: str, value: Any) -> None:
    body = {"prompt": "x"} if path == TEXT else HELLO
    response = served.client.post(path, json={**body, "max_tokens": 1, field: value})
    assert response.status_code == 200, response.text


def test_too_long_is_refused_before_anything_is_computed(served: Served) -> None:
    before = served.engine.stats()
    for body in ({"prompt": "x" * 3000}, {"prompt": "x" * 10, "max_tokens": 2040}):
        error = error_of(served.client.post(TEXT, json=body), 400)
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
    after = served.engine.stats()
    assert (before.prompt_tokens, before.generated_tokens) == (after.prompt_tokens, after.generated_tokens)


def test_refused_choice_takes_the_others_back(served: Served) -> None:
    error_of(served.client.post(TEXT, json={"prompt": ["short", "x" * 3000], "max_tokens": 500}), 400)
    served.wait_until_idle()


def test_unknown_model(served: Served) -> None:
    for path, body in ((TEXT, {"prompt": "x"}), (CHAT, HELLO), ("/tokenize", {"prompt": "x"})):
        error = error_of(served.client.post(path, json={**body, "model": "../../etc/passwd"}), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    error_of(served.client.get("/v1/models/other"), 404)


def test_unknown_routes_and_methods(served: Served) -> None:
    assert error_of(served.client.get("/v1/nothing"), 404)["code"] == "not_found"
    assert error_of(served.client.get(TEXT), 405)["code"] == "method_not_allowed"


@pytest.mark.parametrize("media", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_other_content_types(served: Served, media: str | None) -> None:
    headers = {"Content-Type": media} if media else {}
    error_of(served.client.post(TEXT, content=b'{"prompt": "x"}', headers=headers), 415)


def test_template_that_is_no_template_is_refused_at_the_start(served: Served) -> None:
    with pytest.raises(ValueError, match="chat template, line 2: "):
        create_app(served.engine, ServerSettings(chat_template="{{ messages[0]['content'] }}\n{% if x %}{{ oops"))
    create_app(served.engine, ServerSettings(chat_template="{{ raise_exception('the system speaks first') }}"))


def test_template_that_refuses_a_conversation(served: Served) -> None:
    body = {"messages": [{"role": "assistant", "content": "me first"}]}
    error = error_of(served.client.post(CHAT, json=body), 400)
    assert error["param"] == "messages"
    assert "the user begins" in error["message"]

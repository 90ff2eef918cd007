"""Server-sent events as clients parse them."""

from __future__ import annotations

import json
from typing import Any

from .conftest import Served


def stream(served: Served, path: str, **fields: Any) -> list[Any]:
    """The chunks of a stream, whose framing is checked to the byte."""
    with served.client.stream("POST", path, json={"temperature": 0, "stream": True, **fields}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode("utf-8")
    events = raw.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") and "\n" not in event for event in events[:-2])
    return [json.loads(event[6:]) for event in events[:-2]]


def chat(served: Served, **fields: Any) -> list[Any]:
    return stream(served, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], **fields)


def test_completion_stream_says_what_the_whole_answer_says(served: Served) -> None:
    fields = {"prompt": "hello", "max_tokens": 24, "ignore_eos": True, "logprobs": 1, "echo": True}
    chunks = stream(served, "/v1/completions", **fields)
    whole = served.complete(**fields)["choices"][0]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for chunk in chunks for x in chunk["choices"][0]["logprobs"][key]] == whole["logprobs"][key]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert not any("usage" in chunk for chunk in chunks)


def test_chat_stream(served: Served) -> None:
    served.chat(max_tokens=24, ignore_eos=True)  # both below then begin with the same prefix hit
    chunks = chat(served, max_tokens=24, ignore_eos=True, logprobs=True, top_logprobs=1)
    whole = served.chat(max_tokens=24, ignore_eos=True, logprobs=True, top_logprobs=1)["choices"][0]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[0]["choices"][0]["finish_reason"] is None
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(pieces) == whole["message"]["content"]
    scored = [entry for chunk in chunks[1:] for entry in chunk["choices"][0]["logprobs"]["content"]]
    assert scored == whole["logprobs"]["content"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_usage_comes_last_in_a_chunk_without_choices_and_only_when_asked(served: Served) -> None:
    chunks = chat(served, max_tokens=3, ignore_eos=True, stream_options={"include_usage": True})
    assert [chunk["choices"] for chunk in chunks].count([]) == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_continuous_usage(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = stream(
        served,
        "/v1/completions",
        prompt="hi",
        max_tokens=6,
        ignore_eos=True,
        logprobs=0,
        stream_options=options,
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [6, 6]
    assert len(set(counts)) == 6


def test_choices_of_a_stream_are_told_apart(served: Served) -> None:
    fields = {
        "prompt": ["one", "two"],
        "n": 2,
        "seed": 3,
        "temperature": 1.0,
        "max_tokens": 12,
        "ignore_eos": True,
    }
    chunks = stream(served, "/v1/completions", **fields)
    whole = served.complete(**fields)["choices"]
    for index, choice in enumerate(whole):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert own[-1]["finish_reason"] == choice["finish_reason"]


def test_stop_string_never_leaks_into_a_stream(served: Served) -> None:
    whole = served.complete(prompt="abc", max_tokens=40, ignore_eos=True)["choices"][0]["text"]
    stop = whole[6:10]
    chunks = stream(served, "/v1/completions", prompt="abc", max_tokens=40, ignore_eos=True, stop=stop)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_refusal_has_a_status_even_when_a_stream_was_asked_for(served: Served) -> None:
    response = served.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 10**6, "stream": True})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"

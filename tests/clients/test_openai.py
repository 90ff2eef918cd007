"""openai-python against a real model on the shipped artifact."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .conftest import KEY, LIMIT, MODEL, Endpoint

pytestmark = pytest.mark.model

#: Without the system message this small model is undecided between beginning with "The" and with "L'".
QUESTION = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]


LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=KEY, max_retries=0, timeout=300) as made:
        yield made


def gauge(client: openai.OpenAI, name: str) -> float:
    """A metric without other labels than the model's name."""
    url = str(client.base_url).removesuffix("v1/")
    text = httpx.get(f"{url}metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    return float(text.split(f"\n{name}{{")[1].split("} ")[1].split()[0])


def test_paris_whole_and_streamed(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_history_is_read_from_the_int2_pages(client: openai.OpenAI) -> None:
    """The fact stands past the sink and long before the recent window."""
    filler = "The weather was mild and the streets were quiet that day. " * 30
    prompt = f"{filler[:900]}\nThe secret password is 'bluebird'.\n{filler}\nThe secret password is '"
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0)
    assert answer.usage.prompt_tokens > 500
    assert "blue" in answer.choices[0].text


def test_async_client_gets_the_same_answers_at_once(client: openai.OpenAI) -> None:
    # Every token of these answers leads the next by over a nat: rounding that differs with the batch cannot turn them.
    colours = ("red", "blue", "green", "black", "white", "brown")
    requests = [
        {
            "model": MODEL,
            "prompt": f"The colours are {name}, one, {name}, two, {name}, three, {name}, four,",
            "max_tokens": 4,
            "temperature": 0,
        }
        for name in colours
    ]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=KEY, timeout=300) as many:
            answers = await asyncio.gather(*(many.completions.create(**fields) for fields in requests))
        return [answer.choices[0].text for answer in answers]

    alone = [client.completions.create(**fields).choices[0].text for fields in requests]
    assert [text.split(",")[0].strip() for text in alone] == list(colours)
    assert asyncio.run(ask_all()) == alone


def test_models_and_token_logprobs(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert bytes(entry.bytes).decode() == entry.token


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="word " * 20_000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_metrics_show_what_was_saved(client: openai.OpenAI) -> None:
    saved, plain, cached = (gauge(client, f"oscar_{name}_bytes") for name in ("saved", "bf16", "cached"))
    assert saved == plain - cached
    assert plain > 0


def test_async_stream_equals_the_whole_answer(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "One, two, three, four,", "max_tokens": 6, "temperature": 0}

    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key=KEY, timeout=300) as many:
            stream = await many.completions.create(**fields, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])

    assert asyncio.run(ask()) == client.completions.create(**fields).choices[0].text


def test_tools_are_taken_and_their_results_too(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"sky": "clear"})},
    ]
    for conversation in (QUESTION, messages):
        answer = client.chat.completions.create(
            model=MODEL, messages=conversation, tools=[TOOL], tool_choice="auto", max_tokens=4, temperature=0
        )
        assert answer.choices[0].finish_reason in ("length", "stop", "tool_calls")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="required")
    assert refused.value.param == "tool_choice"


def test_aborted_stream_frees_its_pages(client: openai.OpenAI) -> None:
    before = gauge(client, "vllm:generation_tokens_total")
    stream = client.completions.create(**LONG, n=2, stream=True)
    next(iter(stream))
    stream.close()
    while gauge(client, "vllm:num_requests_running"):
        pass
    assert gauge(client, "vllm:kv_cache_usage_perc") == 0
    assert gauge(client, "vllm:generation_tokens_total") - before < 2000


def test_retries_when_the_queue_is_full(client: openai.OpenAI) -> None:
    """The client comes back after the time that the server names; by then there is room."""
    busy = client.completions.create(**LONG, n=LIMIT, stream=True)
    next(iter(busy))
    fields: dict[str, Any] = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**fields)
    assert refused.value.code == "queue_full"
    seen: list[int] = []

    def make_room(response: httpx.Response) -> None:
        seen.append(response.status_code)
        busy.close()

    with httpx.Client(event_hooks={"response": [make_room]}, timeout=300) as http:
        answer = client.with_options(http_client=http, max_retries=8).completions.create(**fields)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert (seen[0], seen[-1]) == (429, 200)

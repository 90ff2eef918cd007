"""The official client against a real model on the shipped artifact."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from oscar_serving.engines.hf import Engine, EngineOptions
from oscar_serving.models import get_model

from .conftest import serve

pytestmark = pytest.mark.model

#: Without the system message this small model is undecided between beginning with "The" and with "L'".
QUESTION = [
    {"role": "system", "content": "Answer in one sentence."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    options = EngineOptions(kv_cache_memory=256 << 20, model_id="smollm2", device="cpu")
    with serve(Engine.load(get_model("smollm2"), options), api_key="secret") as served:
        yield openai.OpenAI(base_url=f"{served.url}/v1", api_key="secret", max_retries=0)


def test_paris_whole_and_streamed(client: openai.OpenAI) -> None:
    fields = {"model": "smollm2", "messages": QUESTION, "max_tokens": 24, "temperature": 0}
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
    answer = client.completions.create(model="smollm2", prompt=prompt, max_tokens=4, temperature=0)
    assert answer.usage.prompt_tokens > 500
    assert "blue" in answer.choices[0].text


def test_async_client_gets_the_same_answers_at_once(client: openai.OpenAI) -> None:
    # Every token of these answers leads the next by over a nat: rounding that differs with the batch cannot turn them.
    colours = ("red", "blue", "green", "black", "white", "brown")
    requests = [
        {
            "model": "smollm2",
            "prompt": f"The colours are {name}, one, {name}, two, {name}, three, {name}, four,",
            "max_tokens": 4,
            "temperature": 0,
        }
        for name in colours
    ]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="secret") as many:
            answers = await asyncio.gather(*(many.completions.create(**fields) for fields in requests))
        return [answer.choices[0].text for answer in answers]

    alone = [client.completions.create(**fields).choices[0].text for fields in requests]
    assert [text.split(",")[0].strip() for text in alone] == list(colours)
    assert asyncio.run(ask_all()) == alone


def test_models_and_token_logprobs(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["smollm2"]
    assert client.models.retrieve("smollm2").id == "smollm2"
    answer = client.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    for entry in answer.choices[0].logprobs.content:
        assert entry.logprob == entry.top_logprobs[0].logprob
        assert bytes(entry.bytes).decode() == entry.token


def test_errors_become_the_clients_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="smollm2", prompt="word " * 20_000)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="smollm2", messages=QUESTION, response_format={"type": "json_object"})
    assert refused.value.param == "response_format"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()


def test_metrics_show_what_was_saved(client: openai.OpenAI) -> None:
    url = str(client.base_url).removesuffix("v1/")
    text = httpx.get(f"{url}metrics", headers={"Authorization": "Bearer secret"}).text
    saved, plain, cached = (
        float(text.split(f"oscar_{name}_bytes{{")[1].split("} ")[1].split()[0]) for name in ("saved", "bf16", "cached")
    )
    assert saved == plain - cached
    assert plain > 0
    assert 'oscar_tier_bytes{model_name="smollm2",tier="int2"}' in text

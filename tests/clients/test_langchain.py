"""LangChain's ChatOpenAI."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import KEY, MODEL, Endpoint

langchain_openai = pytest.importorskip("langchain_openai")
pytestmark = pytest.mark.model

CONVERSATION = [("system", "Answer in one sentence."), ("human", "What is the capital of France?")]


def test_invoke_stream_batch_and_async(endpoint: Endpoint) -> None:
    model = langchain_openai.ChatOpenAI(
        base_url=f"{endpoint.url}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=24, timeout=300
    )
    whole = model.invoke(CONVERSATION)
    assert "Paris" in whole.content
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    assert whole.usage_metadata["total_tokens"] > whole.usage_metadata["input_tokens"] > 0
    chunks = list(model.stream(CONVERSATION))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert asyncio.run(model.ainvoke(CONVERSATION)).content == whole.content


def test_bound_tools_reach_the_server(endpoint: Endpoint) -> None:
    def weather(city: str) -> str:
        """Weather of a city."""
        return city

    model = langchain_openai.ChatOpenAI(
        base_url=f"{endpoint.url}/v1", api_key=KEY, model=MODEL, temperature=0, max_tokens=4, timeout=300
    )
    answer = model.bind_tools([weather]).invoke(CONVERSATION)
    assert answer.response_metadata["finish_reason"] in ("stop", "length", "tool_calls")

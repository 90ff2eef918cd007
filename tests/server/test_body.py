"""Bodies that nobody would send."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from oscar_serving.server.body import MAX_DEPTH, parse_json, validate
from oscar_serving.server.errors import ApiError
from oscar_serving.server.refused import refuse_unsupported
from oscar_serving.server.requests import ChatRequest, CompletionRequest

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields})


def refusal(work: Callable[[], object]) -> int | None:
    """Status of the error that ``work`` raises, whose body can be sent; ``None`` when there is none."""
    try:
        work()
    except ApiError as error:
        json.dumps(error.body().model_dump(), ensure_ascii=False).encode()
        return error.status
    return None


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    assert refusal(lambda: parse_json(body)) in (None, 400)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6))
def test_any_fields_are_a_request_or_a_400(data: dict[str, Any]) -> None:
    def read(model: type[BaseModel]) -> None:
        parsed = parse_json(json.dumps(data).encode())
        refuse_unsupported(parsed)
        validate(model, parsed)

    for model in (CompletionRequest, ChatRequest):
        assert refusal(lambda model=model: read(model)) in (None, 400)


def test_depth_limit_is_exact() -> None:
    def nested(levels: int) -> bytes:
        return b'{"a":' * (levels - 1) + b"{}" + b"}" * (levels - 1)

    assert parse_json(nested(MAX_DEPTH))
    with pytest.raises(ApiError, match="nests deeper"):
        parse_json(nested(MAX_DEPTH + 1))


def test_duplicate_keys_take_the_last() -> None:
    assert parse_json(b'{"a": 1, "a": 2}') == {"a": 2}

"""Tool calls in the text of an answer."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from oscar_serving.engines.hf import RequestOutput
from oscar_serving.server.chat import Answer
from oscar_serving.server.tool_calls import HermesReader

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def read(pieces: list[str], *, parallel: bool = True) -> tuple[str, list[tuple[str, object]]]:
    reader = HermesReader(parallel=parallel)
    text, calls = "", []
    for piece in pieces:
        content, new = reader.push(piece)
        text += content
        calls += [(call.function.name, json.loads(call.function.arguments)) for call in new]
    return text + reader.flush(), calls


def test_call_with_text_before_it() -> None:
    assert read(["Let me see. " + CALL]) == ("Let me see. ", [("weather", {"city": "Paris"})])


def test_two_calls_and_one_when_the_client_wants_one() -> None:
    text, calls = read([CALL + "\n" + CALL + "\n"])
    assert len(calls) == 2
    assert text == ""
    assert len(read([CALL + "\n" + CALL], parallel=False)[1]) == 1


def test_what_is_no_call_stays_text() -> None:
    broken = '<tool_call>{"name": 5}</tool_call>'
    for text in ("<tool_call>nonsense</tool_call>", broken, "<tool_call>{", "a < b <tool"):
        assert read([text]) == (text, [])


def test_call_after_a_broken_one() -> None:
    broken = "<tool_call>{</tool_call>"
    assert read([broken + CALL]) == (broken, [("weather", {"city": "Paris"})])


@given(
    st.lists(st.sampled_from(["text ", CALL, "<tool_call>", "</tool_call>", "<", "{}"]), max_size=5),
    st.lists(st.integers(0, 400), max_size=20),
)
def test_pieces_do_not_matter(parts: list[str], cuts: list[int]) -> None:
    whole = "".join(parts)
    points = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    assert read([whole[a:b] for a, b in pairwise(points)]) == read([whole])


def test_answer_finishes_with_tool_calls() -> None:
    answer = Answer(0, table=None, reader=HermesReader())  # type: ignore[arg-type]  # no logprobs asked for
    first = answer.piece(RequestOutput("r", CALL[:30], [1]))
    assert not first.delta.model_fields_set
    last = answer.piece(RequestOutput("r", CALL[30:], [2], finish_reason="stop"))
    assert last.finish_reason == "tool_calls"
    assert last.delta.content is None
    [call] = last.delta.tool_calls or []
    assert (call.index, call.type, call.function.name) == (0, "function", "weather")
    assert call.id.startswith("call_")

"""Incremental text: nothing lost, nothing split, nothing held back that need not be."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_serving.engines.hf.detokenizer import REPLACEMENT, IncrementalDecoder, StopStrings

from .tiny import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.text(max_size=8),
    text=st.text(alphabet=st.characters(codec="utf-8", exclude_characters=REPLACEMENT), max_size=40),
)
def test_text_arrives_whole_and_without_split_characters(prompt: str, text: str) -> None:
    decoder = IncrementalDecoder(TOKENIZER, list(prompt.encode()))
    pieces = [decoder.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_every_character_comes_with_its_last_byte() -> None:
    decoder = IncrementalDecoder(TOKENIZER, [])
    pieces = [decoder.push(byte) for byte in "a€😀".encode()]
    assert pieces == ["a", "", "", "€", "", "", "", "😀"]


def test_a_character_begun_in_the_prompt_is_completed() -> None:
    start, *rest = "é".encode()
    decoder = IncrementalDecoder(TOKENIZER, [*b"caf", start])
    assert [decoder.push(byte) for byte in rest] == ["é"]


def test_a_character_broken_off_in_the_prompt_stays_there() -> None:
    decoder = IncrementalDecoder(TOKENIZER, [*b"caf", *"é".encode()[:1]])
    assert [decoder.push(byte) for byte in b"x\xffy"] == ["x", "", f"{REPLACEMENT}y"]
    decoder = IncrementalDecoder(TOKENIZER, [0xFF, 0xFE])
    assert "".join(decoder.push(byte) for byte in b"\xffxy") == f"{REPLACEMENT}xy"


def test_a_character_cut_off_by_the_end_is_dropped_and_bytes_that_are_none_are_shown() -> None:
    decoder = IncrementalDecoder(TOKENIZER, [])
    assert "".join(decoder.push(byte) for byte in b"ok\xf0\x9f\x98") == "ok"
    decoder = IncrementalDecoder(TOKENIZER, [])
    assert "".join(decoder.push(byte) for byte in b"a\xffb") == f"a{REPLACEMENT}b"


def test_endless_invalid_bytes_do_come_out() -> None:
    decoder = IncrementalDecoder(TOKENIZER, [])
    text = "".join(decoder.push(0xFF) for _ in range(100))
    assert 80 < len(text) <= 100


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    for skip, expected in ((True, "ab"), (False, "a<eos>b")):
        decoder = IncrementalDecoder(TOKENIZER, [], skip_special_tokens=skip)
        assert "".join(decoder.push(token) for token in [97, EOS, 98]) == expected
    decoder = IncrementalDecoder(TOKENIZER, [])
    assert "".join(decoder.push(token) for token in [EOS] * 300 + [98]) == "b"
    assert len(decoder._window) < 200


STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(stops=STOPS, pieces=st.lists(st.text(alphabet="ab", max_size=3), max_size=12))
def test_stop_strings_cut_like_a_search_of_the_whole_text(stops: list[str], pieces: list[str]) -> None:
    stream, out, seen = StopStrings(stops), "", ""
    for piece in pieces:
        seen += piece
        text, found = stream.push(piece)
        out += text
        at = min((seen.find(s) for s in stops if s in seen), default=-1)
        if at >= 0:
            assert found in stops
            assert out == seen[:at]
            return
        assert found is None
        held = seen[len(out) :]
        assert out + held == seen
        assert not held or any(s.startswith(held) for s in stops)  # held back only if it may become a stop string
    assert out + stream.flush() == seen


@pytest.mark.parametrize("stop", ["\n\n", "</s>"])
def test_what_was_held_back_is_released_at_the_end(stop: str) -> None:
    stream = StopStrings([stop])
    assert stream.push("x" + stop[:-1]) == ("x", None)
    assert stream.flush() == stop[:-1]

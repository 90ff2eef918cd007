"""Bytes and texts of single tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oscar_serving.server.tokens import TokenTable


@pytest.fixture(scope="module")
def byte_level(model_folder: Path) -> TokenTable:
    return TokenTable(AutoTokenizer.from_pretrained(model_folder))


def sentencepiece() -> TokenTable:
    vocabulary = {"<unk>": 0, "▁the": 1, "<0xE2>": 2, "s": 3, "<0x0A>": 4}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return TokenTable(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))


def test_every_byte_has_its_token(byte_level: TokenTable) -> None:
    assert {byte_level.bytes_of(token) for token in range(256)} == {bytes([byte]) for byte in range(256)}


def test_texts_are_distinct(byte_level: TokenTable) -> None:
    texts = [byte_level.text_of(token) for token in range(256)]
    assert len(set(texts)) == 256
    assert "bytes:\\xff" in texts
    assert "\n" in texts


def test_special_tokens_are_their_name(byte_level: TokenTable, model_folder: Path) -> None:
    eos = AutoTokenizer.from_pretrained(model_folder).eos_token_id
    assert byte_level.text_of(eos) == "<eos>"


def test_sentencepiece() -> None:
    table = sentencepiece()
    assert [table.text_of(token) for token in range(5)] == ["<unk>", " the", "bytes:\\xe2", "s", "\n"]


def test_id_without_token(byte_level: TokenTable) -> None:
    assert byte_level.text_of(10**6) == ""


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_bytes_add_up_to_the_text(byte_level: TokenTable, model_folder: Path, text: str) -> None:
    ids = AutoTokenizer.from_pretrained(model_folder).encode(text, add_special_tokens=False) if text else []
    assert b"".join(map(byte_level.bytes_of, ids)).decode() == text

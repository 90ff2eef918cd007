"""What single tokens look like: their bytes, and a text for each, even for part of a character."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

#: Tokens whose bytes are kept; a vocabulary is larger, but few of its tokens occur.
_CACHED = 65536
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class TokenTable:
    """Bytes and text of token ids of a Hugging Face tokenizer.

    Byte-level vocabularies (GPT-2, Llama 3, Qwen) write bytes as letters; SentencePiece ones (Llama 2, Gemma)
    write a space as U+2581 and odd bytes as ``<0xNN>``. Special tokens are their own name.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids) | {
            id for id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._byte_level = _speaks_byte_level(tokenizer)
        self.bytes_of = lru_cache(_CACHED)(self._bytes_of)
        self.text_of = lru_cache(_CACHED)(self._text_of)

    def _bytes_of(self, token: int) -> bytes:
        """Bytes of the token inside running text; empty for an id that the vocabulary does not have."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if token in self._special:
            return piece.encode("utf-8")
        if self._byte_level:
            codes = [_BYTE_OF_LETTER.get(letter) for letter in piece]
            if None not in codes:
                return bytes(code for code in codes if code is not None)
        match = _BYTE_TOKEN.fullmatch(piece)
        if match:
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode("utf-8")

    def _text_of(self, token: int) -> str:
        """The token's text; ``bytes:\\xe2\\x82`` where it is no whole character; no two look alike."""
        data = self.bytes_of(token)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _speaks_byte_level(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and "ByteLevel" in repr(backend.decoder)


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes are their own letter, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in letters]
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters_of_bytes()

"""From token ids to text, one step at a time: whole characters only, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
#: Prompt tokens that give the first generated one its context (a leading space, a character begun in the
#: prompt).
CONTEXT_TOKENS = 5
#: A character has at most four bytes, so four tokens: a longer run of unreadable bytes is not one that is cut
#: short.
MAX_PENDING_TOKENS = 8
#: Tokens without any text (special ones) that are kept as context.
MAX_CONTEXT_TOKENS = 64


class IncrementalDecoder:
    """Text of a growing list of tokens.

    A character whose bytes are not all there yet is held back, and dropped if they never come. Bytes that no
    continuation can make valid come out as U+FFFD, as the tokenizer gives them.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(prompt[-CONTEXT_TOKENS:])  # tokens decoded together
        self._context = len(self._window)  # of these, whose text has come out whole
        self._pending = 0  # tokens since the text last ended on a whole character
        text = self._decode(self._window)
        self._emitted = len(text.rstrip(REPLACEMENT))
        self._begun = len(text) - self._emitted  # what the prompt may have left incomplete

    def push(self, token: int) -> str:
        """Text that became certain with ``token``."""
        self._window.append(token)
        self._pending += 1
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        if len(whole) < len(text) and self._pending <= MAX_PENDING_TOKENS:
            new = whole[self._emitted :]
            self._emitted = max(self._emitted, len(whole))
            return self._own(new)
        new = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        self._pending = 0
        context = self._window[self._context :]
        context_text = self._decode(context)
        if context_text or len(context) > MAX_CONTEXT_TOKENS:  # no text: the space before the next word would be lost
            self._window, self._context, self._emitted = context, len(context), len(context_text)
        return self._own(new)

    def _own(self, text: str) -> str:
        """``text`` without the rest of a broken character that the prompt ended on."""
        own = text.lstrip(REPLACEMENT)
        own = REPLACEMENT * max(0, len(text) - len(own) - self._begun) + own
        if own:
            self._begun = 0
        return own

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)


class StopStrings:
    """Cuts a stream of text before the first stop string, holding back only what may still become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may go out, and the stop string that was found, if any."""
        if not self._stops:
            return text, None
        held = self._held + text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, _, stop = min(found)
            self._held = ""
            return held[:at], stop
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], None

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper beginning of ``stop``."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0

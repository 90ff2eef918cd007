"""Tool calls in an answer's text, Hermes form: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

from __future__ import annotations

import json
import uuid

from oscar_serving.server.responses import CalledFunction, CalledTool

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesReader:
    """Splits growing text into content and calls; what is not a well-formed call stays content.

    Parameters
    ----------
    parallel
        Whether calls after the first are passed on; dropped otherwise, as the client asked.
    """

    def __init__(self, *, parallel: bool = True) -> None:
        self.calls = 0
        self._parallel = parallel
        self._held = ""  # what may become a call
        self._space = ""  # white space that models put around calls: content only when more content follows

    def push(self, text: str) -> tuple[str, list[CalledTool]]:
        """Content that is certain, and the calls that became complete."""
        held = self._held + text
        content = ""
        calls: list[CalledTool] = []
        while (start := held.find(OPEN)) >= 0 and (end := held.find(CLOSE, start)) >= 0:
            end += len(CLOSE)
            called = _parse(held[start + len(OPEN) : end - len(CLOSE)])
            content += self._content(held[:start] if called else held[:end])
            held = held[end:]
            if called and (self._parallel or not self.calls):
                id = f"call_{uuid.uuid4().hex[:24]}"
                calls.append(CalledTool(id=id, type="function", function=called, index=self.calls))
                self.calls += 1
        keep = len(held) - start if start >= 0 else _beginning(held)
        content += self._content(held[: len(held) - keep])
        self._held = held[len(held) - keep :]
        return content, calls

    def flush(self) -> str:
        """What was held back when the text ends: a call that never closed is content."""
        held, self._held = self._held, ""
        return self._content(held)

    def _content(self, text: str) -> str:
        if not self.calls:
            return text
        text = self._space + text
        body = text.rstrip()
        self._space = text[len(body) :]
        return body


def _beginning(text: str) -> int:
    """Length of the longest end of ``text`` that may become ``<tool_call>``."""
    return next((size for size in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:size])), 0)


def _parse(block: str) -> CalledFunction | None:
    try:
        call = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return CalledFunction(name=call["name"], arguments=json.dumps(arguments, ensure_ascii=False))

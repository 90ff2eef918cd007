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
        self._held = ""

    def push(self, text: str) -> tuple[str, list[CalledTool]]:
        """Content that is certain, and the calls that became complete."""
        held = self._held + text
        content: list[str] = []
        calls: list[CalledTool] = []
        while (start := held.find(OPEN)) >= 0 and (end := held.find(CLOSE, start)) >= 0:
            block = held[start : end + len(CLOSE)]
            called = _parse(block[len(OPEN) : -len(CLOSE)])
            content.append(held[:start] if called else held[:start] + block)
            held = held[end + len(CLOSE) :]
            if called and (self._parallel or not self.calls):
                calls.append(
                    CalledTool(
                        id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=called, index=self.calls
                    )
                )
                self.calls += 1
        keep = len(held) - start if start >= 0 else _beginning(held)
        content.append(held[: len(held) - keep])
        self._held = held[len(held) - keep :]
        out = "".join(content)
        # The white space that models put around calls is no answer.
        return ("" if self.calls and not out.strip() else out), calls

    def flush(self) -> str:
        """What was held back when the text ends: a call that never closed is content."""
        held, self._held = self._held, ""
        return held


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

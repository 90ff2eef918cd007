"""From what a client sends to token ids: prompts, and conversations through the chat template."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from jinja2 import TemplateError, TemplateSyntaxError

from oscar_serving.server.errors import ApiError, bad_request
from oscar_serving.server.requests import MAX_CHOICES, ChatMessage, Tool

T = TypeVar("T")

#: A template is the model's own program: what it cannot take shows as any of these.
_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as the client wrote it: ``text``, or the ids alone."""

    text: str | None
    token_ids: list[int] | None


def parse_prompts(prompt: Any) -> list[ParsedPrompt]:
    """The prompts of a completion request: text, texts, token ids, or lists of token ids.

    Raises
    ------
    ApiError
        400 naming ``prompt`` for anything else, and for an empty one.
    """
    if isinstance(prompt, str):
        return [_text(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise bad_request(
            "prompt: give a string, a list of strings, a list of token ids or a list of such lists", "prompt"
        )
    if not prompt:
        raise bad_request("prompt is empty: give at least one token", "prompt", "empty_prompt")
    if isinstance(prompt[0], int):
        return [_ids(prompt, "prompt")]
    if len(prompt) > MAX_CHOICES:
        raise bad_request(f"prompt has {len(prompt)} entries: at most {MAX_CHOICES} in one request", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return [_text(item, f"prompt.{index}") for index, item in enumerate(prompt)]
    return [_ids(item, f"prompt.{index}") for index, item in enumerate(prompt)]


def _text(text: str, place: str) -> ParsedPrompt:
    if not text:
        raise bad_request(f"{place} is empty: give at least one character", "prompt", "empty_prompt")
    return ParsedPrompt(text, None)


def _ids(ids: Any, place: str) -> ParsedPrompt:
    if not isinstance(ids, list) or not all(type(id) is int and id >= 0 for id in ids):
        raise bad_request(f"{place}: token ids must be a list of integers of at least 0", "prompt")
    if not ids:
        raise bad_request(f"{place} is empty: give at least one token", "prompt", "empty_prompt")
    return ParsedPrompt(None, ids)


class PromptBuilder:
    """Tokenizes in a thread of its own: a long prompt takes long, and the event loop must go on meanwhile.

    Parameters
    ----------
    tokenizer
        A Hugging Face tokenizer; copied, since others decode with it in their threads.
    chat_template
        Jinja text in place of the tokenizer's own.

    Raises
    ------
    ValueError
        It is not Jinja: no conversation could be answered.
    """

    def __init__(self, tokenizer: Any, chat_template: str | None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        if chat_template:
            _check_syntax(self._tokenizer, chat_template)
        self.chat_template: str | None = chat_template or tokenizer.chat_template
        #: What only the server says to the template's renderer; everything else is for the template.
        self._reserved = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"kwargs"}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="oscar-tokenizer")

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``."""
        return await self._run(lambda: list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens)))

    async def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids; ids outside the vocabulary are a 400."""
        size = len(self._tokenizer)
        for id in token_ids:
            if id >= size:
                raise bad_request(
                    f"token id {id} is outside the vocabulary of {size} tokens", "tokens", "invalid_token"
                )
        return await self._run(
            lambda: self._tokenizer.decode(
                token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )

    async def render_chat(
        self,
        messages: list[ChatMessage],
        *,
        tools: list[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Raises
        ------
        ApiError
            400 where the model has no template, or its template refuses the conversation.
        """
        template = self.chat_template
        if not template:
            raise bad_request(
                "the model has no chat template: use /v1/completions, or serve it with --chat-template",
                "messages",
            )
        if continue_final_message and add_generation_prompt:
            raise bad_request("continue_final_message goes with add_generation_prompt false", "continue_final_message")
        reserved = sorted(self._reserved & (kwargs or {}).keys())
        if reserved:
            raise bad_request(f"chat_template_kwargs.{reserved[0]} cannot be set", "chat_template_kwargs")
        conversation = [_template_message(message, index) for index, message in enumerate(messages)]
        schemas = [tool.model_dump(exclude_none=True) for tool in tools] if tools else None

        def render() -> list[int]:
            text = self._tokenizer.apply_chat_template(
                conversation,
                tools=schemas,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(kwargs or {}),
            )
            return list(self._tokenizer.encode(text, add_special_tokens=False))

        try:
            return await self._run(render)
        except _REFUSALS as error:
            raise ApiError(400, f"the chat template refuses this conversation: {error}", param="messages") from error

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _check_syntax(tokenizer: Any, template: str) -> None:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], chat_template=template, tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
    except _REFUSALS:
        return  # it can be read, and wants another conversation


def _template_message(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as chat templates expect it: parts joined, arguments of tool calls as objects."""
    if message.content is None and message.role != "assistant":
        raise bad_request(f"messages.{index}.content is missing", f"messages.{index}.content")
    result = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        result["content"] = "".join(part.text for part in message.content)
    if message.role == "developer":
        result["role"] = "system"  # the newer name of the same role; templates know the older
    if message.role == "assistant":
        result.setdefault("content", "")
        for call in result.get("tool_calls", ()):
            try:
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
            except (ValueError, RecursionError):
                raise bad_request(
                    f"messages.{index}.tool_calls: arguments of {call['function']['name']!r} are not JSON",
                    f"messages.{index}.tool_calls",
                ) from None
    return result

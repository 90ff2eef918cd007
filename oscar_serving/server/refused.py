"""Fields that would change the answer and are not served: refused by name unless the value is harmless."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oscar_serving.server.errors import bad_request

_Harmless = Callable[[Any, dict[str, Any]], bool]


def _empty(value: Any, _: dict[str, Any]) -> bool:
    return value in (None, False, "", [], {})  # 0 equals False


def _best_of(value: Any, body: dict[str, Any]) -> bool:
    return value is None or value == 1 or value == body.get("n")


def _text_format(value: Any, _: dict[str, Any]) -> bool:
    return value is None or (isinstance(value, dict) and value.get("type") == "text")


def _text_only(value: Any, _: dict[str, Any]) -> bool:
    return value in (None, [], ["text"])


def _default_true(value: Any, _: dict[str, Any]) -> bool:
    return value in (None, True)


def _plain_choice(value: Any, _: dict[str, Any]) -> bool:
    return value in (None, "none", "auto")


#: Field → (whether a value asks for nothing, what is served instead).
REFUSED: dict[str, tuple[_Harmless, str]] = {
    "best_of": (_best_of, "sample with n and choose in the client"),
    "suffix": (_empty, "only text after the prompt is generated"),
    "response_format": (_text_format, 'only {"type": "text"} is served'),
    "audio": (_empty, "only text is served"),
    "modalities": (_text_only, 'only ["text"] is served'),
    "web_search_options": (_empty, "the server has no web search"),
    "functions": (_empty, "use tools"),
    "function_call": (_plain_choice, "use tool_choice"),
    "tool_choice": (_plain_choice, 'allowed is "none" or "auto"'),
    "use_beam_search": (_empty, "only sampling is served"),
    "min_tokens": (_empty, "use ignore_eos with max_tokens"),
    "bad_words": (_empty, "use logit_bias"),
    "allowed_token_ids": (_empty, "use logit_bias"),
    "logits_processors": (_empty, "use logit_bias"),
    "truncate_prompt_tokens": (_empty, "shorten the prompt in the client"),
    "prompt_embeds": (_empty, "send text or token ids"),
    "prompt_logprobs": (_empty, "use echo with logprobs on /v1/completions"),
    "include_stop_str_in_output": (_empty, "the stop string is never part of the text"),
    "spaces_between_special_tokens": (_default_true, "only true is served"),
    "structured_outputs": (_empty, "no constrained decoding"),
    "guided_json": (_empty, "no constrained decoding"),
    "guided_regex": (_empty, "no constrained decoding"),
    "guided_choice": (_empty, "no constrained decoding"),
    "guided_grammar": (_empty, "no constrained decoding"),
    "chat_template": (_empty, "the operator chooses it: oscar serve --chat-template FILE"),
    "documents": (_empty, "put documents into the messages"),
    "lora_request": (_empty, "no adapters are served"),
}


def refuse_unsupported(body: dict[str, Any]) -> None:
    """Raise a 400 that names the first field that asks for something this server does not do."""
    for field in body:
        rule = REFUSED.get(field)
        if rule is not None and not rule[0](body[field], body):
            raise bad_request(f"{field} is not supported: {rule[1]}", param=field, code="unsupported_parameter")

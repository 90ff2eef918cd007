"""Conversations: facts told in early turns and asked for in later ones, and the same prompt asked cold and warm."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oscar_serving.evaluation.client import Client, Completion

_ITEMS = ("apples", "books", "candles", "dresses", "eggs", "flutes", "gloves", "hats", "inks", "jars", "keys", "lamps")
_NAMES = ("Ada", "Ben", "Cleo", "Dora", "Emil", "Fay", "Gus", "Hana", "Ivo", "June", "Karl", "Lena")
_ANSWER_TOKENS = 8


@dataclass
class MultiturnResult:
    """What happened in the conversations.

    Attributes
    ----------
    right, asked
        Answers with the right number, and questions.
    hit_turns, later_turns
        Turns after the first that found a prefix in the cache, and turns after the first.
    cold_equals_warm, repeated
        Prompts whose second answer (with a warm cache) was the first one's text, and prompts asked twice.
    hit_tokens, prompt_tokens
        Over the turns after the first.
    """

    name: str
    right: int = 0
    asked: int = 0
    hit_turns: int = 0
    later_turns: int = 0
    cold_equals_warm: int = 0
    repeated: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    answers: list[str] = field(default_factory=list)

    def accuracy(self) -> tuple[float, float]:
        """Share of right answers and its binomial standard error."""
        share = self.right / self.asked
        return share, math.sqrt(share * (1 - share) / self.asked)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        value, error = self.accuracy()
        return {
            "name": self.name,
            "accuracy": {"value": value, "error": error},
            "asked": self.asked,
            "later_turns_with_hit": self.hit_turns / max(1, self.later_turns),
            "hit_rate_tokens": self.hit_tokens / max(1, self.prompt_tokens),
            "warm_equals_cold": self.cold_equals_warm / max(1, self.repeated),
            "repeated": self.repeated,
        }


def multiturn(
    client: Client,
    filler: str,
    *,
    conversations: int = 4,
    turns: int = 6,
    tokens_per_turn: int = 200,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> MultiturnResult:
    """Hold conversations as growing texts, so that models without a chat template can take part.

    Each turn tells a fact and some filler and asks for an earlier fact (the first turn for its own); the model's own
    answer becomes part of the next prompt. The last prompt is asked twice: the second time it is cached.
    """
    result = MultiturnResult(client.name)
    per_character = len(client.encode(filler[:2000])) / len(filler[:2000])
    width = int(tokens_per_turn / per_character)
    for index in range(conversations):
        chooser = random.Random(f"{seed} {index}")
        names, items = chooser.sample(_NAMES, turns), chooser.sample(_ITEMS, turns)
        counts = [chooser.randrange(12, 99) for _ in range(turns)]
        text = f"Notes of conversation {chooser.randrange(10**6)}.\n"  # no prefix in common with other conversations
        for turn in range(turns):
            start = chooser.randrange(max(1, len(filler) - width))
            asked = chooser.randrange(turn + 1)
            text += f"\n{filler[start : start + width].strip()}\n{names[turn]} has {counts[turn]} {items[turn]}.\n"
            text += f"Question: How many {items[asked]} does {names[asked]} have?\nAnswer: {names[asked]} has"
            answer = client.complete(text, max_tokens=_ANSWER_TOKENS, stop=["\n"])
            result.asked += 1
            result.right += _first_number(answer.text) == str(counts[asked])
            result.answers.append(answer.text)
            if turn:
                _count_hit(result, answer)
            if turn == turns - 1:
                again = client.complete(text, max_tokens=_ANSWER_TOKENS, stop=["\n"])
                result.repeated += 1
                result.cold_equals_warm += again.text == answer.text
            text += answer.text.rstrip() + "\n"
            if progress is not None:
                progress(index * turns + turn + 1, conversations * turns)
    return result


def _count_hit(result: MultiturnResult, answer: Completion) -> None:
    result.later_turns += 1
    result.hit_turns += answer.cached_tokens > 0
    result.hit_tokens += answer.cached_tokens
    result.prompt_tokens += answer.prompt_tokens


def _first_number(text: str) -> str:
    words = text.strip().split()
    return words[0].rstrip(".,") if words else ""

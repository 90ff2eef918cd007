"""What the task metrics ask: an endpoint and a simulated cache answer alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

#: Roles and contents, as in the OpenAI API.
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Completion:
    """One answer.

    Attributes
    ----------
    text
        Without the prompt, the stop string and special tokens.
    tokens
        Tokens generated, an end-of-sequence token included.
    finished
        Whether the model stopped by itself or at a stop string; otherwise it ran into ``max_tokens``.
    prompt_tokens, cached_tokens
        Tokens of the prompt, and those of them taken from a prefix cache (0 where the server does not say).
    """

    text: str
    tokens: int
    finished: bool
    prompt_tokens: int
    cached_tokens: int


class Client(Protocol):
    """A model that completes prompts; greedy unless ``temperature`` is above 0."""

    name: str

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt, special tokens included."""

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Completion:
        """Complete a text or token ids."""

    def chat(
        self,
        messages: Messages,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Completion:
        """Answer the last of the messages."""

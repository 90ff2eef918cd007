"""A Hugging Face model on a simulated cache as a :class:`~oscar_serving.evaluation.client.Client`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oscar_serving.evaluation.client import Completion, Messages
from oscar_serving.evaluation.configuration import Configuration
from oscar_serving.evaluation.model import EvaluatedModel, EvaluationError, SimulatedCache


class SimulatedClient:
    """Answers with a model whose K and V go through a configuration's storage, every query under the position rule.

    The beginning that a prompt has in common with the sequence before is kept, as a prefix cache would.
    """

    def __init__(self, model: EvaluatedModel, configuration: Configuration) -> None:
        self.model = model
        self.name = configuration.name
        self._cache = SimulatedCache(configuration.storage, growing=True)
        self._tokens: list[int] = []
        self._end = _end_tokens(model)

    def encode(self, text: str) -> list[int]:
        """See :class:`~oscar_serving.evaluation.client.Client`."""
        return list(self.model.tokenizer(text).input_ids)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Completion:
        """See :class:`~oscar_serving.evaluation.client.Client`."""
        ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        limit = self.model.max_length
        if not ids or max_tokens < 1 or (limit is not None and len(ids) + max_tokens > limit):
            raise EvaluationError(
                f"{len(ids)} prompt tokens and max_tokens={max_tokens}: at least 1 each, at most {limit} together"
            )
        kept = self._keep(ids)
        hidden = self._extend(ids[kept:])
        generator = torch.Generator().manual_seed(seed)
        generated: list[int] = []
        text = ""
        while True:
            token = _choose(self.model.logits(hidden[-1:])[0], temperature, generator)
            generated.append(token)
            text = self.model.tokenizer.decode(generated, skip_special_tokens=True)
            at = min((text.index(s) for s in stop if s in text), default=None)
            if token in self._end or at is not None or len(generated) == max_tokens:
                break
            hidden = self._extend([token])
        finished = token in self._end or at is not None
        return Completion(text if at is None else text[:at], len(generated), finished, len(ids), kept)

    def chat(
        self,
        messages: Messages,
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Completion:
        """See :class:`~oscar_serving.evaluation.client.Client`."""
        tokenizer = self.model.tokenizer
        if not tokenizer.chat_template:
            raise EvaluationError(f"{self.model.name} has no chat template: ask it to complete a text instead")
        ids = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return self.complete(list(ids), max_tokens=max_tokens, stop=stop, temperature=temperature, seed=seed)

    def forget(self) -> None:
        """Start cold."""
        self._cache.truncate(0)
        self._tokens = []

    def _keep(self, ids: list[int]) -> int:
        """Cut the cache back to what it has in common with ``ids``, at most all but the last token."""
        same = 0
        for mine, new in zip(self._tokens, ids[:-1], strict=False):
            if mine != new:
                break
            same += 1
        self._cache.truncate(same)
        self._tokens = self._tokens[:same]
        return same

    def _extend(self, ids: list[int]) -> Tensor:
        hidden = self.model.extend(torch.tensor(ids), self._cache)
        self._tokens += ids
        return hidden


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits.cpu() / temperature).softmax(-1), 1, generator=generator))


def _end_tokens(model: EvaluatedModel) -> set[int]:
    end: set[int] = set()
    configured: Any = getattr(model.model, "generation_config", None)
    for value in (getattr(configured, "eos_token_id", None), model.tokenizer.eos_token_id):
        end.update([value] if isinstance(value, int) else value or ())
    return end

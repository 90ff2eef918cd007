"""One request while the engine works on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oscar_serving.engines.hf.detokenizer import IncrementalDecoder, StopStrings
from oscar_serving.engines.hf.params import RequestOutput, SamplingParams, TokenLogprob
from oscar_serving.engines.hf.sampling import SamplerState


@dataclass(eq=False)
class Sequence:
    """State of a request.

    Attributes
    ----------
    tokens
        Prompt, then what was generated.
    computed
        Tokens at the start of ``tokens`` whose K and V are in the cache.
    cached
        Prompt tokens that the first admission found in the prefix cache; ``None`` before it.
    prompt_logprobs
        Filled as prefill proceeds, taken away when they are delivered; ``None`` when not asked for.
    """

    request_id: str
    prompt_length: int
    max_tokens: int
    params: SamplingParams
    on_output: Callable[[RequestOutput], None]
    sampler: SamplerState
    decoder: IncrementalDecoder
    stops: StopStrings
    tokens: list[int]
    arrival: int = 0
    computed: int = 0
    cached: int | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt positions are still to be scored, so that all their logits are needed."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.prompt_length

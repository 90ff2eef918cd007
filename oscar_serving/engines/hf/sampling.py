"""From logits to tokens and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oscar_serving.engines.hf.params import SamplingParams, TokenLogprob

#: Candidates looked at before the whole vocabulary is sorted for top-p.
NUCLEUS_CANDIDATES = 256
#: Rows of logits turned into log-probabilities at a time, which bounds the float32 scratch.
LOGPROB_ROWS = 64


class SamplerState:
    """What sampling remembers of one request: its generator and, when penalties ask for it, token counts."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int], *, vocab_size: int, seed: int) -> None:
        self.params = params
        self._generator = torch.Generator().manual_seed(seed)
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._bias: tuple[Tensor, Tensor] | None = None
        if params.repetition_penalty != 1.0:
            self._seen = torch.zeros(vocab_size, dtype=torch.bool)
            self._seen[torch.tensor(list(prompt), dtype=torch.long)] = True
        if params.presence_penalty or params.frequency_penalty:
            self._counts = torch.zeros(vocab_size, dtype=torch.float32)
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), dtype=torch.long)
            self._bias = ids, torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)

    def uniform(self) -> float:
        """The next number of this request's own stream, in [0, 1)."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))

    def penalise(self, logits: Tensor) -> Tensor:
        """Logits float32 ``[vocab]`` after penalties and bias (a new tensor)."""
        params, logits = self.params, logits.clone()
        if self._seen is not None:
            seen = self._seen.to(logits.device)
            factor = params.repetition_penalty
            logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        if self._counts is not None:
            counts = self._counts.to(logits.device)
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        if self._bias is not None:
            ids, bias = (t.to(logits.device) for t in self._bias)
            logits[ids] += bias
        return logits

    def record(self, token: int) -> None:
        """Remember a generated token."""
        if self._seen is not None:
            self._seen[token] = True
        if self._counts is not None:
            self._counts[token] += 1


def sample(logits: Tensor, states: Sequence[SamplerState]) -> list[int | None]:
    """One token a row of ``logits`` ``[rows, vocab]`` (any float type), recorded in the row's state.

    A row depends on its own logits and its own generator only, so a request draws the same alone or in a
    batch. A row that has a NaN gives ``None``.
    """
    logits = logits.float()
    penalised = [row for row, state in enumerate(states) if state.params.penalised]
    if penalised:
        logits = logits.clone()
        for row in penalised:
            logits[row] = states[row].penalise(logits[row])
    best, greedy = logits.max(dim=-1)
    tokens: list[int | None] = []
    for row, (peak, token) in enumerate(zip(best.tolist(), greedy.tolist(), strict=True)):
        state = states[row]
        if peak != peak:
            tokens.append(None)
            continue
        if state.params.temperature > 0.0:
            token = _draw(logits[row].cpu() - peak, state)
        state.record(token)
        tokens.append(token)
    return tokens


def _draw(logits: Tensor, state: SamplerState) -> int:
    """Draw from a row float32 ``[vocab]`` on the CPU with maximum 0, by inverting the cumulative distribution."""
    params = state.params
    weight = torch.exp(logits.double() / params.temperature)  # relative to the most likely token
    ids: Tensor | None = None
    if params.top_k and params.top_k < weight.numel():
        weight, ids = torch.topk(weight, params.top_k)
    if params.top_p < 1.0:
        weight, ids = _nucleus(weight, ids, params.top_p)
    if params.min_p > 0.0:
        weight = torch.where(weight >= params.min_p, weight, 0.0)
    mass = weight.cumsum(0)
    target = state.uniform() * mass[-1]
    index = int(torch.searchsorted(mass, target, right=True).clamp_(max=weight.numel() - 1))
    return int(ids[index]) if ids is not None else index


def _nucleus(weight: Tensor, ids: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest most likely candidates whose share reaches ``top_p``, most likely first, with their ids."""
    goal = top_p * weight.sum()
    if ids is None and weight.numel() > NUCLEUS_CANDIDATES:
        head, head_ids = torch.topk(weight, NUCLEUS_CANDIDATES)
        if head.sum() >= goal:
            weight, ids = head, head_ids
    if ids is None:
        weight, ids = torch.sort(weight, descending=True)
    mass = weight.cumsum(0)
    keep = int(torch.searchsorted(mass, goal)) + 1
    return weight[:keep], ids[:keep]


def token_logprobs(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities of ``tokens`` and of the ``tops[row]`` best, from raw ``logits`` ``[rows, vocab]``.

    Both come from the same float32 row, so that a token that is also the most likely one has exactly equal
    numbers.
    """
    entries: list[TokenLogprob] = []
    for start in range(0, len(tokens), LOGPROB_ROWS):
        rows = slice(start, start + LOGPROB_ROWS)
        logprobs = torch.log_softmax(logits[rows].float(), dim=-1)
        chosen = torch.tensor(list(tokens[rows]), dtype=torch.long, device=logits.device)
        values = logprobs.gather(-1, chosen[:, None]).squeeze(-1).tolist()
        width = min(max(tops[rows]), logprobs.shape[-1])
        best, ids = (t.tolist() for t in torch.topk(logprobs, width)) if width else ([[]] * len(values),) * 2
        for token, value, top, row, row_ids in zip(tokens[rows], values, tops[rows], best, ids, strict=True):
            entries.append(TokenLogprob(token, value, tuple(zip(row_ids[:top], row[:top], strict=True))))
    return entries

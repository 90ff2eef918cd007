"""How much a candidate moves the attention output on held-out tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oscar_serving.calibration.candidates import Candidate
from oscar_serving.calibration.capture import LayerCall
from oscar_serving.calibration.moments import quantized
from oscar_serving.codec import dequantize, quantize
from oscar_serving.config import OscarConfig


def sample_queries(call: LayerCall, config: OscarConfig, count: int) -> Tensor:
    """Up to ``count`` evenly spaced positions of queries that read from the INT2 store (of any, if none does)."""
    first = config.sink + config.recent
    if first >= call.tokens:
        first = 0
    return torch.linspace(first, call.tokens - 1, min(count, call.tokens - first), device=call.k.device).long()


def round_trip(x: Tensor, bits: int, shrink: Tensor | float, unit: Tensor, config: OscarConfig) -> Tensor:
    """``[heads, tokens, d]`` rotated rows as the INT2 store returns them; ``shrink`` and ``unit`` ``[heads]``."""
    group = x.shape[-1] // config.groups(x.shape[-1])
    unit = unit[:, None].expand(x.shape[:2])
    shrink = torch.as_tensor(shrink, device=x.device).reshape(-1, 1).expand(x.shape[:2])
    stored = quantize(x, bits, group, shrink=shrink, unit=unit, scale_dtype=config.scale_dtype, levels=config.levels)
    return dequantize(*stored, unit=unit, bits=bits, levels=config.levels)


class OutputErrors:
    """Squared errors of one layer's attention output, one a (candidate, shrink, KV head).

    Exact probabilities and outputs of the sampled queries are computed once; a candidate then quantizes K or V alone.
    """

    def __init__(self, call: LayerCall, config: OscarConfig, count: int) -> None:
        self.call, self.config = call, config
        self.queries = sample_queries(call, config, count)
        self.q = call.grouped_q(self.queries)
        self.keys = call.span(self.queries)
        self.k = call.k[:, self.keys].float()
        self.v = call.v[:, self.keys].float()
        self.seen = call.seen(self.queries, self.keys)
        self.score = call.scores(self.q, self.k, self.seen)
        self.probability = call.softmax(self.score)
        self.output = self.probability @ self.v[:, None]
        self.read = quantized(call, self.queries, self.keys, config)

    def of_k(self, candidates: Sequence[Candidate], shrinks: Sequence[float], bits: int) -> Tensor:
        """Float64 ``[candidates, shrinks, heads]``: ``sum |S^ v - S v|^2`` with K quantized."""
        result = []
        for candidate in candidates:
            rotated, q = candidate.apply(self.k), self.q @ candidate.query[:, None]
            for shrink in shrinks:
                error = round_trip(rotated, bits, shrink, candidate.unit, self.config) - rotated
                result.append(self._output_error(q, error))
        return torch.stack(result).view(len(candidates), len(shrinks), -1)

    def of_v(self, candidates: Sequence[Candidate], shrinks: Sequence[float], bits: int) -> Tensor:
        """Float64 ``[candidates, shrinks, heads]``: ``sum |S v^ - S v|^2`` with V quantized."""
        result = []
        read = self.probability * self.read
        for candidate in candidates:
            rotated = candidate.apply(self.v)
            for shrink in shrinks:
                error = round_trip(rotated, bits, shrink, candidate.unit, self.config) - rotated
                result.append((read @ error[:, None]).double().square().sum((1, 2, 3)))
        return torch.stack(result).view(len(candidates), len(shrinks), -1)

    def _output_error(self, q: Tensor, k_error: Tensor) -> Tensor:
        """Float64 ``[heads]`` for rotated queries and errors of rotated keys."""
        call = self.call
        if call.spec.softcap is None:
            score = self.score + (q @ k_error.mT[:, None]) * (self.read * call.spec.scale)
        else:
            exact = self.q @ self.k.mT[:, None] + (q @ k_error.mT[:, None]) * self.read
            cap = call.spec.softcap
            score = (cap * torch.tanh(exact * (call.spec.scale / cap))).masked_fill_(~self.seen, -torch.inf)
        output = call.softmax(score) @ self.v[:, None]
        return (output - self.output).double().square().sum((1, 2, 3))

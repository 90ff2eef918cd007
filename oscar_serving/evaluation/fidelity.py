"""Fidelity to the unquantized model, token by token: KL divergence, top-1 agreement, perplexity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Upper ends of the context buckets; the last one is open.
BUCKET_ENDS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
#: Quantile of the KL divergence that is reported as the tail.
TAIL = 0.999


class TokenFidelity(NamedTuple):
    """Per position of one sequence, float32 ``[tokens]``: KL divergence (nats), agreement (0 or 1), and the negative
    log likelihood of the next token under the reference and under the model judged."""

    kld: Tensor
    agrees: Tensor
    reference_nll: Tensor
    nll: Tensor


def compare(reference: Tensor, other: Tensor, targets: Tensor) -> TokenFidelity:
    """Compare log probabilities ``[tokens, vocabulary]`` (natural, normalised); ``targets`` int64 ``[tokens]``.

    The KL divergence is ``sum p_ref (log p_ref - log p)``; rounding below zero counts as zero.
    """
    kld = ((reference - other) * reference.exp()).sum(-1).clamp_(min=0)
    agrees = (reference.argmax(-1) == other.argmax(-1)).float()
    nll = -other.gather(-1, targets[:, None])[:, 0]
    reference_nll = -reference.gather(-1, targets[:, None])[:, 0]
    return TokenFidelity(*(t.cpu() for t in (kld, agrees, reference_nll, nll)))


def concatenate(parts: list[TokenFidelity]) -> TokenFidelity:
    """Chunks of one sequence, one after the other."""
    return TokenFidelity(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


@dataclass(frozen=True)
class Estimate:
    """A mean over sequences and its standard error; the error of a single sequence is NaN."""

    value: float
    error: float

    @classmethod
    def of(cls, per_sequence: list[float]) -> Estimate:
        """Mean of one value per sequence."""
        n = len(per_sequence)
        mean = math.fsum(per_sequence) / n
        if n < 2:
            return cls(mean, math.nan)
        variance = math.fsum((x - mean) ** 2 for x in per_sequence) / (n - 1)
        return cls(mean, math.sqrt(variance / n))

    def to_dict(self) -> dict[str, float | None]:
        """JSON form; an unknown error is null."""
        return {"value": self.value, "error": None if math.isnan(self.error) else self.error}


def summarize(sequences: list[TokenFidelity], first: int = 0, last: int | None = None) -> dict[str, Any]:
    """Metrics over the positions ``first … last`` of all sequences; a position ``p`` has ``p + 1`` tokens of context.

    Standard errors are over sequences, since the tokens of one sequence are not independent. Sequences must be of one
    length.
    """
    cut = [TokenFidelity(*(t[first:last] for t in sequence)) for sequence in sequences]
    kld = torch.cat([s.kld for s in cut])
    change = Estimate.of([float((s.nll - s.reference_nll).double().mean()) for s in cut])
    nll = Estimate.of([float(s.nll.double().mean()) for s in cut])
    reference = math.fsum(float(s.reference_nll.double().mean()) for s in cut) / len(cut)
    ratio = math.exp(min(change.value, 700.0))
    return {
        "positions": len(kld),
        "kld_mean": Estimate.of([float(s.kld.double().mean()) for s in cut]).to_dict(),
        "kld_median": float(kld.median()),
        "kld_tail": _quantile(kld, TAIL),
        "top1": Estimate.of([float(s.agrees.double().mean()) for s in cut]).to_dict(),
        "perplexity": math.exp(min(nll.value, 700.0)),
        "reference_perplexity": math.exp(min(reference, 700.0)),
        # The change is per sequence, so that how hard a text is does not enter its error.
        "perplexity_change": Estimate(ratio - 1, ratio * change.error).to_dict(),
    }


def buckets(tokens: int) -> list[tuple[int, int]]:
    """Half-open position ranges of the context buckets of sequences of ``tokens``."""
    ends = [end for end in BUCKET_ENDS if end < tokens] + [tokens]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _quantile(values: Tensor, q: float) -> float:
    """Quantile with linear interpolation, for any number of values."""
    ordered = values.double().sort().values
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (at - low))

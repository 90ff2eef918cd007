"""Queries, keys and values of a Hugging Face model as its attention layers see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oscar_serving.attention.spec import AttentionSpec

NAME = "oscar_capture"
_BLOCK = 256


class CaptureError(ValueError):
    """The model's attention cannot be captured; the message says why."""


@dataclass(frozen=True)
class LayerCall:
    """One sequence in one attention layer, after RoPE and QK-norm.

    Attributes
    ----------
    layer
        Index of the layer.
    q, k, v
        ``[query heads, tokens, d]``, ``[heads, tokens, d]`` twice, in the model's type; query heads are grouped by KV
        head. Positions are 0, 1, ….
    spec
        Scale, softcap and sliding window.
    sinks
        ``[query heads]`` learned sink logits, or ``None``.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    spec: AttentionSpec
    sinks: Tensor | None = None

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.k.shape[0]

    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return self.k.shape[1]

    def span(self, queries: Tensor) -> Tensor:
        """Positions of the keys that the (ascending) queries at these positions see between them."""
        window = self.spec.sliding_window
        first = 0 if window is None else max(0, int(queries[0]) - window + 1)
        return torch.arange(first, int(queries[-1]) + 1, device=self.k.device)

    def seen(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Bool ``[queries, keys]``: which of the keys at these positions each query sees."""
        seen = keys <= queries[:, None]
        if self.spec.sliding_window is not None:
            seen &= keys > queries[:, None] - self.spec.sliding_window
        return seen

    def scores(self, q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
        """Scores ``[heads, group, queries, keys]`` of ``q [heads, group, queries, d]`` and ``k [heads, keys, d]``."""
        score = (q @ k.mT[:, None]) * self.spec.scale
        if self.spec.softcap is not None:
            score = self.spec.softcap * torch.tanh(score / self.spec.softcap)
        return score.masked_fill_(~seen, -math.inf)

    def softmax(self, score: Tensor) -> Tensor:
        """Probabilities of :meth:`scores`; learned sinks take their share."""
        if self.sinks is None:
            return score.softmax(-1)
        sink = self.sinks.float().view(self.heads, -1, 1, 1).expand(*score.shape[:-1], 1)
        return torch.cat([score, sink], -1).softmax(-1)[..., :-1]

    def grouped_q(self, queries: Tensor) -> Tensor:
        """Queries at some positions, float32 ``[heads, group, len(queries), d]``."""
        return self.q[:, queries].float().reshape(self.heads, -1, len(queries), self.q.shape[-1])

    def output(self) -> Tensor:
        """Exact attention output, float32 ``[query heads, tokens, d]``, in blocks of queries."""
        blocks = []
        for queries in torch.split(torch.arange(self.tokens, device=self.k.device), _BLOCK):
            keys = self.span(queries)
            score = self.scores(self.grouped_q(queries), self.k[:, keys].float(), self.seen(queries, keys))
            blocks.append((self.softmax(score) @ self.v[:, keys].float()[:, None]).flatten(0, 1))
        return torch.cat(blocks, 1)


#: Told of every call; may return the attention output, ``[query heads, tokens, d]``, if it computed it anyway.
Receiver = Callable[[LayerCall], Tensor | None]
_RECEIVER: list[Receiver] = []


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Exact causal attention that shows each call to the receiver. See :class:`transformers.AttentionInterface`."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise CaptureError("capture takes one whole sequence at a time, without a cache")
    if key.shape[-1] != value.shape[-1]:
        raise CaptureError(f"K has head size {key.shape[-1]} and V {value.shape[-1]}: not supported")
    spec = AttentionSpec(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        sliding_window=sliding_window,
    )
    call = LayerCall(int(module.layer_idx), query[0], key[0], value[0], spec, s_aux)  # type: ignore[arg-type]
    output = _RECEIVER[-1](call)
    if output is None:
        output = call.output()
    return output.transpose(0, 1)[None].to(query.dtype), None


@contextmanager
def capturing(model: Any, receive: Receiver) -> Iterator[None]:
    """Call ``receive`` with every layer of every forward pass inside the block; the model is restored after it.

    Raises
    ------
    CaptureError
        The model has attention code of its own that cannot be replaced.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    if not getattr(model, "_supports_attention_backend", False):
        raise CaptureError(
            f"{type(model).__name__} has attention code of its own that cannot be replaced; not supported"
        )
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, lambda *_, **__: None)
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    _RECEIVER.append(receive)
    try:
        yield
    finally:
        _RECEIVER.pop()
        model.set_attn_implementation(before)


def forward(model: Any, tokens: Tensor) -> None:
    """Send one sequence ``[tokens]`` through the model without computing logits of more than one position."""
    with torch.inference_mode():
        model(input_ids=tokens[None].to(model.device), use_cache=False, logits_to_keep=1)

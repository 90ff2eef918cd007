"""The attention function that Hugging Face models call, and the recording of how they call it.

Models dispatch attention by name (``config._attn_implementation``). Under the name :data:`ATTENTION` they
reach :func:`oscar_attention` with one layer's q, k and v after RoPE and QK norm. No mask function of that
name is registered on purpose: transformers then builds no mask at all, and none is needed, since a batch is
one row of packed tokens without padding and the kernels know each token's request and position from the
tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from oscar_serving.attention.base import BatchTables, LayerCache
from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.engines.apple.paged import SrftLayer

#: Name under which models find the attention function.
ATTENTION = "oscar"
#: Keyword arguments of an attention call that change its result and that the cache's kernels do not know.
FOREIGN_ARGUMENTS = (
    "s_aux",
    "sinks",
    "position_bias",
    "alibi",
    "attention_bias",
    "block_mask",
    "cu_seq_lens_q",
)


@dataclass
class StepTables:
    """The tables of the step being computed; all layers of an engine share one."""

    tables: BatchTables | None = None


@dataclass(frozen=True)
class AttachedLayer:
    """What an attention module needs to store and attend; set on the module as ``oscar_layer``."""

    cache: LayerCache | SrftLayer
    backend: Any  # of the layer's codec: AttentionBackend or SrftBackend
    step: StepTables


@dataclass(frozen=True)
class RecordedCall:
    """How one attention module called its attention function."""

    module: nn.Module
    index: int
    query_heads: int
    heads: int
    head_dim: int
    value_dim: int
    spec: AttentionSpec
    causal: bool
    foreign: tuple[str, ...]


_recording: ContextVar[list[RecordedCall] | None] = ContextVar("oscar_recording", default=None)


@contextmanager
def recording() -> Iterator[list[RecordedCall]]:
    """Within, attention calls are computed plainly (packed, causal, in float32) and noted in the list."""
    calls: list[RecordedCall] = []
    token = _recording.set(calls)
    try:
        yield calls
    finally:
        _recording.reset(token)


def oscar_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store and attend: ``query`` ``[1, query heads, T, d]``, ``key, value`` ``[1, heads, T, d]``.

    Returns ``[1, T, query heads, d]`` in the query's type, and no weights.
    """
    calls = _recording.get()
    if calls is not None:
        return _record(calls, module, query, key, value, scaling, kwargs)
    layer: AttachedLayer = module.oscar_layer  # type: ignore[assignment]
    tables = layer.step.tables
    assert tables is not None
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    layer.backend.store(layer.cache, k, v, tables)
    output: Tensor = layer.backend.attend(layer.cache, q, k, v, tables)
    return output.to(query.dtype)[None], None


def _record(
    calls: list[RecordedCall],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    _, query_heads, tokens, head_dim = query.shape
    heads = key.shape[1]
    spec = AttentionSpec(
        scale=float(scaling) if scaling is not None else head_dim**-0.5,
        softcap=kwargs.get("softcap"),
        sliding_window=kwargs.get("sliding_window"),
    )
    foreign = tuple(name for name in FOREIGN_ARGUMENTS if kwargs.get(name) is not None)
    index = getattr(module, "layer_idx", -1)
    causal = getattr(module, "is_causal", True) is not False
    calls.append(RecordedCall(module, index, query_heads, heads, head_dim, value.shape[-1], spec, causal, foreign))
    # Two equal halves, each a sequence of its own.
    rows = torch.arange(tokens, device=query.device)
    half = rows // (tokens // 2)
    seen = (rows[:, None] >= rows) & (half[:, None] == half)
    ratio = query_heads // heads
    k, v = (t.float().repeat_interleave(ratio, 1) for t in (key, value))
    scores = (query.float() @ k.mT * spec.scale).masked_fill(~seen, torch.finfo(torch.float32).min)
    return (scores.softmax(-1) @ v).transpose(1, 2).to(query.dtype), None


AttentionInterface.register(ATTENTION, oscar_attention)

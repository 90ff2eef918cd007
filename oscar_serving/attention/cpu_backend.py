"""The compiled CPU kernel behind the attention seam."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import torch
from torch import Tensor

from oscar_kernels.cpu import Batch, Kernels, Layer
from oscar_serving.attention.base import NULL_PAGE, BatchTables, LayerCache
from oscar_serving.attention.torch_backend import host_pages

#: New tokens of a request up to which the decode kernel serves it; it works best with few.
MAX_DECODE_TOKENS = 16


class CpuBackend:
    """Store, decode and prefill in compiled code.

    Raises
    ------
    oscar_kernels.cpu.BuildError
        The kernels cannot be built here.
    """

    name = "cpu"

    def __init__(self) -> None:
        self.kernels = Kernels()

    def store(self, layer: LayerCache, k: Tensor, v: Tensor, tables: BatchTables) -> None:
        """Write new ``k, v`` ``[T, heads, d]`` (model space) to both stores."""
        few, _ = _batches(layer, tables)
        self.kernels.store(describe(layer), few, _rows(k), _rows(v))

    def attend(self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, tables: BatchTables) -> Tensor:
        """Attend for ``q`` ``[T, query heads, d]``; see :class:`~oscar_serving.attention.base.AttentionBackend`."""
        few, chunks = _batches(layer, tables)
        q = _rows(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        if few.request_count:
            self.kernels.decode(describe(layer), few, q, out)
        if chunks.request_count:
            self.kernels.prefill(describe(layer), chunks, q, _rows(k), _rows(v), out)
        return out


def _rows(x: Tensor) -> Tensor:
    """``x`` with contiguous channels, in a type that the kernels know."""
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def describe(layer: LayerCache) -> Layer:
    """The kernels' description of ``layer``, made once."""
    described: Layer | None = layer.derived.get("cpu")
    if described is None:
        layout, config, transform = layer.layout, layer.layout.config, layer.transform
        eye = torch.eye(layout.head_dim).expand_as(transform.k_rotation)
        rotate = not all(
            torch.equal(r, eye) for r in (transform.k_rotation, transform.q_rotation, transform.v_rotation)
        )
        rotate |= bool(transform.k_mean.any() or transform.v_mean.any())
        described = Layer.of(
            layer.pages,
            layer.windows,
            **{field.name: getattr(transform, field.name) for field in fields(transform)},
            section_bytes=layout.section_bytes,
            k_bits=config.k_bits,
            v_bits=config.v_bits,
            groups=layout.groups,
            meta_dtype=layout.meta_dtype,
            rotate=rotate,
            windows_only=layer.windows_only,
            sink=config.sink,
            recent=config.recent,
            sliding_window=layer.spec.sliding_window,
            scale=layer.spec.scale,
            softcap=layer.spec.softcap,
        )
        layer.derived["cpu"] = described
    return described


def _batches(layer: LayerCache, tables: BatchTables) -> tuple[Batch, Batch]:
    """The kernels' tables, with the requests that decode serves and with those that prefill does."""
    size = layer.layout.config.page_size
    key = f"cpu{size}"
    if key not in tables.derived:
        starts, lengths, raw_starts = tables.host
        few: list[int] = []
        chunks: list[int] = []
        for b, (start, end) in enumerate(pairwise(starts)):
            first = lengths[b] - (end - start)
            if raw_starts[b] < first:
                raise ValueError(
                    f"chunk_start={raw_starts[b]}: keys before position {first} are not among this step's "
                    f"{end - start} tokens"
                )
            # Decode reads new tokens from the window store; prefill has them at hand.
            new_pages = host_pages(tables)[1][b][first // size : -(-lengths[b] // size)]
            by_rule = raw_starts[b] >= lengths[b] and NULL_PAGE not in new_pages
            if end > start:
                (few if by_rule and end - start <= MAX_DECODE_TOKENS else chunks).append(b)
        pointers = (
            tables.query_start,
            tables.lengths,
            tables.chunk_start,
            tables.page_table,
            tables.window_table,
        )
        tables.derived[key] = Batch.of(*pointers, few), Batch.of(*pointers, chunks)
    result: tuple[Batch, Batch] = tables.derived[key]
    return result

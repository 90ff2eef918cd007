"""The compiled CPU kernel behind the attention seam."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

import torch
from torch import Tensor

from oscar_kernels.cpu import Batch, Kernels, Layer
from oscar_serving.attention.base import NULL_PAGE, BatchTables, LayerCache
from oscar_serving.attention.torch_backend import attend_request, host_pages, reads_own

#: New tokens of a request up to which the decode kernel serves it; longer chunks are matrix products.
MAX_DECODE_TOKENS = 16


class CpuBackend:
    """Store and decode in compiled code, prefill chunks as matrix products.

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
        batch, _ = _batch(layer, tables)
        self.kernels.store(describe(layer), batch, _rows(k), _rows(v))

    def attend(self, layer: LayerCache, q: Tensor, k: Tensor, v: Tensor, tables: BatchTables) -> Tensor:
        """Attend for ``q`` ``[T, query heads, d]``; see :class:`~oscar_serving.attention.base.AttentionBackend`."""
        batch, chunks = _batch(layer, tables)
        q = _rows(q)
        out = torch.empty(q.shape, dtype=q.dtype)
        if batch.request_count:
            self.kernels.decode(describe(layer), batch, q, out)
        if chunks:
            own_k, own_v = k, v
            if reads_own(tables):
                own_k = self.kernels.rotate(describe(layer), _rows(k), value=False)
                own_v = self.kernels.rotate(describe(layer), _rows(v), value=True)
            for b, start, end in chunks:
                rows = slice(start, end)
                out[rows] = attend_request(layer, q[rows], k[rows], v[rows], own_k[rows], own_v[rows], tables, b)
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
        rotate = not all(torch.equal(r, eye) for r in (transform.k_rotation, transform.v_rotation))
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


def _batch(layer: LayerCache, tables: BatchTables) -> tuple[Batch, list[tuple[int, int, int]]]:
    """The kernels' tables with the requests that decode serves, and the others as (request, first row, end)."""
    size = layer.layout.config.page_size
    key = f"cpu{size}"
    if key not in tables.derived:
        starts, lengths, raw_starts = tables.host
        few: list[int] = []
        chunks: list[tuple[int, int, int]] = []
        for b, (start, end) in enumerate(pairwise(starts)):
            first = lengths[b] - (end - start)
            if end - start <= MAX_DECODE_TOKENS and raw_starts[b] >= lengths[b]:
                # New tokens are read from the window store; where they have no page there, from the step's own K and V.
                pages = host_pages(tables)[1][b][first // size : -(-lengths[b] // size)]
                if end > start and NULL_PAGE not in pages:
                    few.append(b)
                    continue
            if end > start:
                chunks.append((b, start, end))
        batch = Batch.of(tables.query_start, tables.lengths, tables.page_table, tables.window_table, few)
        tables.derived[key] = batch, chunks
    result: tuple[Batch, list[tuple[int, int, int]]] = tables.derived[key]
    return result

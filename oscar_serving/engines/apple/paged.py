"""The SRFT codec over the embedded engine's paged pool: one layer's pages, and the backend that fills and reads them.

Every token is read from its codes, the new ones included, so there are no windows, and a result does not depend on how
a prompt is cut into chunks or on prefix hits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from oscar_kernels.cpu.srft import PagedRows
from oscar_serving.attention.base import BatchTables
from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.attention.torch_backend import token_slots
from oscar_serving.codec.signed import Signed
from oscar_serving.codec.srft_int4 import SideTransform, SrftConfig
from oscar_serving.engines.apple.attention import attend_rotated, per_head
from oscar_serving.engines.apple.compiled import MAX_NEW_TOKENS, CompiledRows, cpu_kernels
from oscar_serving.engines.apple.encode import encode_into


@dataclass(frozen=True)
class SrftLayer:
    """Pages of one attention layer.

    Attributes
    ----------
    k, v
        Codes uint8 ``[pages, heads, page_size, d * bits / 8]`` and scales float16 ``[pages, heads, page_size,
        groups]``; page 0 is never used.
    k_side, v_side
        Rotation and per-channel factors.
    """

    k: Signed
    v: Signed
    k_side: SideTransform
    v_side: SideTransform
    config: SrftConfig
    spec: AttentionSpec

    @classmethod
    def allocate(
        cls, config: SrftConfig, spec: AttentionSpec, *, heads: int, head_dim: int, pages: int, page_size: int,
        device: torch.device | str = "cpu",
    ) -> SrftLayer:  # fmt: skip
        """Zeroed pages, factors of one."""
        shape, groups = (pages, heads, page_size), config.groups(head_dim)
        k, v = (
            Signed(
                torch.zeros(*shape, head_dim * bits // 8, dtype=torch.uint8, device=device),
                torch.zeros(*shape, groups, dtype=torch.float16, device=device),
            )
            for bits in (config.k_bits, config.v_bits)
        )
        side = SideTransform.build(config.matrix(head_dim), torch.ones(heads, head_dim)).to(device)
        return cls(k, v, side, side, config, spec)

    @property
    def pages(self) -> Tensor:
        """The K codes: their device is the layer's."""
        return self.k.codes

    @property
    def head_dim(self) -> int:
        """Channels of a head."""
        return self.k_side.rotation.shape[-1]

    @property
    def page_size(self) -> int:
        """Tokens a page."""
        return self.k.codes.shape[2]

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the compiled kernels take, float32 ``[heads, d, d]``: encode K, encode V, read K, read V transposed."""
        k, v = self.k_side, self.v_side
        return tuple(m.contiguous() for m in (k.encode_matrix, v.encode_matrix, k.read_matrix, v.read_matrix.mT))  # type: ignore[return-value]

    @cached_property
    def rows(self) -> PagedRows | None:
        """The pages as the compiled kernels take them; ``None`` where they do not serve this layer."""
        known = CompiledRows.takes(self.head_dim, self.config.groups(self.head_dim))
        if self.pages.device.type != "cpu" or not known or cpu_kernels() is None:
            return None
        return PagedRows(*self.k, *self.v, self.head_dim)


class SrftBackend:
    """Store and attend on :class:`SrftLayer`; see :class:`~oscar_serving.attention.base.AttentionBackend`."""

    def __init__(self, device: torch.device) -> None:
        compiled = device.type == "cpu" and cpu_kernels() is not None
        self.name = "srft metal" if device.type == "mps" else "srft cpu" if compiled else "srft torch"

    def store(self, layer: SrftLayer, k: Tensor, v: Tensor, tables: BatchTables) -> None:
        """Encode new ``k, v`` ``[T, heads, d]`` into their pages."""
        slots = token_slots(tables, layer.page_size)
        sides = (layer.k, k, layer.k_side, layer.config.k_bits), (layer.v, v, layer.v_side, layer.config.v_bits)
        for value, (pages, x, side, bits) in enumerate(sides):
            if layer.rows is not None and (kernels := cpu_kernels()):
                kernels.store(layer.rows, x, layer.matrices[value], slots.page, slots.slot, value=bool(value))
                continue
            new = Signed(*(p.new_empty(1, p.shape[1], x.shape[0], p.shape[3]) for p in pages))
            encode_into(side, x.transpose(0, 1)[None], new, 0, bits, layer.config)
            for page, rows in zip(pages, new, strict=True):
                page[slots.page, :, slots.slot] = rows[0].transpose(0, 1)

    def attend(self, layer: SrftLayer, q: Tensor, k: Tensor, v: Tensor, tables: BatchTables) -> Tensor:
        """Attend for ``q`` ``[T, query heads, d]``; ``k, v`` have been stored and are not looked at."""
        starts, lengths, _ = tables.host
        counts = [end - start for start, end in pairwise(starts)]
        compiled = layer.rows is not None
        few = [b for b, n in enumerate(counts) if compiled and 0 < n <= MAX_NEW_TOKENS]
        out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
        if few:
            self._decode(layer, q, tables, few, out)
        for b in sorted({b for b, n in enumerate(counts) if n} - set(few)):
            rows = slice(starts[b], starts[b + 1])
            out[rows] = self._request(layer, q[rows], tables.page_table[b], lengths[b])
        return out.to(q.dtype)

    def _decode(self, layer: SrftLayer, q: Tensor, tables: BatchTables, few: list[int], out: Tensor) -> None:
        """Requests of few new tokens, straight from the pages in compiled code."""
        kernels = cpu_kernels()
        assert kernels is not None
        assert layer.rows is not None
        spec = layer.spec
        kernels.attend(
            layer.rows, q, *layer.matrices[2:], tables.page_table, *_int64(tables), torch.tensor(few),
            scale=spec.scale, window=spec.sliding_window or 0, softcap=spec.softcap or 0.0, out=out,
        )  # fmt: skip

    def _request(self, layer: SrftLayer, q: Tensor, pages: Tensor, length: int) -> Tensor:
        """One request; its packed rows, no more than a window's, are put side by side first."""
        spec, size, tokens, heads = layer.spec, layer.page_size, q.shape[0], layer.k.codes.shape[1]
        begin = 0 if spec.sliding_window is None else max(0, length - tokens - spec.sliding_window + 1)
        used = pages[begin // size : -(-length // size)].long()
        k, v = (
            Signed(*(p[used].transpose(0, 1).flatten(1, 2)[None].contiguous() for p in side))
            for side in (layer.k, layer.v)
        )
        rotated = per_head(q.transpose(0, 1)[None].float() * spec.scale, layer.k_side.read_matrix, heads)
        bits = layer.config.k_bits, layer.config.v_bits
        window, softcap = spec.sliding_window or 0, spec.softcap or 0.0
        output = attend_rotated(rotated, k, v, None, begin % size, length - begin, window, softcap, bits)
        return per_head(output, layer.v_side.read_matrix.mT, heads)[0].transpose(0, 1)


def _int64(tables: BatchTables) -> tuple[Tensor, Tensor]:
    """Lengths and query starts as the compiled kernels take them, made once for all layers of a step."""
    if "srft" not in tables.derived:
        tables.derived["srft"] = torch.tensor(tables.host[1]), torch.tensor(tables.host[0])
    found: tuple[Tensor, Tensor] = tables.derived["srft"]
    return found

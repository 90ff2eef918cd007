"""Tiles of one request's keys and values, and the softmax that is built up tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from oscar_serving.attention.base import NULL_PAGE, LayerCache
from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.cache.rule import reads_window
from oscar_serving.codec import dequantize, unpack

FP8 = torch.float8_e4m3fn


def aligned(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Cut ``start … stop`` at the multiples of ``size``."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield start, end
        start = end


class Tier(NamedTuple):
    """Keys and values float32 ``[heads, tokens, d]``, and which a query reads: bool ``[queries, 1, tokens]`` or all."""

    k: Tensor
    v: Tensor
    select: Tensor | None


class KeyTile:
    """Keys and values of the positions ``start … stop`` of one request, in cache space, read when first asked for.

    Parameters
    ----------
    pages, window_pages
        Page of each position's page index, for the pages that the tile touches.
    own_k, own_v
        ``[n, heads, d]``: this step's rotated K and V, rounded to the window type, for positions ``first …``.
    """

    def __init__(
        self,
        layer: LayerCache,
        start: int,
        stop: int,
        pages: list[int],
        window_pages: list[int],
        first: int,
        own_k: Tensor,
        own_v: Tensor,
    ) -> None:
        self._layer, self.start, self.stop, self._first = layer, start, stop, first
        self._pages, self._window_pages = pages, window_pages
        self._own = own_k, own_v
        self._device = layer.windows.device

    def tiers(self, q0: int, q1: int, stop: int) -> list[Tier]:
        """What the queries ``q0 … q1`` read of the keys before ``stop``: one tier, or both with masks."""
        config, count = self._layer.layout.config, stop - self.start
        sink, recent = config.sink, config.recent
        # Whether any of the queries may read any of the keys from either tier.
        window = self.start < sink or stop - 1 > q0 - recent
        quantized = not self._layer.windows_only and (
            self.present is not None or max(self.start, sink) < min(stop, q1 - recent)
        )
        select = None
        if window and quantized:
            key, query = (torch.arange(*r, device=self._device) for r in ((self.start, stop), (q0, q1)))
            select = reads_window(key, query[:, None], sink=sink, recent=recent)
            if self.present is not None:
                select = select & self.present[:count]
            select = select[:, None]
        tiers = []
        if window:
            k, v = self.window
            tiers.append(Tier(k[:, :count], v[:, :count], select))
        if quantized:
            k, v = self.quantized
            tiers.append(Tier(k[:, :count], v[:, :count], None if select is None else ~select))
        return tiers

    @cached_property
    def present(self) -> Tensor | None:
        """bool ``[tokens]``: which tokens the window tier has; ``None`` when it has them all."""
        size = self._layer.layout.config.page_size
        first_page = self.start // size
        end = min(self.stop, self._first)
        if all(p != NULL_PAGE for i, p in enumerate(self._window_pages) if (first_page + i) * size < end):
            return None
        here = torch.tensor([p != NULL_PAGE for p in self._window_pages], device=self._device)
        own = torch.arange(self.start, self.stop, device=self._device) >= self._first
        return self._cut(here.repeat_interleave(size), 0) | own

    @cached_property
    def window(self) -> tuple[Tensor, Tensor]:
        """K and V of the window tier, float32 ``[heads, tokens, d]``; zeros where there is none."""
        own = max(self.start, self._first)
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        if self.start < own:
            index = torch.tensor(self._window_pages, device=self._device)
            pages = self._layer.windows[index].float()
            if NULL_PAGE in self._window_pages:  # the null page may hold anything
                pages[index == NULL_PAGE] = 0.0
            for part, kv in zip(parts, pages.unbind(1), strict=True):
                part.append(self._cut(kv.transpose(0, 1).flatten(1, 2), 1)[:, : own - self.start])
        if own < self.stop:
            for part, x in zip(parts, self._own, strict=True):
                part.append(x[own - self._first : self.stop - self._first].transpose(0, 1).float())
        k, v = (torch.cat(part, 1) for part in parts)
        return k, v

    @cached_property
    def quantized(self) -> tuple[Tensor, Tensor]:
        """K and V of the INT2 tier read back, float32 ``[heads, tokens, d]``."""
        layer, layout = self._layer, self._layer.layout
        index = torch.tensor(self._pages, device=self._device)
        k_codes, k_meta, v_codes, v_meta = (
            self._cut(view[index].transpose(0, 1).flatten(1, 2), 1) for view in layout.byte_views(layer.pages)
        )
        result = []
        for codes, meta, bits, unit in (
            (k_codes, k_meta, layout.config.k_bits, layer.transform.k_unit),
            (v_codes, v_meta, layout.config.v_bits, layer.transform.v_unit),
        ):
            value = _meta(meta, layout.meta_dtype)
            value = value.view(*value.shape[:-1], layout.groups, 2)
            result.append(dequantize(unpack(codes, bits), value, unit=unit[:, None], bits=bits))
        return result[0], result[1]

    def _cut(self, x: Tensor, dim: int) -> Tensor:
        """The tile's tokens of ``x``, which has those of whole pages."""
        offset = self.start % self._layer.layout.config.page_size
        return x.narrow(dim, offset, self.stop - self.start)


def _meta(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Scale and minimum as float, from bytes ``[..., bytes]``; FP8 by table, since not every device has the type."""
    if dtype != FP8:
        return stored.contiguous().view(dtype)
    table = torch.arange(256, dtype=torch.uint8).view(FP8).float().to(stored.device)
    return table[stored.int()]


class OnlineSoftmax:
    """Running softmax of the queries of one request.

    Attributes
    ----------
    q
        float32 ``[heads, n, ratio, d]``, the queries in the space of the keys that come next.
    output, weight
        float32 ``[heads, n, ratio, d]`` and ``[heads, n, ratio]``: weighted sum of the values so far and sum of the
        weights, both relative to the highest score so far.
    """

    def __init__(self, q: Tensor, first: int, spec: AttentionSpec, *, block: int) -> None:
        self.q, self._first, self._spec, self._block = q, first, spec, block
        self.output = torch.zeros_like(q)
        self.weight = torch.zeros(q.shape[:-1], device=q.device)
        self._highest = torch.full_like(self.weight, -torch.inf)

    def add_cached(self, tile: KeyTile, bias: Tensor | None) -> None:
        """Take in a tile by the position rule; ``bias`` ``[heads, n, ratio]`` is added to every score."""
        for q0, q1, stop in self._blocks(tile.start, tile.stop):
            self._update(q0, q1, tile.start, tile.tiers(q0, q1, stop), bias)

    def add_raw(self, k: Tensor, v: Tensor, start: int) -> None:
        """Take in keys and values float32 ``[heads, tokens, d]`` from position ``start`` as they are."""
        for q0, q1, stop in self._blocks(start, start + k.shape[1]):
            self._update(q0, q1, start, [Tier(k[:, : stop - start], v[:, : stop - start], None)], None)

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Query blocks that see some of the keys ``start … stop``, and where the keys that they see end."""
        window = self._spec.sliding_window
        for q0, q1 in aligned(self._first, self._first + self.q.shape[1], self._block):
            if q1 > start and (window is None or q0 - window < stop - 1):
                yield q0, q1, min(stop, q1)

    def _update(self, q0: int, q1: int, start: int, tiers: list[Tier], bias: Tensor | None) -> None:
        """Queries ``q0 … q1`` read the keys from ``start`` on, each from the tier that selects it."""
        spec, rows = self._spec, slice(q0 - self._first, q1 - self._first)
        q = self.q[:, rows].flatten(1, 2)
        shape = (q.shape[0], q1 - q0, -1)
        scores = [(q @ tier.k.mT).view(*shape, tier.k.shape[1]) for tier in tiers]
        select = tiers[0].select
        score = scores[0] if select is None else torch.where(select, scores[0], scores[1])
        if bias is not None:
            score = score + bias[:, rows, :, None]
        score = score * spec.scale
        if spec.softcap is not None:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        stop, window = start + score.shape[-1], spec.sliding_window
        if stop - 1 > q0 or (window is not None and start <= q1 - 1 - window):
            key, query = (torch.arange(*r, device=q.device) for r in ((start, stop), (q0, q1)))
            hidden = key > query[:, None]
            if window is not None:
                hidden = hidden | (key <= query[:, None] - window)
            score = score.masked_fill(hidden[:, None], -torch.inf)
        before = self._highest[:, rows]
        highest = torch.maximum(before, score.amax(-1))
        base = torch.where(highest == -torch.inf, 0.0, highest)  # a query that has seen no key yet
        p = torch.exp(score - base.unsqueeze(-1))
        keep = torch.exp(before - base)
        self._highest[:, rows] = highest
        self.weight[:, rows] = self.weight[:, rows] * keep + p.sum(-1)
        output = self.output[:, rows] * keep.unsqueeze(-1)
        for tier in tiers:
            weight = p if tier.select is None else p * tier.select
            output += (weight.flatten(1, 2) @ tier.v).view(output.shape)
        self.output[:, rows] = output

"""Inputs of the kernel benchmarks: random pages, tables, and a dense float64 answer for one request."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels.triton.decode import Windows
from oscar_serving.codec import PageLayout, dequantize, unpack
from oscar_serving.codec.layout import PageViews
from oscar_serving.config import OscarConfig


@dataclass(frozen=True)
class Shape:
    """Heads and layout of the model that is measured (Qwen3-8B's by default)."""

    query_heads: int = 32
    heads: int = 8
    head_dim: int = 128
    sink: int = 64
    recent: int = 256
    page_size: int = 128
    window_page: int = 16
    k_bits: int = 2
    v_bits: int = 2

    @property
    def layout(self) -> PageLayout:
        """Page layout of the shape."""
        return PageLayout(
            self.head_dim,
            OscarConfig(
                k_bits=self.k_bits,
                v_bits=self.v_bits,
                sink=self.sink,
                recent=self.recent,
                page_size=self.page_size,
            ),
        )


@dataclass(frozen=True)
class Decode:
    """One set of decode inputs: ``batch`` requests of ``length`` keys, one query each."""

    shape: Shape
    q: Tensor
    views: PageViews
    windows: Windows
    page_table: Tensor
    query_start: Tensor
    lengths: Tensor
    rotation: Tensor
    ones: Tensor

    @classmethod
    def make(cls, shape: Shape, batch: int, length: int, device: torch.device, seed: int) -> Decode:
        """Random codes and plausible scales; pages in random order; window pages only where the rule reads them."""
        rng = torch.Generator(device).manual_seed(seed)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=rng, device=device)

        layout, heads, d = shape.layout, shape.heads, shape.head_dim
        count = -(-length // shape.page_size)
        pages = torch.empty(batch * count + 1, heads, layout.head_bytes, dtype=torch.uint8, device=device)
        pages.random_(0, 256, generator=rng)
        views = layout.views(pages)
        for meta in (views.k_meta, views.v_meta):
            meta[..., 0] = (0.8 + 0.2 * normal(*meta.shape[:-1])).abs().half()
            meta[..., 1] = (-1.2 + 0.2 * normal(*meta.shape[:-1])).half()
        order = torch.randperm(batch * count, generator=rng, device=device).int() + 1
        wpages = -(-length // shape.window_page)
        needed = torch.arange(wpages, device=device)
        last = (length - shape.recent) // shape.window_page
        needed = (needed * shape.window_page < shape.sink) | (needed >= last)
        table = torch.zeros(batch, wpages, dtype=torch.int32, device=device)
        per = int(needed.sum())
        numbers = torch.randperm(batch * per, generator=rng, device=device).int() + 1
        table[:, needed] = numbers.view(batch, per)
        store = normal(batch * per + 1, 2, heads, shape.window_page, d).bfloat16()
        rotation = torch.linalg.qr(normal(heads, d, d))[0].contiguous()
        return cls(
            shape,
            normal(batch, shape.query_heads, d).bfloat16(),
            views,
            Windows(store[:, 0], store[:, 1], table),
            order.view(batch, count),
            torch.arange(batch + 1, dtype=torch.int32, device=device),
            torch.full((batch,), length, dtype=torch.int32, device=device),
            rotation,
            torch.ones(heads, device=device),
        )

    @property
    def int_bytes(self) -> int:
        """Bytes of the INT2 tier that one launch reads."""
        history = int(self.lengths.sum()) - self.lengths.shape[0] * (self.shape.sink + self.shape.recent)
        return int(history * self.shape.layout.bytes_per_token(self.shape.heads))

    @property
    def window_bytes(self) -> int:
        """Bytes of the window tier that one launch reads."""
        tokens = self.lengths.shape[0] * (self.shape.sink + self.shape.recent)
        return tokens * 4 * self.shape.heads * self.shape.head_dim

    def reference(self, request: int) -> Tensor:
        """Output ``[query heads, d]`` of one request in float64."""
        shape, length = self.shape, int(self.lengths[request])
        position = torch.arange(length, device=self.q.device)
        ratio = shape.query_heads // shape.heads
        near = (position < shape.sink) | (position > length - 1 - shape.recent)
        page = self.page_table[request].long()[position // shape.page_size]
        wpage = self.windows.table[request].long()[position // shape.window_page]
        tiers = []
        for codes, meta, bits, window in (
            (self.views.k_codes, self.views.k_meta, shape.k_bits, self.windows.k),
            (self.views.v_codes, self.views.v_meta, shape.v_bits, self.windows.v),
        ):
            slot, wslot = position % shape.page_size, position % shape.window_page
            packed = dequantize(unpack(codes[page, :, slot], bits), meta[page, :, slot], bits=bits, dtype=torch.float64)
            tiers.append(torch.where(near[:, None, None], window[wpage, :, wslot].double(), packed))
        q = self.q[request].double().view(shape.heads, ratio, -1)
        q = torch.einsum("hgd,hde->hge", q, self.rotation.double())
        score = torch.einsum("hge,the->hgt", q, tiers[0]) * shape.head_dim**-0.5
        o = torch.einsum("hgt,the->hge", torch.softmax(score, -1), tiers[1])
        return torch.einsum("hge,hde->hgd", o, self.rotation.double()).flatten(0, 1)

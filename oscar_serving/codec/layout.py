"""Bytes of a page: the only place that knows where codes, scales and minima lie.

An INT2 page holds ``page_size`` tokens of all KV heads, ``[heads, head_bytes]`` uint8. The bytes of one head are four
sections one after the other, each token-major::

    k_codes [page_size, d * k_bits / 8]   k_meta [page_size, groups, 2]
    v_codes [page_size, d * v_bits / 8]   v_meta [page_size, groups, 2]

so a kernel reads 16 bytes a thread along tokens. ``page_size`` is a multiple of 16, which keeps every section 16-byte
aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oscar_serving.codec.affine import meta_dtype
from oscar_serving.codec.packing import row_bytes
from oscar_serving.config import OscarConfig


class PageViews(NamedTuple):
    """Strided views of packed pages; writing to a view writes to the pool.

    ``*_codes`` uint8 ``[pages, heads, page_size, d * bits / 8]``, ``*_meta`` float16 or float8_e4m3fn
    ``[pages, heads, page_size, groups, 2]`` with (scale, minimum) last.
    """

    k_codes: Tensor
    k_meta: Tensor
    v_codes: Tensor
    v_meta: Tensor


@dataclass(frozen=True)
class PageLayout:
    """Layout of the pages of one layer for a head size and an :class:`~oscar_serving.config.OscarConfig`."""

    head_dim: int
    config: OscarConfig

    def __post_init__(self) -> None:
        self.config.groups(self.head_dim)

    @property
    def groups(self) -> int:
        """Quantization groups a head."""
        return self.config.groups(self.head_dim)

    @property
    def group_size(self) -> int:
        """Channels a group."""
        return self.head_dim // self.groups

    @property
    def meta_dtype(self) -> torch.dtype:
        """Type of stored scale and minimum."""
        return meta_dtype(self.config.scale_dtype)

    @property
    def section_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of the four sections of one head in one page."""
        tokens, meta = self.config.page_size, self.groups * 2 * self.meta_dtype.itemsize
        k, v = (tokens * row_bytes(self.head_dim, b) for b in (self.config.k_bits, self.config.v_bits))
        return k, tokens * meta, v, tokens * meta

    @property
    def head_bytes(self) -> int:
        """Bytes of one KV head in one page."""
        return sum(self.section_bytes)

    def page_bytes(self, heads: int) -> int:
        """Bytes of one page with ``heads`` KV heads."""
        return heads * self.head_bytes

    def bytes_per_token(self, heads: int) -> float:
        """Bytes of one token in the INT2 tier, scales included (whole bytes for every supported layout)."""
        return self.page_bytes(heads) / self.config.page_size

    @property
    def bits_per_element(self) -> float:
        """Stored bits of one element of K or V, scales and minima included."""
        return self.head_bytes * 8 / (self.config.page_size * self.head_dim * 2)

    def window_page_bytes(self, heads: int) -> int:
        """Bytes of one window page: K and V of ``page_size`` tokens in ``window_dtype``."""
        itemsize = getattr(torch, self.config.window_dtype).itemsize
        return heads * 2 * self.config.page_size * self.head_dim * itemsize

    def views(self, pages: Tensor) -> PageViews:
        """Views of ``pages`` uint8 ``[pages, heads, head_bytes]`` (any page and head stride, bytes contiguous)."""
        k_codes, k_meta, v_codes, v_meta = self.byte_views(pages)
        return PageViews(
            k_codes,
            k_meta.view(self.meta_dtype).unflatten(-1, (self.groups, 2)),
            v_codes,
            v_meta.view(self.meta_dtype).unflatten(-1, (self.groups, 2)),
        )

    def byte_views(self, pages: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The four sections of ``pages``, uint8 ``[pages, heads, page_size, bytes a token]``; needs no FP8 type."""
        if pages.dtype != torch.uint8 or pages.ndim != 3 or pages.shape[-1] != self.head_bytes or pages.stride(-1) != 1:
            raise ValueError(
                f"pages must be uint8 [pages, heads, {self.head_bytes}] with contiguous bytes, "
                f"got {pages.dtype} {tuple(pages.shape)} strides {pages.stride()}"
            )
        sections = pages.split(self.section_bytes, dim=-1)
        k_codes, k_meta, v_codes, v_meta = (s.unflatten(-1, (self.config.page_size, -1)) for s in sections)
        return k_codes, k_meta, v_codes, v_meta

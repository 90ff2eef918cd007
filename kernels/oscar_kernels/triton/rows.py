"""Page tables of requests whose window pages form one row each: a sink, then a ring of recent pages.

Window page ``w`` of a request holds positions ``w * WPAGE …``. With a sink it is page ``sink_page + w`` for
``w < sink_pages``; else page ``ring_first + row * ring_pages + w % ring_pages``, as long as the ring holds it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from oscar_kernels.triton.rows_kernel import rows_kernel


class RowLayout(NamedTuple):
    """Where rows lie in the window store.

    Attributes
    ----------
    sink_page, sink_write, valid_from
        int32 ``[rows]``: first page of the row's sink (0 for none), 1 where the row writes it, first position that the
        row's ring holds.
    sink_pages, ring_pages, ring_first
        Pages of a sink and of a ring; first page of row 0's ring.
    """

    sink_page: Tensor
    sink_write: Tensor
    valid_from: Tensor
    sink_pages: int
    ring_pages: int
    ring_first: int


class Tables(NamedTuple):
    """What the attention kernels take: int32 ``[B, pages]``, ``[B, window pages]``, ``[B]``, int64 slots ``[B]``."""

    pages: Tensor
    windows: Tensor
    lengths: Tensor
    slots: Tensor
    window_slots: Tensor


def tables(
    layout: RowLayout, req_to_token: Tensor, rows: Tensor, lengths: Tensor, *, out: Tables, page_size: int,
    window_page: int, held: Tensor | None = None, new_slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Fill ``out`` for ``B`` requests in one launch; nothing depends on a length on the host.

    Parameters
    ----------
    req_to_token
        int32 ``[rows, positions]``: slot of each token of a row.
    rows, lengths
        int ``[B]``: row of each request, and tokens that it has, the new ones included.
    held
        int ``[B]`` for prefill: tokens that the windows hold when they are read; slots and lengths are not written.
    new_slots
        int64 ``[B]`` for decode: slot of the one new token, which is written before the windows are read. A slot in
        page 0 marks a padding request, which gets length 0 and slots -1.
    """
    decode = new_slots is not None
    if decode == (held is not None):
        raise ValueError("give held for prefill or new_slots for decode")
    columns = out.pages.shape[1]
    if out.windows.shape[1] != columns * (page_size // window_page):
        raise ValueError(f"{out.windows.shape[1]} window columns do not match {columns} page columns")
    block = 256
    rows_kernel[(triton.cdiv(columns, block), rows.shape[0])](
        req_to_token, rows, lengths, lengths if held is None else held, lengths if new_slots is None else new_slots,
        layout.sink_page, layout.sink_write, layout.valid_from,
        out.pages, out.windows, out.lengths, out.slots, out.window_slots,
        req_to_token.stride(0), out.pages.stride(0), out.windows.stride(0), columns, layout.ring_first,
        layout.ring_pages, SINK_PAGES=layout.sink_pages, PAGE=page_size, WPAGE=window_page, DECODE=decode, BT=block,
        num_warps=4,
    )  # fmt: skip


def sink_slots(layout: RowLayout, rows: Tensor, positions: Tensor, window_page: int) -> Tensor:
    """int64 window slot of each token (row, position) in a sink that its row writes, else -1."""
    window = torch.div(positions, window_page, rounding_mode="floor")
    mine = (window < layout.sink_pages) & (layout.sink_write[rows] > 0)
    page = (layout.sink_page[rows] + window).long()
    return torch.where(mine, page * window_page + positions % window_page, -1)


def ring_slots(layout: RowLayout, rows: Tensor, positions: Tensor, window_page: int) -> Tensor:
    """int64 window slot of each token (row, position) in its ring, -1 for those that lie in a sink."""
    window = torch.div(positions, window_page, rounding_mode="floor")
    page = (layout.ring_first + rows * layout.ring_pages + window % layout.ring_pages).long()
    in_sink = (window < layout.sink_pages) & (layout.sink_page[rows] > 0)
    return torch.where(in_sink, -1, page * window_page + positions % window_page)

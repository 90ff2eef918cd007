"""Tables of a step whose window store has one row of pages a request: the device code."""

import triton
import triton.language as tl


@triton.jit
def rows_kernel(
    req_to_token, rows, lengths, held, new_slots, sink_page, sink_write, valid_from,
    page_out, window_out, lengths_out, slots_out, window_slots_out, token_stride, page_stride, window_stride,
    page_columns, ring_first, ring_pages,
    SINK_PAGES: tl.constexpr, PAGE: tl.constexpr, WPAGE: tl.constexpr, DECODE: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Grid ``(pages / BT, requests)``; see :func:`oscar_kernels.triton.rows.tables`."""
    request = tl.program_id(1)
    row = tl.load(rows + request).to(tl.int64)
    length = tl.load(lengths + request).to(tl.int32)
    if DECODE:
        slot = tl.load(new_slots + request)
        length = tl.where(slot >= PAGE, length, 0)
        last = length
    else:
        last = tl.load(held + request).to(tl.int32)
    first_valid = tl.load(valid_from + row)
    sink = tl.load(sink_page + row)
    ring = ring_first + row.to(tl.int32) * ring_pages
    page = tl.program_id(0) * BT + tl.arange(0, BT)
    inside = page < page_columns
    there = inside & (page * PAGE < length)
    token = tl.load(req_to_token + row * token_stride + page.to(tl.int64) * PAGE, mask=there, other=0)
    tl.store(page_out + request.to(tl.int64) * page_stride + page, (token // PAGE).to(tl.int32), mask=inside)
    newest = (last + WPAGE - 1) // WPAGE - 1
    for part in tl.static_range(PAGE // WPAGE):
        window = page * (PAGE // WPAGE) + part
        in_ring = (window * WPAGE >= first_valid) & (window > newest - ring_pages) & (window <= newest)
        entry = tl.where(in_ring, ring + window % ring_pages, 0)
        entry = tl.where((window < SINK_PAGES) & (sink > 0), sink + window, entry)
        entry = tl.where(window * WPAGE < length, entry, 0)
        tl.store(window_out + request.to(tl.int64) * window_stride + window, entry, mask=inside)
    if DECODE:  # noqa: SIM102 - a constant of the kernel, decided when it is compiled
        if tl.program_id(0) == 0:
            tl.store(lengths_out + request, length)
            tl.store(slots_out + request, tl.where(length > 0, slot, -1))
            position = tl.maximum(length - 1, 0)
            window = position // WPAGE
            owned = tl.where(tl.load(sink_write + row) > 0, sink + window, 0)
            entry = tl.where((window < SINK_PAGES) & (sink > 0), owned, ring + window % ring_pages)
            target = entry.to(tl.int64) * WPAGE + position % WPAGE
            tl.store(window_slots_out + request, tl.where((length > 0) & (entry > 0), target, -1))

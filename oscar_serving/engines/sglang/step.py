"""Tables of a step, from the rows of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oscar_kernels.triton.rows import RowLayout, Tables, ring_slots, sink_slots, tables
from oscar_serving.attention.history import plan_groups
from oscar_serving.config import OscarConfig
from oscar_serving.engines.sglang.layer import Prefill
from oscar_serving.engines.sglang.options import PAGE, WINDOW_PAGE


def empty_tables(requests: int, length: int, device: torch.device) -> Tables:
    """Tables for ``requests`` of up to ``length`` tokens."""
    columns = -(-length // PAGE)
    return Tables(
        torch.zeros(requests, columns, dtype=torch.int32, device=device),
        torch.zeros(requests, columns * (PAGE // WINDOW_PAGE), dtype=torch.int32, device=device),
        torch.zeros(requests, dtype=torch.int32, device=device),
        torch.zeros(requests, dtype=torch.int64, device=device),
        torch.zeros(requests, dtype=torch.int64, device=device),
    )


def fill_decode(
    layout: RowLayout, req_to_token: Tensor, rows: Tensor, lengths: Tensor, slots: Tensor, out: Tables
) -> None:
    """Tables of a decode step: one new token, at ``slots``, for each of ``rows``; ``lengths`` count it."""
    tables(layout, req_to_token, rows, lengths, out=out, page_size=PAGE, window_page=WINDOW_PAGE, new_slots=slots)


def prefill_step(
    layout: RowLayout,
    req_to_token: Tensor,
    rows: Tensor,
    queries: Sequence[int],
    before: Sequence[int],
    new_slots: Tensor,
    config: OscarConfig,
    scratch_rows: int,
) -> Prefill:
    """Tables of a step in which request ``i``, in ``rows[i]``, adds ``queries[i]`` tokens behind ``before[i]``.

    ``new_slots`` int64 ``[T]`` are the slots of the new tokens; one in page 0 marks padding.
    """
    device, total = rows.device, sum(queries)
    plan = torch.tensor([list(queries), list(before)], dtype=torch.int64)
    starts = torch.zeros(len(queries) + 1, dtype=torch.int64)
    torch.cumsum(plan[0], 0, out=starts[1:])
    request = torch.repeat_interleave(torch.arange(len(queries)), plan[0], output_size=total)
    positions = torch.arange(total) - starts[request] + plan[1][request]
    last = (plan.sum(0) - config.recent)[request]
    kept = (positions >= last).nonzero().squeeze(1)
    host = [plan[1].int(), starts.int(), plan.sum(0), positions, request, kept]
    held, query_start, lengths, positions, request, kept = (x.to(device, non_blocking=True) for x in host)
    step = empty_tables(len(queries), max(q + b for q, b in zip(queries, before, strict=True)), device)
    tables(layout, req_to_token, rows, lengths, out=step, page_size=PAGE, window_page=WINDOW_PAGE, held=held)
    slots = torch.where(new_slots >= PAGE, new_slots, -1)
    token_row = rows.long()[request]
    sinks = torch.where(slots >= 0, sink_slots(layout, token_row, positions, WINDOW_PAGE), -1)
    rings = ring_slots(layout, token_row[kept], positions[kept], WINDOW_PAGE)
    groups = plan_groups(
        query_start, held, list(queries), list(before), recent=config.recent, rule=config.prefill_mode == "rule",
        rows=scratch_rows,
    )  # fmt: skip
    return Prefill(
        step, query_start, max(queries), groups, slots, sinks, kept, torch.where(slots[kept] >= 0, rings, -1)
    )

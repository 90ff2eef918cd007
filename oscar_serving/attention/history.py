"""Prefill behind a history: which stretches of the cache a step reads, and in what order.

Let a request have ``c`` cached tokens and ``n`` new ones, and ``W`` recent tokens be read unquantized. Its keys fall
into stretches that a dense attention kernel can take as they are:

========  ============================  ======================================================================
stretch   keys                          read
========  ============================  ======================================================================
distant   ``0 … c - W``                 by every query, from INT2 (sink tokens from the window store)
near      ``c - W + 1 … c - 1``         by early queries unquantized, by later ones from INT2
own       ``c … c + n - 1``             mode ``raw``: as given. Mode ``rule``: as given within ``W`` …
diagonal  ``c - W + 1 … c + n - 1 - W`` … and beyond from INT2 (mode ``rule`` only; there near has no INT2 part)
========  ============================  ======================================================================

The distant stretch is taken in tiles, so that scratch is bounded whatever the length. Requests are taken in groups
whose near stretches fit the scratch; nothing loops over requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from oscar_kernels.triton import gather as kernels
from oscar_kernels.triton.decode import Windows
from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.config import OscarConfig

#: Rows of K and of V that scratch holds.
SCRATCH_ROWS = 32768


class Flash(Protocol):
    """Dense attention over packed sequences; returns output and LSE float32 ``[query heads, T]``."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, causal: bool,
        window: int | None = None, scale: float, softcap: float | None, sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip


#: ``merge(out, previous, previous_lse, part, part_lse, lse)``, in the form of vLLM's ``merge_attn_states``.
Merge = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], object]


@dataclass
class Stretch:
    """Keys of each request of a group: int32 first positions ``[R]``, packed rows ``[R + 1]``, bound on the longest."""

    starts: Tensor
    rows: Tensor
    longest: int

    @classmethod
    def of(cls, starts: Tensor, counts: Tensor, longest: int) -> Stretch:
        """Stretches of ``counts`` keys (negative counts as none) from ``starts``."""
        rows = torch.zeros(counts.shape[0] + 1, dtype=torch.int32, device=counts.device)
        torch.cumsum(counts.clamp(min=0), 0, out=rows[1:])
        return cls(starts.to(torch.int32).contiguous(), rows, longest)


@dataclass
class Group:
    """Some of the prefills of a step: requests ``first …`` of the prefills, tokens ``tokens`` of the prefill tokens."""

    requests: slice
    tokens: slice
    query_start: Tensor
    context: Tensor
    longest_query: int
    near: Stretch
    diagonal: Stretch | None
    distant: list[Stretch]


def plan_groups(
    query_start: Tensor,
    context: Tensor,
    host_queries: Sequence[int],
    host_context: Sequence[int],
    *,
    recent: int,
    rule: bool,
    rows: int = SCRATCH_ROWS,
) -> list[Group]:
    """Cut the prefills of a step into groups, and each group's keys into stretches.

    Parameters
    ----------
    query_start, context
        int32 ``[P + 1]`` and ``[P]``, on the device.
    host_queries, host_context
        The same as lists: exact queries, bounds on the context.
    rule
        Prefill mode ``rule``.
    rows
        Rows of scratch.
    """
    groups: list[Group] = []
    if not rule and not any(host_context):
        return groups
    size = max(1, rows // 2 // max(1, recent - 1))
    token = 0
    for first in range(0, len(host_queries), size):
        queries, before = host_queries[first : first + size], host_context[first : first + size]
        some = slice(first, first + len(queries))
        tokens = slice(token, token + sum(queries))
        token = tokens.stop
        if not rule and not any(before):
            continue
        starts = query_start[some.start : some.stop + 1]
        c, n = context[some], starts[1:] - starts[:-1]
        distant = (c - (recent - 1)).clamp(min=0)
        diagonal = None
        if rule and (longest := max(q + b for q, b in zip(queries, before, strict=True)) - recent) > 0:
            diagonal = Stretch.of(distant, c + n - recent - distant, min(longest, max(queries)))
        tile = max(1, rows // len(queries))
        bound = max(0, max(before) - (recent - 1))
        groups.append(
            Group(
                some, tokens, (starts - tokens.start).contiguous(), c.contiguous(), max(queries),
                Stretch.of(distant, c - distant, min(max(before), recent - 1)), diagonal,
                [
                    Stretch.of(torch.full_like(c, t), (distant - t).clamp(max=tile), min(tile, bound - t))
                    for t in range(0, bound, tile)
                ],
            )
        )  # fmt: skip
    return groups


@dataclass(frozen=True)
class Stores:
    """Both stores of a layer, as the kernels that read them back into model space take them.

    Attributes
    ----------
    sections
        Views of the INT2 pages: ``k_codes, k_meta, v_codes, v_meta``.
    windows
        ``[pages, 2, heads, page size, d]``.
    k_mean, v_mean
        ``None`` for zeros.
    sinks
        Learned sink logits ``[query heads]`` or ``None``.
    """

    sections: tuple[Tensor, Tensor, Tensor, Tensor]
    windows: Tensor
    q_rotation: Tensor
    v_rotation: Tensor
    k_unit: Tensor
    v_unit: Tensor
    k_mean: Tensor | None
    v_mean: Tensor | None
    config: OscarConfig
    spec: AttentionSpec
    sinks: Tensor | None = None

    def gather(
        self, stretch: Stretch, page_table: Tensor, window_table: Tensor, k: Tensor, v: Tensor, *, near: bool
    ) -> None:
        """Read a stretch back into ``k, v`` ``[rows, heads, d]``, model space; ``near``: recent tokens unquantized."""
        kernels.gather(
            self.sections, Windows(self.windows[:, 0], self.windows[:, 1], window_table), page_table, stretch.starts,
            stretch.rows, stretch.longest, k_out=k, v_out=v, q_rotation=self.q_rotation, v_rotation=self.v_rotation,
            k_unit=self.k_unit, v_unit=self.v_unit, k_mean=self.k_mean, v_mean=self.v_mean, sink=self.config.sink,
            near=near,
        )  # fmt: skip


def attend(
    stores: Stores,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    query_start: Tensor,
    longest_query: int,
    groups: list[Group],
    page_table: Tensor,
    window_table: Tensor,
    scratch: tuple[Tensor, Tensor],
    flash: Flash,
    merge: Merge,
) -> None:
    """Attend for the prefills of a step, ``q`` ``[T, query heads, d]``, into ``out``.

    ``k, v`` are the new tokens, which are stored already; ``scratch`` is K and V ``[rows, heads, d]`` in the type of
    ``q``.
    """
    config, spec = stores.config, stores.spec
    rule = config.prefill_mode == "rule"
    factors: dict[str, Any] = {"scale": spec.scale, "softcap": spec.softcap}
    _, lse = flash(
        q, k, v, query_start, query_start, longest_query, longest_query, causal=True,
        window=config.recent if rule else None, sinks=stores.sinks, out=out, **factors,
    )  # fmt: skip
    half = scratch[0].shape[0] // 2
    near, far = (scratch[0][:half], scratch[1][:half]), (scratch[0][half:], scratch[1][half:])
    for group in groups:
        whole = group.tokens.stop - group.tokens.start == q.shape[0]
        queries, result = q[group.tokens], out[group.tokens]
        total = lse if whole else lse[:, group.tokens].contiguous()
        tables = page_table[group.requests], window_table[group.requests]
        if group.near.longest:
            stores.gather(group.near, *tables, *near, near=True)
            if not rule:
                stores.gather(group.near, *tables, *far, near=False)
            part, part_lse = torch.empty_like(queries), torch.empty_like(total)
            kernels.attend_near(
                queries, near, None if rule else far, group.query_start, group.context, group.near.starts,
                group.near.rows, group.longest_query, out=part, lse=part_lse, recent=config.recent, **factors,
            )  # fmt: skip
            total = _merge(merge, result, total, part, part_lse)
        stretches = [(s, False) for s in group.distant] + ([(group.diagonal, True)] if group.diagonal else [])
        for stretch, causal in stretches:
            stores.gather(stretch, *tables, *scratch, near=False)
            part, part_lse = flash(
                queries, *scratch, group.query_start, stretch.rows, group.longest_query, stretch.longest,
                causal=causal, **factors,
            )  # fmt: skip
            total = _merge(merge, result, total, part, part_lse)


def _merge(merge: Merge, out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> Tensor:
    """Merge ``part`` into ``out`` in place; returns the new LSE."""
    both = torch.empty_like(lse)
    merge(out, out, lse, part, part_lse, both)
    return both

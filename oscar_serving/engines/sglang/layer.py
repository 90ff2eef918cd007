"""One layer's two stores and constants, and the calls of kernels on them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.triton import decode as triton_decode
from oscar_kernels.triton import store as triton_store
from oscar_kernels.triton.merge import merge_into
from oscar_kernels.triton.rows import Tables
from oscar_serving.attention import AttentionSpec, history
from oscar_serving.attention.dense import AtenFlash, PlainFlash
from oscar_serving.codec import PageLayout
from oscar_serving.engines.sglang.geometry import LayerShape, Scratch
from oscar_serving.rotation import LayerTransform


@dataclass
class Prefill:
    """The extending requests of a step.

    Attributes
    ----------
    tables
        Pages, and the windows as they are before the step's tokens are written.
    query_start
        int32 ``[B + 1]``.
    longest_query
        Most new tokens of a request.
    groups
        Stretches of the history that the step reads.
    slots, sink_slots
        int64 ``[T]``: INT2 slot of each new token, and its slot in a sink; -1 for none.
    kept, kept_slots
        Indices of the new tokens that the rings keep, and their window slots.
    """

    tables: Tables
    query_start: Tensor
    longest_query: int
    groups: list[history.Group]
    slots: Tensor
    sink_slots: Tensor
    kept: Tensor
    kept_slots: Tensor


class OscarLayer:
    """Stores, transform and kernels of one attention layer.

    Parameters
    ----------
    pages
        INT2 store, uint8 ``[pages, heads, layout.head_bytes]``.
    windows
        bfloat16 ``[window pages, 2, heads, 16, d]``.
    kind
        Type of the model's K and V, 16-bit.
    """

    def __init__(
        self, layout: PageLayout, transform: LayerTransform, pages: Tensor, windows: Tensor, kind: torch.dtype
    ) -> None:
        self.layout, self.pages, self.windows, self.kind = layout, pages, windows, kind
        self.has_k_mean, self.has_v_mean = bool(transform.k_mean.any()), bool(transform.v_mean.any())
        self.transform = t = transform.to(pages.device)
        self.v_back = cuda_decode.back_matrix(self.transform.v_rotation)
        self.k_turn = cuda_decode.turn_matrix(self.transform.q_rotation)
        views = layout.views(pages)
        self.sections = views.k_codes, views.k_meta, views.v_codes, views.v_meta
        self.sides = tuple(
            triton_store.Transform(
                triton_store.split_rotation(rotation, kind) if layout.config.rotation != "none" else None,
                mean if used else None, shrink, unit,
            )
            for rotation, mean, used, shrink, unit in (
                (t.k_rotation, t.k_mean, self.has_k_mean, t.k_shrink, t.k_unit),
                (t.v_rotation, t.v_mean, self.has_v_mean, t.v_shrink, t.v_unit),
            )
        )  # fmt: skip
        self._no_table = torch.empty(0, 1, dtype=torch.int32, device=pages.device)

    def store(self, k: Tensor, v: Tensor, slots: Tensor, window_slots: Tensor) -> None:
        """Write ``k, v`` ``[T, heads, d]``; slot -1 writes nothing to that store."""
        triton_store.store(k, v, self.sections, self._kernel_windows(self._no_table), slots, window_slots, *self.sides)

    def _kernel_windows(self, table: Tensor) -> triton_decode.Windows:
        return triton_decode.Windows(self.windows[:, 0], self.windows[:, 1], table)

    def decode(
        self, q: Tensor, tables: Tables, query_start: Tensor, out: Tensor, spec: AttentionSpec, shape: LayerShape,
        scratch: Scratch,
    ) -> None:  # fmt: skip
        """Attend for one new token a request, ``q`` and ``out`` ``[B, query heads, d]``; it is stored already."""
        config, t = self.layout.config, self.transform
        plan = scratch.plan(shape, q.shape[0])
        rotated = scratch.rotated[: q.numel()].view(q.shape)
        needs_bias = self.has_k_mean and spec.softcap is not None
        bias = scratch.bias[: q.shape[0] * q.shape[1]].view(q.shape[:2]) if needs_bias else None
        cuda = shape.kernel(q.device) == "cuda"
        fused = cuda and not needs_bias and q.dtype == torch.bfloat16  # the kernel rotates the query itself
        if not fused:
            triton_decode.rotate_query(q, t.q_rotation, rotated, mean=t.k_mean if needs_bias else None, bias=bias)
        common: dict[str, Any] = {
            "geometry": plan, "out": out, "sink": config.sink, "recent": config.recent, "scale": spec.scale,
            "k_unit": t.k_unit, "v_unit": t.v_unit, "q_bias": bias, "v_mean": t.v_mean if self.has_v_mean else None,
            "softcap": spec.softcap,
        }  # fmt: skip
        if cuda:
            cuda_decode.decode(
                q if fused else rotated, self.sections, (self.windows[:, 0], self.windows[:, 1]), tables.pages,
                tables.windows, query_start, tables.lengths, partial=scratch.partial, arrived=scratch.arrived,
                v_back=self.v_back, k_turn=self.k_turn if fused else None, **common,
            )  # fmt: skip
        else:
            triton_decode.decode(
                rotated, self.sections, self._kernel_windows(tables.windows), tables.pages, query_start, tables.lengths,
                workspace=scratch.partial, v_rotation=t.v_rotation, **common,
            )  # fmt: skip

    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, step: Prefill, out: Tensor, spec: AttentionSpec, scratch: Scratch
    ) -> None:
        """Write the new tokens and attend for them; ``q, out`` ``[T, query heads, d]``, ``k, v`` ``[T, heads, d]``.

        The rings are written last: a chunk longer than the ring would else overwrite what its first tokens read.
        """
        self.store(k, v, step.slots, step.sink_slots)
        history.attend(
            self._stores(spec), q, k, v, out, query_start=step.query_start, longest_query=step.longest_query,
            groups=step.groups, page_table=step.tables.pages, window_table=step.tables.windows,
            scratch=scratch.history_rows(k.shape[1], k.shape[2]), flash=self._flash(spec), merge=_merge,
        )  # fmt: skip
        kept = step.kept
        self.store(k[kept], v[kept], torch.full_like(kept, -1), step.kept_slots)

    def _flash(self, spec: AttentionSpec) -> history.Flash:
        if self.pages.device.type == "cuda":
            return AtenFlash(self.layout.head_dim, spec.softcap)
        return self._plain_flash

    @cached_property
    def _plain_flash(self) -> PlainFlash:
        return PlainFlash()

    def _stores(self, spec: AttentionSpec) -> history.Stores:
        t = self.transform
        return history.Stores(
            self.sections, self.windows, t.q_rotation, t.v_rotation, t.k_unit, t.v_unit,
            t.k_mean if self.has_k_mean else None, t.v_mean if self.has_v_mean else None, self.layout.config, spec,
        )  # fmt: skip


def _merge(out: Tensor, previous: Tensor, previous_lse: Tensor, part: Tensor, part_lse: Tensor, lse: Tensor) -> None:
    """In the form that history wants, ``out`` being ``previous``."""
    lse.copy_(previous_lse)
    merge_into(out, lse, part, part_lse)

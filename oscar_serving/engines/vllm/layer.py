"""One layer's two stores and constants, and the calls of kernels on them."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.v1.attention.ops.merge_attn_states import merge_attn_states

from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.triton import decode as triton_decode
from oscar_kernels.triton import store as triton_store
from oscar_serving.attention import AttentionSpec, history
from oscar_serving.codec import PageLayout
from oscar_serving.engines.vllm import portable
from oscar_serving.engines.vllm.flash import VllmFlash
from oscar_serving.engines.vllm.scratch import LayerShape
from oscar_serving.rotation import LayerTransform

if TYPE_CHECKING:
    from oscar_serving.engines.vllm.backend import OscarMetadata, PrefillMetadata

_CONSTANTS = (
    "k_rotation", "q_rotation", "v_rotation", "k_mean", "v_mean", "k_shrink", "v_shrink", "k_unit", "v_unit",
)  # fmt: skip


class CachedLayer:
    """Stores, transform and kernels of one attention layer.

    The transform's tensors are buffers of vLLM's layer, so that they move, sleep and wake with the model.
    """

    def __init__(
        self, owner: Any, layout: PageLayout, transform: LayerTransform, spec: AttentionSpec, sinks: Tensor | None
    ) -> None:
        self.owner, self.layout, self.spec, self.sinks = owner, layout, spec, sinks
        self.has_k_mean = bool(transform.k_mean.any())
        self.has_v_mean = bool(transform.v_mean.any())
        #: Plain PyTorch instead of kernels.
        self.portable = torch.get_default_device().type == "cpu"
        self.rotates = layout.config.rotation != "none"
        for name in _CONSTANTS:
            value = getattr(transform, name).to(torch.get_default_device())
            owner.register_buffer(f"oscar_{name}", value.contiguous().clone(), persistent=False)
        back = cuda_decode.back_matrix(transform.v_rotation).to(torch.get_default_device())
        owner.register_buffer("oscar_v_back", back, persistent=False)
        turn = cuda_decode.turn_matrix(transform.q_rotation).to(torch.get_default_device())
        owner.register_buffer("oscar_k_turn", turn, persistent=False)
        #: Type of new K and V, in which the store kernel takes the rotations.
        self.kind = torch.get_default_dtype()
        if self.rotates and self.kind.itemsize == 2:
            for name in ("k", "v"):
                split = triton_store.split_rotation(getattr(transform, f"{name}_rotation"), self.kind)
                owner.register_buffer(f"oscar_{name}_split", split.to(torch.get_default_device()), persistent=False)
        self._bound: tuple[int, int] = (0, 0)
        self.no_table = torch.empty(0, 1, dtype=torch.int32)

    @property
    def transform(self) -> LayerTransform:
        """The transform, on the layer's device."""
        return LayerTransform(**{name: getattr(self.owner, f"oscar_{name}") for name in _CONSTANTS})

    def _constant(self, name: str) -> Tensor:
        return getattr(self.owner, f"oscar_{name}")

    def bind(self, kv_cache: Tensor, windows: Tensor) -> None:
        """Take vLLM's views: uint8 ``[blocks, heads, 128, bytes]`` and bfloat16 ``[blocks, 2, heads, 16, d]``."""
        bound = kv_cache.data_ptr(), windows.data_ptr()
        if bound == self._bound:
            return
        self._bound = bound
        blocks, heads, tokens, content = kv_cache.shape
        self.pages = kv_cache.as_strided(
            (blocks, heads, tokens * content), (kv_cache.stride(0), tokens * content, 1), kv_cache.storage_offset()
        )
        views = self.layout.views(self.pages)
        self.sections = views.k_codes, views.k_meta, views.v_codes, views.v_meta
        self.windows = windows

    # Write ------------------------------------------------------------------------------------------------------------

    def store(self, k: Tensor, v: Tensor, slots: Tensor, window_slots: Tensor) -> None:
        """Write ``k, v`` ``[T, heads, d]`` to both stores."""
        n = min(k.shape[0], slots.shape[0])
        if self.portable:
            portable.store(
                self.pages, self.windows, self.layout, self.transform, k[:n], v[:n], slots[:n], window_slots[:n]
            )
            return
        triton_store.store(
            k[:n], v[:n], self.sections, self._kernel_windows(self.no_table), slots[:n], window_slots[:n],
            *self._sides(k.dtype),
        )  # fmt: skip

    def _sides(self, kind: torch.dtype) -> tuple[triton_store.Transform, triton_store.Transform]:
        """K's and V's constants as the store kernel takes them for tokens of type ``kind``."""
        rotation = "split" if kind == self.kind and kind.itemsize == 2 else "rotation"
        k, v = (
            triton_store.Transform(
                self._constant(f"{x}_{rotation}") if self.rotates else None,
                self._constant(f"{x}_mean") if has_mean else None,
                self._constant(f"{x}_shrink"),
                self._constant(f"{x}_unit"),
            )
            for x, has_mean in (("k", self.has_k_mean), ("v", self.has_v_mean))
        )
        return k, v

    def _kernel_windows(self, table: Tensor) -> triton_decode.Windows:
        """The window store as the Triton kernels take it."""
        return triton_decode.Windows(self.windows[:, 0], self.windows[:, 1], table)

    # Attend -----------------------------------------------------------------------------------------------------------

    def decode(self, q: Tensor, step: OscarMetadata, window_table: Tensor, out: Tensor, shape: LayerShape) -> None:
        """Attend for the decodes of a step, ``q`` and ``out`` ``[T, query heads, d]``; all keys are in the stores."""
        requests = step.num_decodes
        if self.portable:
            self._attend_portable(q, None, None, step.query_start, step.lengths, 0, requests, step, window_table, out)
            return
        scratch, config = step.scratch, self.layout.config
        plan = scratch.plan(shape, requests, step.max_decode_query)
        rotated = scratch.rotated[: q.numel()].view(q.shape)
        needs_bias = self.has_k_mean and (self.spec.softcap is not None or self.sinks is not None)
        bias = scratch.bias[: q.shape[0] * q.shape[1]].view(q.shape[:2]) if needs_bias else None
        cuda = shape.kernel(q.device) == "cuda"
        fused = cuda and not needs_bias and q.dtype == torch.bfloat16  # the kernel rotates the query itself
        if not fused:
            mean = self._constant("k_mean") if needs_bias else None
            triton_decode.rotate_query(q, self._constant("q_rotation"), rotated, mean=mean, bias=bias)
        common: dict[str, Any] = {
            "geometry": plan, "out": out, "sink": config.sink, "recent": config.recent, "scale": self.spec.scale,
            "k_unit": self._constant("k_unit"), "v_unit": self._constant("v_unit"), "q_bias": bias,
            "sinks": self.sinks, "v_mean": self._constant("v_mean") if self.has_v_mean else None,
            "softcap": self.spec.softcap,
        }  # fmt: skip
        table = step.block_table[:requests]
        window_table = window_table[:requests]
        query_start, lengths = step.query_start[: requests + 1], step.lengths[:requests]
        if cuda:
            cuda_decode.decode(
                q if fused else rotated, self.sections, (self.windows[:, 0], self.windows[:, 1]), table, window_table,
                query_start, lengths, partial=scratch.partial, arrived=scratch.arrived,
                v_back=self._constant("v_back"), k_turn=self._constant("k_turn") if fused else None, **common,
            )  # fmt: skip
        else:
            triton_decode.decode(
                rotated, self.sections, self._kernel_windows(window_table), table, query_start, lengths,
                workspace=scratch.partial, v_rotation=self._constant("v_rotation"), **common,
            )  # fmt: skip

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        step: OscarMetadata,
        prefill: PrefillMetadata,
        window_table: Tensor,
        out: Tensor,
    ) -> None:
        """Attend for the other requests of a step; ``k, v`` ``[T, heads, d]`` are their new tokens, already stored."""
        if self.portable:
            self._attend_portable(
                q, k, v, prefill.query_start, prefill.lengths, prefill.first, len(prefill.lengths), step,
                window_table, out,
            )  # fmt: skip
            return
        rows = slice(prefill.first, None)
        history.attend(
            self._stores(), q, k, v, out, query_start=prefill.query_start, longest_query=prefill.longest_query,
            groups=prefill.groups, page_table=step.block_table[rows], window_table=window_table[rows],
            scratch=step.scratch.history_rows(k.shape[1], k.shape[2]), flash=self.flash, merge=merge_attn_states,
        )  # fmt: skip

    @cached_property
    def flash(self) -> history.Flash:
        """The dense attention kernel of this device."""
        return VllmFlash(self.layout.head_dim, self.spec.softcap, self.sinks)

    def _stores(self) -> history.Stores:
        """Both stores, as history is read from them."""
        k_mean, v_mean = (
            self._constant(name) if used else None
            for name, used in (("k_mean", self.has_k_mean), ("v_mean", self.has_v_mean))
        )
        return history.Stores(
            self.sections, self.windows, self._constant("q_rotation"), self._constant("v_rotation"),
            self._constant("k_unit"), self._constant("v_unit"), k_mean, v_mean, self.layout.config, self.spec,
            self.sinks,
        )  # fmt: skip

    def _attend_portable(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, query_start: Tensor, lengths: Tensor, first: int,
        requests: int, step: OscarMetadata, window_table: Tensor, out: Tensor,
    ) -> None:  # fmt: skip
        starts, totals = query_start.tolist(), lengths.tolist()
        transform = self.transform
        empty = q.new_empty(0, transform.heads, q.shape[-1])
        for r in range(requests):
            rows = slice(starts[r], starts[r + 1])
            if starts[r] == starts[r + 1]:
                continue
            for part in (rows,) if k is not None else (slice(i, i + 1) for i in range(rows.start, rows.stop)):
                # A decode query sees its own key through the stores; earlier drafts of the step are there as well.
                length = totals[r] - (starts[r + 1] - part.stop)
                out[part] = portable.attend(
                    self.pages, self.windows, self.layout, transform, self.spec, q[part],
                    empty if k is None else k[part], empty if v is None else v[part], length,
                    step.block_table[first + r], window_table[first + r],
                    raw=k is not None and self.layout.config.prefill_mode == "raw", sinks=self.sinks,
                ).to(out.dtype)  # fmt: skip

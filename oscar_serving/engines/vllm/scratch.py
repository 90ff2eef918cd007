"""Scratch memory and launch geometry of decode steps, fixed before the first CUDA graph is captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from oscar_kernels.cuda import decode as cuda_decode
from oscar_kernels.triton import config as triton_config
from oscar_kernels.triton import decode as triton_decode
from oscar_serving.attention.history import SCRATCH_ROWS
from oscar_serving.engines.vllm.options import INT2_BLOCK, WINDOW_BLOCK

Kernel = Literal["cuda", "triton"]


class LayerShape(NamedTuple):
    """What decides the decode kernel of a layer: heads of this rank, head size, bits, groups a head."""

    query_heads: int
    heads: int
    head_dim: int
    k_bits: int
    v_bits: int
    groups: int

    def kernel(self, device: torch.device) -> Kernel:
        """The CUDA kernel on NVIDIA cards for the layouts that it knows, else the Triton kernel."""
        if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
            return "triton"
        reason = cuda_decode.supported(self.head_dim, self.k_bits, self.v_bits, self.groups, INT2_BLOCK, WINDOW_BLOCK)
        return "cuda" if reason is None else "triton"

    def plan(self, requests: int, queries: int, max_length: int, device: torch.device) -> Any:
        """Launch geometry for up to ``queries`` new tokens a request."""
        ratio = self.query_heads // self.heads
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        if self.kernel(device) == "cuda":
            return cuda_decode.plan(
                requests, self.heads, ratio, self.head_dim, INT2_BLOCK, max_queries=queries, max_length=max_length,
                sms=sms,
            )  # fmt: skip
        config = triton_config.decode_config(
            device,
            head_dim=self.head_dim,
            k_bits=self.k_bits,
            v_bits=self.v_bits,
            ratio=ratio,
            page_size=INT2_BLOCK,
            rows=queries * ratio,
        )
        return triton_decode.plan(requests, self.heads, ratio, queries, max_length, sms, config)

    def workspace(self, requests: int, plan: Any, device: torch.device) -> tuple[int, int]:
        """float32 and int32 elements that the kernel needs."""
        if self.kernel(device) == "cuda":
            return cuda_decode.workspace_size(requests, self.heads, self.head_dim, plan)
        return triton_decode.workspace_size(requests, self.heads, self.head_dim, plan), 0


@dataclass
class Scratch:
    """Buffers shared by all layers of a group: layers run one after the other.

    Attributes
    ----------
    partial
        float32: partial results of splits.
    arrived
        int32: counters that are zero between launches.
    rotated
        float32 ``[tokens, query heads, d]`` (flat): queries in cache space.
    bias
        float32 ``[tokens, query heads]`` (flat): ``q · k_mean``.
    history
        K and V of a stretch of the history, 16-bit ``[2, rows * heads * d]`` (flat).
    """

    partial: Tensor
    arrived: Tensor
    rotated: Tensor
    bias: Tensor
    history: Tensor
    rows: int
    max_length: int
    device: torch.device
    plans: dict[tuple[LayerShape, int, int], Any] = field(default_factory=dict)

    @classmethod
    def reserve(
        cls, shapes: Sequence[LayerShape], vllm_config: Any, queries: int, recent: int, device: torch.device
    ) -> Scratch:
        """Allocate for the largest decode batch of any of ``shapes`` with up to ``queries`` new tokens a request."""
        requests = vllm_config.scheduler_config.max_num_seqs
        max_length = vllm_config.model_config.max_model_len
        partial = arrived = rotated = bias = 0
        rows = min(SCRATCH_ROWS, 2 * max_length)
        rows = max(rows, 2 * recent, vllm_config.scheduler_config.max_num_batched_tokens)
        kv = max(shape.heads * shape.head_dim for shape in shapes)
        for shape in set(shapes):
            for q in {1, queries}:
                for n in range(1, requests + 1):
                    floats, counters = shape.workspace(n, shape.plan(n, q, max_length, device), device)
                    partial, arrived = max(partial, floats), max(arrived, counters)
            tokens = requests * queries
            rotated = max(rotated, tokens * shape.query_heads * shape.head_dim)
            bias = max(bias, tokens * shape.query_heads)
        return cls(
            torch.empty(partial, dtype=torch.float32, device=device),
            torch.zeros(max(arrived, 1), dtype=torch.int32, device=device),
            torch.empty(rotated, dtype=torch.float32, device=device),
            torch.empty(bias, dtype=torch.float32, device=device),
            torch.empty(2, rows * kv, dtype=vllm_config.model_config.dtype, device=device),
            rows,
            max_length,
            device,
        )

    def history_rows(self, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Scratch for K and V ``[rows, heads, d]`` of a layer."""
        k, v = (flat[: self.rows * heads * head_dim].view(self.rows, heads, head_dim) for flat in self.history)
        return k, v

    def plan(self, shape: LayerShape, requests: int, queries: int) -> Any:
        """Geometry of a decode batch; it depends on the batch's shape only, so a captured graph stays valid."""
        key = (shape, requests, queries)
        if key not in self.plans:
            self.plans[key] = shape.plan(requests, queries, self.max_length, self.device)
        return self.plans[key]

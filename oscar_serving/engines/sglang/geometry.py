"""Launch geometry and scratch memory of a rank's layers, fixed before the first CUDA graph is captured."""

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
from oscar_serving.engines.sglang.options import PAGE, WINDOW_PAGE


class LayerShape(NamedTuple):
    """What decides the decode kernel: heads of this rank, head size, bits, groups a head."""

    query_heads: int
    heads: int
    head_dim: int
    k_bits: int
    v_bits: int
    groups: int

    def kernel(self, device: torch.device) -> Literal["cuda", "triton"]:
        """The CUDA kernel on NVIDIA cards for the layouts that it knows, else the Triton kernel."""
        if device.type != "cuda" or torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
            return "triton"
        reason = cuda_decode.supported(self.head_dim, self.k_bits, self.v_bits, self.groups, PAGE, WINDOW_PAGE)
        return "cuda" if reason is None else "triton"

    def plan(self, requests: int, max_length: int, device: torch.device) -> Any:
        """Launch geometry for one new token of each of ``requests``."""
        ratio = self.query_heads // self.heads
        sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
        if self.kernel(device) == "cuda":
            return cuda_decode.plan(
                requests, self.heads, ratio, self.head_dim, PAGE, max_queries=1, max_length=max_length, sms=sms
            )
        config = triton_config.decode_config(
            device, head_dim=self.head_dim, k_bits=self.k_bits, v_bits=self.v_bits, ratio=ratio, page_size=PAGE,
            rows=ratio,
        )  # fmt: skip
        return triton_decode.plan(requests, self.heads, ratio, 1, max_length, sms, config)

    def workspace(self, requests: int, plan: Any, device: torch.device) -> tuple[int, int]:
        """float32 and int32 elements that the kernel needs."""
        if self.kernel(device) == "cuda":
            return cuda_decode.workspace_size(requests, self.heads, self.head_dim, plan)
        return triton_decode.workspace_size(requests, self.heads, self.head_dim, plan), 0


@dataclass
class Scratch:
    """Buffers that all layers share: layers run one after the other.

    Attributes
    ----------
    partial, arrived
        Partial results of splits (float32), and counters that are zero between launches (int32).
    rotated, bias
        Queries in cache space, and ``q · k_mean``; float32, flat.
    history
        K and V of a stretch of the history, 16-bit ``[2, rows * heads * d]``.
    """

    partial: Tensor
    arrived: Tensor
    rotated: Tensor
    bias: Tensor
    history: Tensor
    rows: int
    max_length: int
    device: torch.device
    plans: dict[tuple[LayerShape, int], Any] = field(default_factory=dict)

    @staticmethod
    def history_bytes(shapes: Sequence[LayerShape], max_length: int, recent: int) -> int:
        """Bytes of the stretch's K and V."""
        return 4 * Scratch._rows(max_length, recent) * max(s.heads * s.head_dim for s in shapes)

    @staticmethod
    def _rows(max_length: int, recent: int) -> int:
        return max(min(SCRATCH_ROWS, 2 * max_length), 2 * recent)

    @classmethod
    def reserve(
        cls, shapes: Sequence[LayerShape], requests: int, max_length: int, recent: int, dtype: torch.dtype,
        device: torch.device,
    ) -> Scratch:  # fmt: skip
        """Allocate for decode batches of up to ``requests``."""
        partial = arrived = 0
        for shape in set(shapes):
            for n in range(1, requests + 1):
                floats, counters = shape.workspace(n, shape.plan(n, max_length, device), device)
                partial, arrived = max(partial, floats), max(arrived, counters)
        queries = max(s.query_heads * s.head_dim for s in shapes)
        rows = cls._rows(max_length, recent)
        return cls(
            torch.empty(partial, dtype=torch.float32, device=device),
            torch.zeros(max(arrived, 1), dtype=torch.int32, device=device),
            torch.empty(requests * queries, dtype=torch.float32, device=device),
            torch.empty(requests * max(s.query_heads for s in shapes), dtype=torch.float32, device=device),
            torch.empty(2, rows * max(s.heads * s.head_dim for s in shapes), dtype=dtype, device=device),
            rows,
            max_length,
            device,
        )

    def history_rows(self, heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Scratch for K and V ``[rows, heads, d]`` of a layer."""
        k, v = (flat[: self.rows * heads * head_dim].view(self.rows, heads, head_dim) for flat in self.history)
        return k, v

    def plan(self, shape: LayerShape, requests: int) -> Any:
        """Geometry of a decode batch; it depends on the batch's size only, so a captured graph stays valid."""
        key = (shape, requests)
        if key not in self.plans:
            self.plans[key] = shape.plan(requests, self.max_length, self.device)
        return self.plans[key]

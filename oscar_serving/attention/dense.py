"""Dense attention over packed sequences with the log-sum-exp: PyTorch's own FlashAttention, and plain PyTorch.

Both have the form of :class:`~oscar_serving.attention.history.Flash`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_serving.config import ConfigError


class AtenFlash:
    """FlashAttention as PyTorch ships it for NVIDIA cards of compute capability 8.0 or later."""

    def __init__(self, head_dim: int, softcap: float | None) -> None:
        if softcap is not None:
            raise ConfigError("oscar: PyTorch's FlashAttention has no logit soft cap; use another kv-cache dtype")
        if head_dim > 256 or head_dim % 8:
            raise ConfigError(f"oscar: FlashAttention does not take head size {head_dim}; use another kv-cache dtype")

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, causal: bool,
        window: int | None = None, scale: float, softcap: float | None, sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See :class:`~oscar_serving.attention.history.Flash`; causal is aligned at the last query and key."""
        if sinks is not None or softcap is not None:
            raise NotImplementedError("oscar: learned sinks and soft cap are refused at start")
        result, lse = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale,
            window_size_left=None if window is None else window - 1, window_size_right=None if window is None else 0,
        )[:2]  # fmt: skip
        if lse.ndim == 3:  # [requests, heads, longest], as older versions return it
            tokens = torch.arange(q.shape[0], device=q.device, dtype=cu_q.dtype)
            request = torch.bucketize(tokens, cu_q[1:], right=True)
            lse = lse[request, :, tokens - cu_q[request]].mT.contiguous()
        if out is not None:
            out.copy_(result)
            result = out
        return result, lse


class PlainFlash:
    """The same in PyTorch, one dense product a request: for checks without a GPU."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, causal: bool,
        window: int | None = None, scale: float, softcap: float | None, sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See :class:`~oscar_serving.attention.history.Flash`."""
        if sinks is not None:
            raise NotImplementedError("oscar: learned sinks are refused at start")
        out = torch.empty_like(q) if out is None else out
        lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
        ratio = q.shape[1] // k.shape[1]
        starts, keys = cu_q.tolist(), cu_k.tolist()
        for r in range(len(starts) - 1):
            rows, columns = slice(starts[r], starts[r + 1]), slice(keys[r], keys[r + 1])
            n, m = rows.stop - rows.start, columns.stop - columns.start
            mine_k, mine_v = (x[columns].float().repeat_interleave(ratio, 1) for x in (k, v))
            score = torch.einsum("qhd,khd->hqk", q[rows].float(), mine_k) * scale
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            position, key = torch.arange(n)[:, None] + (m - n), torch.arange(m)[None, :]
            if causal:
                score = score.masked_fill(key > position, -torch.inf)
            if window is not None:
                score = score.masked_fill(key <= position - window, -torch.inf)
            total = torch.logsumexp(score, -1) if m else torch.full((q.shape[1], n), -torch.inf)
            weight = torch.exp(score - torch.where(total == -torch.inf, 0.0, total)[..., None])
            out[rows] = torch.einsum("hqk,khd->qhd", weight, mine_v).to(out.dtype)
            lse[:, rows] = total
        return out, lse

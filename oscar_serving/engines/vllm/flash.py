"""The dense attention kernel of prefill: FlashAttention as vLLM ships it."""

from __future__ import annotations

import torch
from torch import Tensor

from oscar_serving.config import ConfigError


class VllmFlash:
    """vLLM's ``flash_attn_varlen_func`` in the version that it would choose for this card and layer."""

    def __init__(self, head_dim: int, softcap: float | None, sinks: Tensor | None) -> None:
        from vllm.v1.attention.backends import fa_utils

        version = fa_utils.get_flash_attn_version(
            head_size=head_dim, has_sinks=sinks is not None, requires_softcap=softcap is not None
        )
        if version is None:
            raise ConfigError(
                "oscar: prefill needs FlashAttention, which vLLM does not offer on this device; "
                "use a CUDA card of compute capability 8.0 or later"
            )
        if sinks is not None and not fa_utils.flash_attn_supports_sinks():
            raise ConfigError(
                "oscar: learned attention sinks need FlashAttention 3 (Hopper); use another kv-cache dtype"
            )
        self.version = version
        self.function = fa_utils.flash_attn_varlen_func

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, causal: bool,
        window: int | None = None, scale: float, softcap: float | None, sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See :class:`~oscar_serving.attention.history.Flash`."""
        extra = {} if sinks is None else {"s_aux": sinks}
        result: tuple[Tensor, Tensor] = self.function(
            q, k, v, max_q, cu_q, max_k, cu_k, softmax_scale=scale, causal=causal,
            window_size=[-1, -1] if window is None else [window - 1, 0], softcap=softcap or 0.0,
            return_softmax_lse=True, out=out, fa_version=self.version, **extra,
        )[:2]  # fmt: skip
        return result


class TorchFlash:
    """The same in PyTorch, for checks on a CPU; one dense product a request."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, *, causal: bool,
        window: int | None = None, scale: float, softcap: float | None, sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See :class:`~oscar_serving.attention.history.Flash`."""
        out = torch.empty_like(q) if out is None else out
        tokens, query_heads, _ = q.shape
        lse = torch.full((query_heads, tokens), -torch.inf)
        ratio = query_heads // k.shape[1]
        starts, keys = cu_q.tolist(), cu_k.tolist()
        for r in range(len(starts) - 1):
            rows, cols = slice(starts[r], starts[r + 1]), slice(keys[r], keys[r + 1])
            n, m = rows.stop - rows.start, cols.stop - cols.start
            kr, vr = (x[cols].float().repeat_interleave(ratio, 1) for x in (k, v))
            score = torch.einsum("qhd,khd->hqk", q[rows].float(), kr) * scale
            if softcap:
                score = softcap * torch.tanh(score / softcap)
            i, j = torch.arange(n)[:, None] + (m - n), torch.arange(m)[None, :]
            if causal:
                score = score.masked_fill(j > i, -torch.inf)
            if window is not None:
                score = score.masked_fill(j <= i - window, -torch.inf)
            total = torch.logsumexp(score, -1) if m else torch.full((query_heads, n), -torch.inf)
            if sinks is not None:
                total = torch.logaddexp(total, sinks.float()[:, None])
            weight = torch.exp(score - torch.where(total == -torch.inf, 0.0, total)[..., None])
            out[rows] = torch.einsum("hqk,khd->qhd", weight, vr).to(out.dtype)
            lse[:, rows] = total
        return out, lse

"""Streaming float64 second moments of Q, K and V of one layer."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from oscar_serving.cache.rule import reads_window
from oscar_serving.calibration.capture import LayerCall
from oscar_serving.config import OscarConfig

_BLOCK = 256
#: Every fourth query is enough for the sums that weigh by reads, and halves the time.
READ_STRIDE = 4


@dataclass
class Moments:
    """Sums over all calibration tokens of one layer, float64, one entry per KV head.

    The plain sums weigh every token alike. The ``read`` sums weigh a key, value or query by how much an error in what
    is read from the INT2 store moves the attention output: with probability ``p_ij`` of query ``i`` for key ``j`` in
    the INT2 store, an error ``e`` of the score moves the output by ``p_ij (v_j - o_i) e``, so scores weigh
    ``w_ij = p_ij^2 |v_j - o_i|^2``; an error of ``v_j`` moves it by ``p_ij`` times itself, so values weigh ``p_ij^2``.

    Attributes
    ----------
    qq
        ``[heads, d, d]`` sum of ``q^T q`` over the query heads of a group.
    kk, vv
        ``[heads, d, d]`` sums of ``k^T k`` and ``v^T v``.
    oo
        ``[heads, d, d]`` sum of ``o^T o`` with ``o = S v``, that is ``V^T S^T S V``: the true score-weighted target.
    proxy
        ``[heads, d, d]`` sum of ``w v^T v`` with ``w = k C_Q k^T``, the published code's stand-in for ``oo``.
    k_sum, v_sum
        ``[heads, d]`` sums.
    q_read, k_read, v_read
        ``[heads, d, d]`` weighted second moments.
    k_read_sum, v_read_sum
        ``[heads, d]`` weighted sums.
    k_weight, v_weight
        ``[heads]`` total weights (the queries' total is the keys').
    tokens, queries
        ``[1]`` counts: of tokens, and of queries times query heads of a group.
    """

    qq: Tensor
    kk: Tensor
    vv: Tensor
    oo: Tensor
    proxy: Tensor
    k_sum: Tensor
    v_sum: Tensor
    q_read: Tensor
    k_read: Tensor
    v_read: Tensor
    k_read_sum: Tensor
    v_read_sum: Tensor
    k_weight: Tensor
    v_weight: Tensor
    tokens: Tensor
    queries: Tensor

    @classmethod
    def empty(cls, heads: int, head_dim: int, device: torch.device | str = "cpu") -> Moments:
        """All sums zero."""
        shapes = {"sum": (heads, head_dim), "weight": (heads,), "tokens": (1,), "queries": (1,)}
        square = (heads, head_dim, head_dim)
        return cls(
            **{
                f.name: torch.zeros(shapes.get(f.name.rsplit("_", 1)[-1], square), dtype=torch.float64, device=device)
                for f in fields(cls)
            }
        )

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.kk.shape[0]

    def state(self) -> dict[str, Tensor]:
        """Tensors by field name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def to(self, device: torch.device) -> Moments:
        """Move the sums to a device, in place."""
        for name, value in self.state().items():
            setattr(self, name, value.to(device))
        return self

    def update(self, call: LayerCall, config: OscarConfig) -> Tensor:
        """Add one sequence and return its attention output, float32 ``[query heads, tokens, d]``.

        Parameters
        ----------
        config
            Windows of the position rule: the ``read`` sums count only what is read from the INT2 store.
        """
        heads, tokens = call.heads, call.tokens
        k, v = call.k.double(), call.v.double()
        flat = call.q.double().reshape(heads, -1, call.q.shape[-1])
        self.qq += flat.mT @ flat
        self.kk += k.mT @ k
        self.vv += v.mT @ v
        self.k_sum += k.sum(1)
        self.v_sum += v.sum(1)
        self.tokens += tokens
        self.queries += flat.shape[1]
        mean_qq = self.qq / self.queries
        proxy = ((k @ mean_qq) * k).sum(-1, keepdim=True)
        self.proxy += (v * proxy).mT @ v
        k_weight = torch.zeros(heads, tokens, dtype=torch.float64, device=k.device)
        v_weight = torch.zeros_like(k_weight)
        outputs = [
            self._add_block(call, queries, config, k_weight, v_weight)
            for queries in torch.split(torch.arange(tokens, device=k.device), _BLOCK)
        ]
        for weight, x, square, total, count in (
            (k_weight, k, self.k_read, self.k_read_sum, self.k_weight),
            (v_weight, v, self.v_read, self.v_read_sum, self.v_weight),
        ):
            weighted = x * weight[..., None]
            square += weighted.mT @ x
            total += weighted.sum(1)
            count += weight.sum(-1)
        return torch.cat(outputs, 2).flatten(0, 1)

    def _add_block(
        self, call: LayerCall, queries: Tensor, config: OscarConfig, k_weight: Tensor, v_weight: Tensor
    ) -> Tensor:
        """Add a block of queries to ``oo``, ``q_read`` and the keys' weights; returns its output."""
        q, keys = call.grouped_q(queries), call.span(queries)
        k, v = call.k[:, keys].float(), call.v[:, keys].float()[:, None]
        probability = call.softmax(call.scores(q, k, call.seen(queries, keys)))
        output = probability @ v
        o = output.double().flatten(1, 2)
        self.oo += o.mT @ o
        low = max(int(keys[0]), config.sink)
        old = keys[low - int(keys[0]) : max(0, int(queries[-1]) - config.recent + 1 - int(keys[0]))]
        if len(old):
            skip = int(old[0]) - int(keys[0])
            some = slice(None, None, READ_STRIDE)
            q, output_some, v = q[..., some, :], output[..., some, :], v[..., skip : skip + len(old), :]
            read = probability[..., some, skip : skip + len(old)].square()
            read *= quantized(call, queries[some], old, config)
            v_weight[:, old] += read.sum((1, 2))
            distance = v.square().sum(-1)[..., None, :] - 2 * output_some @ v.mT
            distance += output_some.square().sum(-1, keepdim=True)
            weight = read.mul_(distance.clamp_min_(0))
            k_weight[:, old] += weight.sum((1, 2))
            weighted = q.double() * weight.sum(-1, keepdim=True)
            self.q_read += weighted.flatten(1, 2).mT @ q.double().flatten(1, 2)
        return output


def quantized(call: LayerCall, queries: Tensor, keys: Tensor, config: OscarConfig) -> Tensor:
    """Bool ``[queries, keys]``: the keys at these positions that each query reads from the INT2 store."""
    window = reads_window(keys, queries[:, None], sink=config.sink, recent=config.recent)
    return call.seen(queries, keys) & ~window

"""What one layer does to K and V between the model and the cache."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from oscar_serving.rotation.hadamard import hadamard
from oscar_serving.rotation.spectral import check_inverse, check_orthogonal

#: Least unit of FP8 scales, far below any that is of use: stored values and their reciprocals stay normal float32.
LEAST_UNIT = 2.0**-64


@dataclass(frozen=True)
class LayerTransform:
    """Calibrated constants of one layer, one entry per KV head.

    The cache (both tiers) holds ``k' = (k - k_mean) @ k_rotation`` and ``v' = (v - v_mean) @ v_rotation``. Scores use
    ``q' = q @ q_rotation``, where ``q_rotation`` is ``k_rotation^-T``: ``q' k'^T = q k^T - q k_mean^T``, and the last
    term is the same for every key, so the softmax does not see it (softcap and LSE do: add ``q k_mean^T``). The output
    is ``o = o' @ v_rotation^T + v_mean``.

    Attributes
    ----------
    k_rotation, q_rotation
        float32 ``[heads, d, d]``, the inverse transpose of each other: the same matrix where it is orthogonal.
    v_rotation
        float32 ``[heads, d, d]``, orthogonal.
    k_mean, v_mean
        float32 ``[heads, d]``; zeros when unused.
    k_shrink, v_shrink
        float32 ``[heads]``, factor on a row's minimum and maximum before quantization, in (0, 1].
    k_unit, v_unit
        float32 ``[heads]``, unit of FP8 scale and minimum, in [2^-64, 2^64]; ones with 16-bit scales.
    """

    k_rotation: Tensor
    q_rotation: Tensor
    v_rotation: Tensor
    k_mean: Tensor
    v_mean: Tensor
    k_shrink: Tensor
    v_shrink: Tensor
    k_unit: Tensor
    v_unit: Tensor

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.k_rotation.shape[0]

    @property
    def head_dim(self) -> int:
        """Channels a head."""
        return self.k_rotation.shape[-1]

    @classmethod
    def plain(cls, heads: int, head_dim: int, *, rotate: bool = True, shrink: float = 1.0) -> LayerTransform:
        """Uncalibrated transform: Hadamard (``rotate``) or identity, no mean."""
        matrix = (hadamard(head_dim) if rotate else torch.eye(head_dim)).float()
        rotation = matrix.expand(heads, -1, -1).contiguous()
        zero, one = torch.zeros(heads, head_dim), torch.ones(heads)
        k, q, v = (rotation.clone() for _ in range(3))
        return cls(k, q, v, zero, zero.clone(), one * shrink, one * shrink, one, one.clone())

    def validate(self, name: str) -> None:
        """Raise ``ValueError`` naming the field unless shapes, ranges and orthogonality hold."""
        heads, d = self.heads, self.head_dim
        shapes = {"rotation": (heads, d, d), "mean": (heads, d), "shrink": (heads,), "unit": (heads,)}
        for field in fields(self):
            value = getattr(self, field.name)
            shape = shapes[field.name[2:]]
            if tuple(value.shape) != shape or value.dtype != torch.float32:
                raise ValueError(
                    f"{name}.{field.name}: expected float32 {shape}, got {value.dtype} {tuple(value.shape)}"
                )
            if not torch.isfinite(value).all():
                raise ValueError(f"{name}.{field.name}: has a value that is not finite")
        for field_name in ("k_shrink", "v_shrink"):
            value = getattr(self, field_name)
            if not ((value > 0) & (value <= 1)).all():
                raise ValueError(f"{name}.{field_name}: must lie in (0, 1], got {value.min():g} … {value.max():g}")
        for field_name in ("k_unit", "v_unit"):
            value = getattr(self, field_name)
            if not ((value >= LEAST_UNIT) & (value <= 1 / LEAST_UNIT)).all():
                raise ValueError(
                    f"{name}.{field_name}: must be positive, from 2^-64 to 2^64, got {value.min():g} … {value.max():g}"
                )
        check_inverse(self.k_rotation, self.q_rotation, f"{name}.k_rotation, q_rotation")
        check_orthogonal(self.v_rotation, f"{name}.v_rotation", tolerance=1e-5)

    def head_slice(self, start: int, stop: int) -> LayerTransform:
        """The KV heads ``start … stop`` (tensor parallelism)."""
        return replace(self, **{f.name: getattr(self, f.name)[start:stop] for f in fields(self)})

    def to(self, device: torch.device | str) -> LayerTransform:
        """A copy on another device."""
        return replace(self, **{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def rotate_k(self, k: Tensor) -> Tensor:
        """``[tokens, heads, d]`` → float32 rotated K."""
        return torch.einsum("thd,hde->the", k.float() - self.k_mean, self.k_rotation)

    def rotate_v(self, v: Tensor) -> Tensor:
        """``[tokens, heads, d]`` → float32 rotated V."""
        return torch.einsum("thd,hde->the", v.float() - self.v_mean, self.v_rotation)

    def rotate_q(self, q: Tensor) -> Tensor:
        """``[tokens, query heads, d]`` → float32 rotated Q (query heads grouped by KV head)."""
        grouped = q.float().unflatten(1, (self.heads, -1))
        return torch.einsum("thgd,hde->thge", grouped, self.q_rotation).flatten(1, 2)

    def unrotate_o(self, o: Tensor) -> Tensor:
        """Attention output ``[tokens, query heads, d]`` in cache space → float32 in model space."""
        grouped = o.float().unflatten(1, (self.heads, -1))
        back = torch.einsum("thge,hde->thgd", grouped, self.v_rotation) + self.v_mean[:, None]
        return back.flatten(1, 2)

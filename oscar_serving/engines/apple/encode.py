"""New rows into packed buffers: the Metal kernel on an Apple GPU, one matrix product and torch elsewhere."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from oscar_kernels.metal import bridge
from oscar_serving.codec.signed import Signed
from oscar_serving.codec.srft_int4 import SideTransform, SrftConfig
from oscar_serving.config import ConfigError
from oscar_serving.rotation import roots_of_unity, signs

#: Values encoded at once on the CPU, so that a long prefill's scratch stays small.
VALUES = 1 << 21


def encode_into(side: SideTransform, x: Tensor, out: Signed, first: int, bits: int, config: SrftConfig) -> None:
    """Encode ``x`` ``[batch, heads, tokens, d]`` into rows ``first …`` of ``out``."""
    tokens, d = x.shape[2], x.shape[-1]
    groups = config.groups(d)
    if x.device.type == "mps":
        if config.group_size is None:
            raise ConfigError(
                "group_size=None: the Metal kernels take 16 and 32; one scale a token runs on the CPU only"
            )
        _encode_metal(side, x, out, first, bits, config)
        return
    step = max(1, VALUES // (x.shape[0] * x.shape[1] * d))
    for begin in range(0, tokens, step):
        end = min(begin + step, tokens)
        packed = side.encode(x[:, :, begin:end], bits, groups)
        out.codes[:, :, first + begin : first + end] = packed.codes
        out.scales[:, :, first + begin : first + end] = packed.scales


def _encode_metal(side: SideTransform, x: Tensor, out: Signed, first: int, bits: int, config: SrftConfig) -> None:
    d, device = x.shape[-1], x.device
    sign, roots = _constants(d, config.seed, device)
    fused = config.rotation == "srft"
    if fused:
        rows, inverse = x, side.inverse_factors
    else:
        rows, inverse = x.float() @ side.encode_matrix, torch.ones(x.shape[1], d, device=device)
    bridge.encode(rows, sign, inverse, roots, out.codes, out.scales, first, bits, fused)


@lru_cache(maxsize=32)
def _constants(d: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    roots = torch.view_as_real(roots_of_unity(d)).float().contiguous()
    return signs(d, seed).float().to(device), roots.to(device)

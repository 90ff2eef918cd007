"""vLLM's in-place rotary embedding, in PyTorch."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):  # type: ignore[no-untyped-def]
    cos, sin = cos_sin_cache[positions.flatten()].float().chunk(2, dim=-1)
    for x in (query, key):
        if x is None:
            continue
        heads = x.view(x.shape[0], -1, head_size)
        rotated = heads[..., : 2 * cos.shape[-1]].float()
        a, b = rotated.chunk(2, -1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
        c, s = cos[:, None], sin[:, None]
        first, second = a * c - b * s, b * c + a * s
        both = torch.cat([first, second], -1) if is_neox else torch.stack([first, second], -1).flatten(-2)
        heads[..., : 2 * cos.shape[-1]] = both.to(x.dtype)

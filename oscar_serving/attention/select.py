"""Which implementation of attention serves a device."""

from __future__ import annotations

import torch

from oscar_serving.attention.base import AttentionBackend
from oscar_serving.attention.torch_backend import TorchBackend


def select_backend(device: torch.device | str) -> AttentionBackend:
    """The fastest backend for ``device`` (a torch device or its name)."""
    torch.device(device)
    return TorchBackend()

"""Which implementation of attention serves a device."""

from __future__ import annotations

import functools
import logging

import torch

from oscar_kernels.cpu import BuildError
from oscar_serving.attention.base import AttentionBackend
from oscar_serving.attention.cpu_backend import CpuBackend
from oscar_serving.attention.torch_backend import TorchBackend

log = logging.getLogger(__name__)


def select_backend(device: torch.device | str) -> AttentionBackend:
    """The fastest backend for ``device`` (a torch device or its name); which one is in its ``name``."""
    return _select(torch.device(device).type)


@functools.cache
def _select(device: str) -> AttentionBackend:
    if device == "cuda":
        # Triton comes with PyTorch for CUDA, and with no other.
        from oscar_serving.attention.triton_backend import TritonBackend

        return TritonBackend()
    if device == "cpu":
        try:
            return CpuBackend()
        except BuildError as error:
            log.warning("attention on the CPU in plain PyTorch, which is slower: %s", error)
    return TorchBackend()

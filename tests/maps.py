"""Maps of K that are not rotations, so that a test sees where K's and Q's are mistaken for each other."""

from __future__ import annotations

import torch
from torch import Tensor


def apart(rotation: Tensor) -> tuple[Tensor, Tensor]:
    """K's and Q's map, ``[..., d, d]`` each: ``rotation`` with channels stretched by powers of two, and its dual."""
    stretch = 2.0 ** (torch.arange(rotation.shape[-1], device=rotation.device) % 3 - 1)
    return rotation * stretch, rotation / stretch

"""A packed layer on the CPU through the compiled kernels: encoding always, attention when few tokens are new."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from oscar_kernels.cpu import BuildError
from oscar_kernels.cpu.srft import PagedRows, SrftKernels, srft_kernels
from oscar_serving.codec.signed import Signed
from oscar_serving.codec.srft_int4 import SideTransform

log = logging.getLogger(__name__)

#: New tokens of a sequence up to which the decode kernel serves it; it works best with few.
MAX_NEW_TOKENS = 16


@functools.cache
def cpu_kernels() -> SrftKernels | None:
    """The compiled kernels, or ``None`` (with a warning, once) where they cannot be built."""
    try:
        return srft_kernels()
    except BuildError as error:
        log.warning("the SRFT cache on the CPU in plain PyTorch, which is slower: %s", error)
        return None


class CompiledRows:
    """Packed buffers ``[batch, heads, capacity, row]`` and the matrices that go with them, one page a sequence.

    Parameters
    ----------
    kernels
        The compiled functions.
    k, v
        The whole buffers, contiguous, on the CPU.
    k_side, v_side
        Rotation and factors.
    """

    def __init__(
        self, kernels: SrftKernels, k: Signed, v: Signed, k_side: SideTransform, v_side: SideTransform
    ) -> None:
        self._kernels = kernels
        self._rows = PagedRows(*k, *v, k_side.rotation.shape[-1])
        self._encode = tuple(side.encode_matrix.contiguous() for side in (k_side, v_side))
        self._read = k_side.read_matrix.contiguous(), v_side.read_matrix.mT.contiguous()
        self._batch = torch.arange(k.codes.shape[0])
        self._table = self._batch.to(torch.int32)[:, None]

    @staticmethod
    def takes(head_dim: int, groups: int) -> bool:
        """Whether the kernels know this row: groups of a multiple of 16 channels."""
        return head_dim % (16 * groups) == 0

    def store(self, k: Tensor, v: Tensor, first: int) -> None:
        """Encode ``k, v`` ``[batch, heads, tokens, d]`` into rows ``first …``."""
        batch, _, tokens, _ = k.shape
        pages = self._batch.repeat_interleave(tokens)
        slots = torch.arange(first, first + tokens).repeat(batch)
        for value, x in enumerate((k, v)):
            rows = x.transpose(1, 2).flatten(0, 1)
            self._kernels.store(self._rows, rows, self._encode[value], pages, slots, value=bool(value))

    def attend(
        self, q: Tensor, mask: Tensor | None, first: int, keys: int, *, scale: float, window: int, softcap: float
    ) -> Tensor:
        """Causal attention of the last tokens to rows ``first … first + keys``.

        Parameters
        ----------
        q
            ``[batch, query heads, tokens, d]``, model space.
        mask
            bool ``[batch, tokens, keys]`` or ``None``.

        Returns
        -------
        Tensor
            float32 ``[batch, tokens, query heads, d]``, model space.
        """
        batch, heads, tokens, d = q.shape
        out = self._kernels.attend(
            self._rows,
            q.transpose(1, 2).reshape(batch * tokens, heads, d),
            *self._read,
            self._table,
            torch.full((batch,), keys, dtype=torch.int64),
            torch.arange(batch + 1) * tokens,
            self._batch,
            scale=scale,
            window=window,
            softcap=softcap,
            first=first,
            mask=mask,
        )
        return out.view(batch, tokens, heads, d)

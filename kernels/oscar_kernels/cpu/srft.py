"""The SRFT codec's compiled functions, on tensors."""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from oscar_kernels.cpu.build import load
from oscar_kernels.cpu.cache import _fields


class _Packed(ctypes.Structure):
    _fields_ = [
        ("codes", ctypes.c_void_p * 2),
        ("scales", ctypes.c_void_p * 2),
        ("page_size", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("bits", ctypes.c_int32 * 2),
        ("groups", ctypes.c_int32),
    ]


class _Attend(ctypes.Structure):
    _fields_ = [
        *_fields(
            p="q out k_read v_read_t table lengths query_start chosen mask",
            i64="table_stride first mask_request mask_token",
            i32="count ratio window threads",
            f="scale softcap",
        ),
    ]


class PagedRows:
    """Packed K and V of one layer as the kernels see them.

    Parameters
    ----------
    k_codes, v_codes
        uint8 ``[pages, heads, page_size, d * bits / 8]``, contiguous, on the CPU.
    k_scales, v_scales
        float16 ``[pages, heads, page_size, groups]``.
    head_dim
        ``d``; groups have a multiple of 16 channels.
    """

    def __init__(self, k_codes: Tensor, k_scales: Tensor, v_codes: Tensor, v_scales: Tensor, head_dim: int) -> None:
        pages, heads, size, groups = k_scales.shape
        for name, x, dtype in (
            ("k_codes", k_codes, torch.uint8),
            ("v_codes", v_codes, torch.uint8),
            ("k_scales", k_scales, torch.float16),
            ("v_scales", v_scales, torch.float16),
        ):
            if (
                x.dtype != dtype
                or not x.is_contiguous()
                or x.device.type != "cpu"
                or x.shape[:3] != (pages, heads, size)
            ):
                raise ValueError(
                    f"{name}: expected contiguous {dtype} [{pages}, {heads}, {size}, …] on the CPU, "
                    f"got {x.dtype} {tuple(x.shape)} on {x.device}"
                )
        bits = [x.shape[-1] * 8 // head_dim for x in (k_codes, v_codes)]
        if any(b not in (4, 8) for b in bits) or head_dim % (16 * groups):
            raise ValueError(f"bits {bits}, {groups} groups of {head_dim} channels: allowed are 4, 8, multiples of 16")
        self._keep = (k_codes, k_scales, v_codes, v_scales)
        self.heads, self.head_dim, self.pages, self.page_size = heads, head_dim, pages, size
        self.struct = _Packed(page_size=size, heads=heads, head_dim=head_dim, groups=groups)
        self.struct.codes[:] = [k_codes.data_ptr(), v_codes.data_ptr()]
        self.struct.scales[:] = [k_scales.data_ptr(), v_scales.data_ptr()]
        self.struct.bits[:] = bits


class SrftKernels:
    """The compiled functions; building them is the constructor's work.

    Raises
    ------
    oscar_kernels.cpu.BuildError
        They cannot be built here.
    """

    def __init__(self) -> None:
        library = load("srft")
        self._store, self._attend = library.oscar_srft_store, library.oscar_srft_attend
        self._store.restype = self._attend.restype = None

    def store(self, rows: PagedRows, x: Tensor, matrix: Tensor, pages: Tensor, slots: Tensor, *, value: bool) -> None:
        """Encode new K, or V (``value``).

        Parameters
        ----------
        x
            ``[tokens, heads, d]``, any float type.
        matrix
            float32 ``[heads, d, d]``: rotation and factors, contiguous.
        pages, slots
            int64 ``[tokens]``: where each goes.
        """
        x = x.float().contiguous()
        self._store(
            ctypes.byref(rows.struct), int(value), _pointer(x), _pointer(matrix), _pointer(pages), _pointer(slots),
            x.shape[0], torch.get_num_threads(),
        )  # fmt: skip

    def attend(
        self,
        rows: PagedRows,
        q: Tensor,
        k_read: Tensor,
        v_read_t: Tensor,
        table: Tensor,
        lengths: Tensor,
        query_start: Tensor,
        chosen: Tensor,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        first: int = 0,
        mask: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of a few new tokens for some requests of a batch.

        Parameters
        ----------
        q
            ``[T, query heads, d]`` in the model's space.
        k_read, v_read_t
            float32 ``[heads, d, d]``, contiguous: the query's matrix of K; that of V transposed.
        table
            int32 ``[requests, pages]``.
        lengths, query_start
            int64 ``[requests]`` keys, new ones included; ``[requests + 1]`` rows of ``q``.
        chosen
            int64: requests to serve.
        window, softcap, first
            0 for none; row of key 0, counted from the beginning of the first page.
        mask
            bool ``[requests, new tokens, keys]``, ``True`` where a query sees a key, besides the causal rule.
        out
            float32 of the shape of ``q``, contiguous; rows of other requests are left as they are.

        Returns
        -------
        Tensor
            ``out``, or a new tensor.
        """
        q = q.float().contiguous()
        out = torch.empty_like(q) if out is None else out
        if mask is not None:
            mask = mask if mask.stride(-1) == 1 else mask.contiguous()
        args = _Attend(
            q.data_ptr(), out.data_ptr(), k_read.data_ptr(), v_read_t.data_ptr(), table.data_ptr(), lengths.data_ptr(),
            query_start.data_ptr(), chosen.data_ptr(), None if mask is None else mask.data_ptr(), table.stride(0),
            first, 0 if mask is None else mask.stride(0), 0 if mask is None else mask.stride(1), chosen.shape[0],
            q.shape[1] // rows.heads, window, torch.get_num_threads(), scale, softcap,
        )  # fmt: skip
        self._attend(ctypes.byref(rows.struct), ctypes.byref(args))
        return out


@functools.cache
def srft_kernels() -> SrftKernels:
    """The kernels, built once a process."""
    return SrftKernels()


def _pointer(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())

"""The structures of ``cache.h``, and the two kernels as functions of tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from oscar_kernels.cpu.build import BuildError, load

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3}


def _fields(**types: str) -> list[tuple[str, type]]:
    c_types = {"p": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f": ctypes.c_float}
    return [(name, c_types[kind]) for kind, names in types.items() for name in names.split()]


class Layer(ctypes.Structure):
    """One attention layer; keeps the tensors that it points to."""

    _fields_ = [
        *_fields(p="pages", i64="page_stride head_stride"),
        *_fields(p="windows", i64="w_page_stride w_kv_stride w_head_stride w_token_stride"),
        *_fields(p="k_rotation q_rotation v_rotation v_rotation_t k_mean v_mean k_shrink v_shrink k_unit v_unit"),
        ("section", ctypes.c_int64 * 4),
        *_fields(
            i32="heads head_dim page_size k_bits v_bits groups meta_type window_type rotate windows_only sink "
            "recent sliding_window",
            f="scale softcap",
        ),
        *_fields(i32="ratio"),
    ]

    keep: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        pages: Tensor,
        windows: Tensor,
        *,
        k_rotation: Tensor,
        q_rotation: Tensor,
        v_rotation: Tensor,
        k_mean: Tensor,
        v_mean: Tensor,
        k_shrink: Tensor,
        v_shrink: Tensor,
        k_unit: Tensor,
        v_unit: Tensor,
        section_bytes: Sequence[int],
        k_bits: int,
        v_bits: int,
        groups: int,
        meta_dtype: torch.dtype,
        rotate: bool,
        windows_only: bool,
        sink: int,
        recent: int,
        sliding_window: int | None,
        scale: float,
        softcap: float | None,
    ) -> Layer:
        """Describe a layer.

        Parameters
        ----------
        pages
            uint8 ``[pages, heads, bytes]``, any page and head stride.
        windows
            float32, float16 or bfloat16 ``[window pages, 2, heads, page_size, d]``, channels contiguous.
        k_rotation … v_unit
            float32, as in ``LayerTransform``; ``rotate`` false when rotations are the identity and means zero.
        section_bytes
            Bytes of the four sections of a head in a page.

        Raises
        ------
        ValueError
            A tensor does not have the type, shape or strides above.
        """
        heads, size, d = windows.shape[2:]
        constants = {
            "k_rotation": k_rotation, "q_rotation": q_rotation, "v_rotation": v_rotation, "v_rotation_t": v_rotation.mT,
            "k_mean": k_mean, "v_mean": v_mean, "k_shrink": k_shrink, "v_shrink": v_shrink,
            "k_unit": k_unit, "v_unit": v_unit,
        }  # fmt: skip
        shapes = {"rotation": (heads, d, d), "rotation_t": (heads, d, d), "mean": (heads, d)}
        for name, x in constants.items():
            shape = shapes.get(name[2:], (heads,))
            if x.dtype != torch.float32 or tuple(x.shape) != shape or x.device.type != "cpu":
                got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
                raise ValueError(f"{name}: expected float32 {shape} on the CPU, got {got}")
            constants[name] = x.contiguous()
        if pages.dtype != torch.uint8 or pages.shape[1:] != (heads, sum(section_bytes)) or pages.stride(2) != 1:
            raise ValueError(
                f"pages: expected uint8 [pages, {heads}, {sum(section_bytes)}] with contiguous bytes, "
                f"got {pages.dtype} {tuple(pages.shape)} strides {pages.stride()}"
            )
        if windows.dtype not in _TYPES or windows.shape[1] != 2 or windows.stride(4) != 1:
            raise ValueError(
                "windows: expected a float type, [pages, 2, heads, page_size, d] with contiguous channels, "
                f"got {windows.dtype} {tuple(windows.shape)} strides {windows.stride()}"
            )
        if size % 16 or d % 8:
            raise ValueError(f"page_size={size}, d={d}: page size must be a multiple of 16, d of 8")
        layer = cls(
            pages=pages.data_ptr(), page_stride=pages.stride(0), head_stride=pages.stride(1),
            windows=windows.data_ptr(), w_page_stride=windows.stride(0), w_kv_stride=windows.stride(1),
            w_head_stride=windows.stride(2), w_token_stride=windows.stride(3),
            **{name: x.data_ptr() for name, x in constants.items()},
            heads=heads, head_dim=d, page_size=size, k_bits=k_bits, v_bits=v_bits,
            groups=groups, meta_type=_TYPES[meta_dtype], window_type=_TYPES[windows.dtype], rotate=rotate,
            windows_only=windows_only, sink=sink, recent=recent, sliding_window=sliding_window or 0, scale=scale,
            softcap=softcap or 0.0,
        )  # fmt: skip
        layer.section[:] = [sum(section_bytes[:n]) for n in range(4)]
        layer.keep = (pages, windows, *constants.values())
        return layer


class Batch(ctypes.Structure):
    """Tables of a ragged batch; keeps the tensors that it points to."""

    _fields_ = [
        *_fields(p="query_start lengths chunk_start page_table window_table", i64="page_row window_row"),
        *_fields(p="requests", i32="request_count total"),
    ]

    keep: tuple[Tensor, ...]

    @classmethod
    def of(
        cls,
        query_start: Tensor,
        lengths: Tensor,
        chunk_start: Tensor,
        page_table: Tensor,
        window_table: Tensor,
        requests: Sequence[int],
    ) -> Batch:
        """Tables int32 on the CPU (rows contiguous), and the requests to attend for."""
        chosen = torch.tensor(list(requests), dtype=torch.int32)
        tensors = (query_start, lengths, chunk_start, page_table, window_table)
        for x in tensors:
            if x.dtype != torch.int32 or x.stride(-1) != 1 or x.device.type != "cpu":
                raise ValueError(f"tables: expected int32 on the CPU with contiguous rows, got {x.dtype} {x.stride()}")
        batch = cls(
            *(x.data_ptr() for x in tensors),
            page_table.stride(0),
            window_table.stride(0),
            chosen.data_ptr(),
            len(requests),
            lengths.shape[0],
        )
        batch.keep = (*tensors, chosen)
        return batch


class Rows(ctypes.Structure):
    """A float32, float16 or bfloat16 tensor ``[tokens, heads, d]`` with contiguous channels."""

    _fields_ = _fields(p="data", i64="token_stride head_stride", i32="heads type")


def rows(x: Tensor) -> Rows:
    """Describe ``x``, which the caller keeps alive."""
    return Rows(x.data_ptr(), x.stride(0), x.stride(1), x.shape[1], _TYPES[x.dtype])


class Kernels:
    """The compiled functions; building them is the constructor's work."""

    def __init__(self) -> None:
        with ThreadPoolExecutor() as pool:  # the compiler takes a few seconds for each
            store, decode, prefill = pool.map(load, ("store", "decode", "prefill"))
        store.oscar_layer_bytes.restype = ctypes.c_int64
        size = store.oscar_layer_bytes()
        if size != ctypes.sizeof(Layer):
            raise BuildError(f"Layer has {size} bytes in cache.h and {ctypes.sizeof(Layer)} in cache.py")
        self._store, self._rotate = store.oscar_store, store.oscar_rotate
        self._decode, self._prefill = decode.oscar_decode, prefill.oscar_prefill
        for function in (self._store, self._rotate, self._decode, self._prefill):
            function.restype = None

    def store(self, layer: Layer, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Rotate ``k, v`` ``[T, heads, d]`` and write them to both stores; tokens without a page are skipped."""
        self._store(_ref(layer), _ref(batch), _ref(rows(k)), _ref(rows(v)), torch.get_num_threads())

    def rotate(self, layer: Layer, x: Tensor, *, value: bool) -> Tensor:
        """K or V (``value``) ``[tokens, heads, d]`` as :meth:`store` rotates it, float32."""
        out = torch.empty(x.shape, dtype=torch.float32)
        threads = torch.get_num_threads()
        self._rotate(_ref(layer), _ref(rows(x)), x.shape[0], int(value), ctypes.c_void_p(out.data_ptr()), threads)
        return out

    def decode(self, layer: Layer, batch: Batch, q: Tensor, out: Tensor) -> None:
        """Attend for the batch's requests, few new tokens each, whose window pages all exist.

        ``q`` ``[T, query heads, d]`` in model space; fills their rows of ``out``.
        """
        self._decode(_ref(layer), _ref(batch), _ref(rows(q)), _ref(rows(out)), torch.get_num_threads())

    def prefill(self, layer: Layer, batch: Batch, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Attend for the batch's requests, any number of new tokens each.

        ``q`` ``[T, query heads, d]`` and ``k, v`` ``[T, heads, d]`` in model space; fills their rows of ``out``.
        """
        own_k, own_v = self.rotate(layer, k, value=False), self.rotate(layer, v, value=True)
        self._prefill(
            _ref(layer),
            _ref(batch),
            *(_ref(rows(x)) for x in (q, own_k, own_v, out)),
            torch.get_num_threads(),
        )


_ref = ctypes.byref

"""Runs unmodified ``.metal`` files on the CPU: g++, a shim of ``metal_stdlib``, fibers (``shim/``).

Calls look like those of ``torch.mps.compile_shader``. A kernel that races, diverges or leaves a buffer raises
:class:`KernelFault`.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SHIM = Path(__file__).parent / "shim"
DTYPES = {
    "float": torch.float32,
    "float2": torch.float32,
    "half": torch.float16,
    "bfloat": torch.bfloat16,
    "uchar": torch.uint8,
}
ATTRIBUTES = {
    "thread_position_in_threadgroup": "thread_at",
    "thread_index_in_threadgroup": "gpu::current",
    "thread_index_in_simdgroup": "gpu::lane()",
    "simdgroup_index_in_threadgroup": "gpu::current / gpu::SIMD",
    "threadgroup_position_in_grid": "gpu::group_at",
    "threadgroups_per_grid": "gpu::group_count",
    "thread_position_in_grid": "grid_at",
}
_KERNEL = re.compile(r"\bkernel\s+void\s+(\w+)\s*\((.*?)\)\s*\{", re.S)
_PARAMETER = re.compile(r"(?:(device|constant)\s+)?(const\s+)?(\w+)\s*([*&]?)\s*(\w+)\s*\[\[(\w+)(?:\((\d+)\))?\]\]")
_SHARED = re.compile(r"\bthreadgroup\s+(\w+)\s+(\w+)\s*((?:\[[^\]]+\])+)\s*;")


class KernelFault(RuntimeError):
    """What a kernel did wrong: one line."""


class CompileError(RuntimeError):
    """The compiler's first error."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; ``index`` is ``None`` for positions and counts."""

    type: str
    name: str
    kind: str
    index: int | None


def parameters(source: str) -> dict[str, list[Parameter]]:
    """Kernels of a file and their parameters."""
    kernels = {}
    for name, text in _KERNEL.findall(source):
        found = [
            Parameter(kind, parameter, "buffer" if pointer == "*" else "scalar" if pointer else attribute, _int(index))
            for _, _, kind, pointer, parameter, attribute, index in _PARAMETER.findall(text)
        ]
        if len(found) != text.count("[["):
            raise CompileError(f"{name}: a parameter that the executor cannot read")
        kernels[name] = found
    return kernels


def _int(text: str) -> int | None:
    return int(text) if text else None


class Library:
    """A compiled ``.metal`` source.

    Parameters
    ----------
    source
        Text of the file.
    defines
        Compile-time settings.
    folder
        Where to build.
    """

    def __init__(self, source: str, defines: dict[str, object], folder: Path) -> None:
        self._settings = defines
        self._parameters = parameters(source)
        text = _SHARED.sub(_shared, source) + "".join(_trampoline(n, p) for n, p in self._parameters.items())
        header = "".join(f"#define {name} {value}\n" for name, value in defines.items())
        text = f'{header}#line 1 "kernel.metal"\n{text}'
        shim = "".join(path.read_text() for path in sorted(SHIM.iterdir()))
        stem = folder / hashlib.sha256((shim + text).encode()).hexdigest()[:24]
        library = stem.with_suffix(".so")
        if not library.exists():
            stem.with_suffix(".cpp").write_text(text)
            command = [compiler(), "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-fno-gnu-unique"]
            command += ["-fno-strict-aliasing", "-w", f"-I{SHIM}", "-o", str(library), str(stem.with_suffix(".cpp"))]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            if done.returncode:
                raise CompileError(next((x for x in done.stderr.splitlines() if "error" in x), done.stderr))
        self._library = ctypes.CDLL(str(library))

    def call(
        self,
        name: str,
        *args: Tensor | int | float,
        threads: tuple[int, ...],
        group_size: tuple[int, ...],
        schedule: int = 0,
        at_end: bool = True,
    ) -> None:
        """Run a kernel; tensors (contiguous, CPU) are changed in place.

        ``schedule``: 0 forward, 1 backward, else a shuffle. ``at_end``: buffers end at their guard page; otherwise they
        begin at one.
        """
        wanted = sorted((p for p in self._parameters[name] if p.index is not None), key=lambda p: p.index or 0)
        if len(wanted) != len(args):
            raise KernelFault(f"{name} takes {len(wanted)} arguments, not {len(args)}")
        held: list[_Guarded | ctypes.c_int64 | ctypes.c_float] = []
        for parameter, value in zip(wanted, args, strict=True):
            if parameter.kind == "buffer":
                assert isinstance(value, Tensor)
                kind = str(self._settings.get(parameter.type, parameter.type))
                if value.dtype != DTYPES[kind] or not value.is_contiguous():
                    raise KernelFault(f"{name}: {parameter.name} is {value.dtype}, the kernel reads {kind}")
                held.append(_Guarded(value, at_end))
            else:
                assert not isinstance(value, Tensor)
                held.append(ctypes.c_int64(int(value)) if parameter.type == "long" else ctypes.c_float(value))
        addresses = [h.address if isinstance(h, _Guarded) else ctypes.addressof(h) for h in held]
        size = (*group_size, 1, 1)[:3]
        grid = (*threads, 1, 1)[:3]
        if any(n % s for n, s in zip(grid, size, strict=True)):
            raise KernelFault(f"{name}: threads {grid} are not whole groups of {size}")
        run = getattr(self._library, f"run_{name}")
        run.restype = ctypes.c_char_p
        counts = (ctypes.c_uint * 3)(*(n // s for n, s in zip(grid, size, strict=True)))
        fault = run((ctypes.c_void_p * len(addresses))(*addresses), counts, (ctypes.c_uint * 3)(*size), schedule)
        for guarded, value in zip(held, args, strict=True):
            if isinstance(guarded, _Guarded):
                assert isinstance(value, Tensor)
                guarded.close(value)
        if fault:
            raise KernelFault(f"{name}: {fault.decode()}")


class _Guarded:
    """A copy of a tensor between two pages that nobody may touch."""

    def __init__(self, tensor: Tensor, at_end: bool) -> None:
        page = mmap.PAGESIZE
        self._size = tensor.nbytes
        room = -(-max(self._size, 1) // page) * page
        self._map = mmap.mmap(-1, room + 2 * page)
        anchor = ctypes.c_char.from_buffer(self._map)
        base = ctypes.addressof(anchor)
        del anchor
        self._ends = [base, base + page + room]
        for end in self._ends:
            _protect(end, page, 0)
        self.address = base + page + (room - self._size if at_end else 0)
        ctypes.memmove(self.address, tensor.data_ptr(), self._size)

    def close(self, tensor: Tensor) -> None:
        ctypes.memmove(tensor.data_ptr(), self.address, self._size)
        for end in self._ends:
            _protect(end, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
        self._map.close()


def _protect(address: int, size: int, flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), flags):
        raise OSError(ctypes.get_errno(), "mprotect")


def compiler() -> str | None:
    """Path of g++, ``None`` where there is none."""
    return shutil.which("g++")


def _shared(match: re.Match[str]) -> str:
    kind, name, dimensions = match.groups()
    sizes = ", ".join(f"size_t({d})" for d in re.findall(r"\[([^\]]+)\]", dimensions))
    return f"static gpu::Shared<{kind}, {sizes}> {name}(__LINE__);"


def _trampoline(name: str, found: list[Parameter]) -> str:
    arguments = []
    for p in found:
        if p.kind == "buffer":
            arguments.append(f"static_cast<{p.type}*>(buffers_{name}[{p.index}])")
        elif p.kind == "scalar":
            arguments.append(f"*static_cast<const {p.type}*>(buffers_{name}[{p.index}])")
        else:
            value = ATTRIBUTES[p.kind]
            vector = value in ("thread_at", "grid_at", "gpu::group_at", "gpu::group_count")
            arguments.append(f"{value}.x" if vector and p.type != "uint3" else value)
    return f"""
static void** buffers_{name};
static void body_{name}() {{
    const uint index = gpu::current;
    const uint3 thread_at = {{index % gpu::group_size.x, index / gpu::group_size.x % gpu::group_size.y,
                             index / gpu::group_size.x / gpu::group_size.y}};
    const uint3 grid_at = {{gpu::group_at.x * gpu::group_size.x + thread_at.x,
                           gpu::group_at.y * gpu::group_size.y + thread_at.y,
                           gpu::group_at.z * gpu::group_size.z + thread_at.z}};
    {name}({", ".join(arguments)});
}}
extern "C" const char* run_{name}(void** buffers, const uint* groups, const uint* size, int schedule) {{
    buffers_{name} = buffers;
    return gpu::run(body_{name}, groups, size, schedule);
}}
"""

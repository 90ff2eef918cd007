"""Compile CUDA C++ with NVRTC and launch it on PyTorch's current stream; no compiler and no header needed."""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import os
import sysconfig
import tempfile
from pathlib import Path

import torch

#: Constant of each kernel's source: bytes of dynamic shared memory a block.
SHARED_BYTES = b"oscar_shared_bytes"
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class _LaunchAttribute(ctypes.Structure):
    """``CUlaunchAttribute`` whose value is an integer."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15))


class _LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_LaunchAttribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


class CudaError(RuntimeError):
    """A call of NVRTC or of the CUDA driver failed."""


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    pattern = os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "*", "lib", f"libnvrtc.so.{major}")
    torch_lib = os.path.join(os.path.dirname(torch.__file__), "lib", f"libnvrtc*.so.{major}*")
    beside_torch = os.path.join(os.path.dirname(torch.__file__), "..", "nvidia", "*", "lib", f"libnvrtc.so.{major}")
    for name in [
        f"libnvrtc.so.{major}",
        *glob.glob(pattern),
        *glob.glob(beside_torch),
        *glob.glob(torch_lib),
    ]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError(f"libnvrtc.so.{major} not found beside PyTorch: pip install nvidia-cuda-nvrtc")


def _check(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{what}: {(text.value or b'error').decode()} ({code})")


def cache_dir() -> Path:
    """Folder of compiled kernels: ``$OSCAR_CACHE/kernels``, by default below ``~/.cache/oscar-serving``."""
    root = os.environ.get("OSCAR_CACHE") or os.path.join(os.path.expanduser("~"), ".cache", "oscar-serving")
    return Path(root) / "kernels"


def compile_cubin(source: str, headers: dict[str, str], options: tuple[str, ...]) -> bytes:
    """Machine code of ``source`` and the ``headers`` it includes; the disk cache keeps it for the same NVRTC."""
    nvrtc = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    key = hashlib.sha256(
        "\0".join([source, *headers, *headers.values(), *options, f"{major.value}.{minor.value}"]).encode()
    ).hexdigest()[:24]
    path = cache_dir() / f"{key}.cubin"
    if path.exists():
        return path.read_bytes()
    program = ctypes.c_void_p()
    texts, names = (
        (ctypes.c_char_p * len(headers))(*[x.encode() for x in group]) for group in (headers.values(), headers)
    )
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"oscar.cu", len(headers), texts, names)
    try:
        flags = (ctypes.c_char_p * len(options))(*[o.encode() for o in options])
        failed = nvrtc.nvrtcCompileProgram(program, len(options), flags)
        if failed:
            size = ctypes.c_size_t()
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"NVRTC: {log.value.decode(errors='replace')}")
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f:
        f.write(code.raw)
    os.replace(f.name, path)  # atomic: two processes may compile the same kernel
    return code.raw


class Kernel:
    """One compiled kernel of a ``.cu`` file, and the ``.cuh`` files beside it, that takes a single parameter struct."""

    def __init__(self, path: Path, name: str, defines: dict[str, int], device: torch.device) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        macros = (f"-D{k}={v}" for k, v in defines.items())
        self._waits = major >= 9
        options = (f"--gpu-architecture=sm_{major}{minor}", "--std=c++17", *macros)
        headers = {p.name: p.read_text() for p in sorted(path.parent.glob("*.cuh"))}
        code = compile_cubin(path.read_text(), headers, options)
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # makes PyTorch's context current
            module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
            _check(_driver().cuModuleGetFunction(ctypes.byref(self._function), module, name.encode()), name)
            at, size, shared = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_int()
            _check(
                _driver().cuModuleGetGlobal_v2(ctypes.byref(at), ctypes.byref(size), module, SHARED_BYTES),
                name,
            )
            _check(_driver().cuMemcpyDtoH_v2(ctypes.byref(shared), at, size), "cuMemcpyDtoH")
            self._shared = shared.value
            _check(
                _driver().cuFuncSetAttribute(self._function, _MAX_DYNAMIC_SHARED, self._shared),
                f"{name}: shared memory",
            )

    def launch(self, grid: tuple[int, int, int], threads: int, params: ctypes.Structure) -> None:
        """Enqueue on the current stream (also under graph capture).

        From compute capability 9.0 on it may start before the kernel in front of it has ended: the kernel must wait
        (``griddepcontrol.wait``) before it touches what others write.
        """
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        early = _LaunchAttribute(id=_PROGRAMMATIC_SERIALIZATION, value=1)
        config = _LaunchConfig(grid, (threads, 1, 1), self._shared, stream, ctypes.pointer(early), int(self._waits))
        failed = _driver().cuLaunchKernelEx(ctypes.byref(config), self._function, argument, None)
        _check(failed, "cuLaunchKernelEx")

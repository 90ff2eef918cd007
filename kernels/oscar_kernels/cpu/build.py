"""Build the C++ sources with the system's compiler, once, into a cache folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

COMPILERS = ("c++", "g++", "clang++")
HERE = Path(__file__).parent
HEADERS = ("cache.h", "mixes.h", "parallel.h", "pieces.h", "scores.h", "vectors.h")
BUILD_SECONDS = 300
#: Bytes of the cache must be those of the torch codec, so the store does not contract multiplications with additions.
EXTRA_FLAGS = {"store": ("-ffp-contract=off",)} | dict.fromkeys(("decode", "prefill", "srft"), ("-ffp-contract=fast",))


class BuildError(RuntimeError):
    """There is no library, and why: one line."""


@functools.cache
def load(name: str) -> ctypes.CDLL:
    """The library of ``name`` (``store``, ``decode``, ``prefill`` or ``srft``), built if it is not there yet.

    Raises
    ------
    BuildError
        There is no compiler, or it fails.
    """
    compiler = find_compiler()
    errors = []
    for flags in (_openmp_flags(), ()):
        try:
            return ctypes.CDLL(str(_build(name, compiler, (*_flags(), *EXTRA_FLAGS[name]), flags)))
        except (BuildError, OSError) as error:
            errors.append(str(error))
    raise BuildError(errors[-1])


def find_compiler() -> str:
    """Path of the compiler: ``$CXX``, else the first of :data:`COMPILERS` on the path."""
    wanted = os.environ.get("CXX")
    for candidate in (wanted,) if wanted else COMPILERS:
        path = shutil.which(candidate)
        if path:
            return path
    looked = f"CXX={wanted}" if wanted else ", ".join(COMPILERS)
    hint = "xcode-select --install" if sys.platform == "darwin" else "apt-get install g++"
    raise BuildError(f"no C++ compiler (looked for {looked}); install one, e.g. {hint}")


def cache_folder() -> Path:
    """``$OSCAR_CACHE/kernels``, by default in ``~/.cache/oscar-serving``."""
    root = os.environ.get("OSCAR_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "oscar-serving") / "kernels"


def _flags() -> tuple[str, ...]:
    target = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    return ("-std=c++17", "-O3", target, "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared")


def _openmp_flags() -> tuple[str, ...]:
    """Compile for OpenMP and link against the runtime that torch has loaded.

    Sharing it matters: the idle threads of a second runtime would spin on the cores that the first one wants.
    """
    libraries = Path(torch.__file__).parent / "lib"
    found = sorted(p for pattern in ("libgomp*", "libomp*", "libiomp5*") for p in libraries.glob(pattern))
    if not found:
        return ("-fopenmp",)
    runtime = (str(found[0]), f"-Wl,-rpath,{libraries}")
    return ("-Xclang", "-fopenmp", *runtime) if sys.platform == "darwin" else ("-fopenmp", *runtime)


def _build(name: str, compiler: str, flags: tuple[str, ...], openmp: tuple[str, ...]) -> Path:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=BUILD_SECONDS).stdout
    digest = hashlib.sha256()
    for part in (version, *flags, *openmp, _processor()):
        digest.update(part.encode() + b"\0")
    for source in (f"{name}.cpp", *HEADERS):
        digest.update((HERE / source).read_bytes())
    folder = cache_folder()
    target = folder / f"{name}-{digest.hexdigest()[:20]}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            output = Path(scratch) / target.name
            # The source comes before the libraries that it needs.
            command = [compiler, *flags, str(HERE / f"{name}.cpp"), *openmp, "-o", str(output)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS)
            if done.returncode:
                line = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr.strip()[-200:])
                raise BuildError(f"{compiler} cannot build the CPU kernel: {line}")
            os.replace(output, target)  # atomic: another process may be building the same
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"{compiler} cannot build the CPU kernel in {folder}: {error}") from error
    return target


def _processor() -> str:
    """What ``native`` stands for here; a home folder may be shared between machines."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        return "\n".join(sorted({x for x in lines if x.startswith(("model name", "flags", "Features"))}))
    return platform.processor() + platform.version()

"""Building: once, atomically, and clear about what is missing."""

from __future__ import annotations

import logging
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from oscar_kernels.cpu import BuildError, build, cache
from oscar_serving.attention import AttentionSpec, select
from oscar_serving.attention.cpu_backend import CpuBackend
from oscar_serving.config import OscarConfig
from tests.attention.cases import Case, World


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with nothing in it; what was loaded before does not count."""
    monkeypatch.setenv("OSCAR_CACHE", str(tmp_path))
    build.load.cache_clear()
    select._select.cache_clear()
    yield tmp_path / "kernels"
    build.load.cache_clear()
    select._select.cache_clear()


@pytest.mark.parametrize("wanted", ["a-compiler-that-is-not-there", None])
def test_without_a_compiler(
    wanted: str | None, empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """PyTorch serves, and one log line says what was looked for and what to install."""
    if wanted:
        monkeypatch.setenv("CXX", wanted)
    else:
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(empty_cache))
    with caplog.at_level(logging.WARNING):
        assert select.select_backend("cpu").name == "torch"
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert (wanted or "g++") in message
    assert "install" in message


def test_a_compiler_that_fails(empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its first error is in the message, and nothing is left in the cache."""
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\n[ \"$1\" = --version ] && exit 0\necho 'x.cpp:1: error: no such thing' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BuildError, match="no such thing"):
        build.load("store")
    assert list(empty_cache.iterdir()) == []


def test_built_once(empty_cache: Path) -> None:
    """Two threads at the same time, then again: one file, and the second time no compiler runs."""
    paths: list[object] = []
    threads = [threading.Thread(target=lambda: paths.append(build.load("store"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 2
    (library,) = empty_cache.iterdir()
    before = library.stat().st_mtime_ns
    build.load.cache_clear()
    build.load("store")
    assert [p.stat().st_mtime_ns for p in empty_cache.iterdir()] == [before]


def test_other_flags_are_another_library(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name depends on flags and sources."""
    build.load("store")
    build.load.cache_clear()
    monkeypatch.setitem(build.EXTRA_FLAGS, "store", ("-ffp-contract=off", "-DOTHER"))
    build.load("store")
    assert len(list(empty_cache.iterdir())) == 2


def test_cannot_write_the_cache(empty_cache: Path) -> None:
    """A file where the folder should be: an error that names it."""
    empty_cache.parent.mkdir(exist_ok=True)
    empty_cache.write_text("")
    with pytest.raises(BuildError, match=str(empty_cache)):
        build.load("store")


PROGRAM = """
import sys, torch
from oscar_kernels.cpu import build
if sys.argv[1] == "std":
    build._openmp_flags = lambda: ()
from oscar_serving.attention import AttentionSpec
from oscar_serving.attention.cpu_backend import CpuBackend
from oscar_serving.config import OscarConfig
from tests.attention.cases import Case, World
torch.set_num_threads(int(sys.argv[2]))
world = World(Case(OscarConfig(page_size=16), AttentionSpec(0.1), 3, 3, 64), [2500, 900])
outs = [world.step(CpuBackend(), counts) for counts in ([2490, 890], *[[1, 1]] * 5, [4, 0])]
import hashlib
digest = hashlib.sha256(world.layer.pages.numpy().tobytes())
for out in outs:
    for x in out:
        digest.update(x.numpy().tobytes())
print(digest.hexdigest())
"""


def test_threads_do_not_change_the_bits() -> None:
    """One or three threads, OpenMP or the standard library's: the same bytes and outputs."""
    root = Path(__file__).parents[2]
    digests = set()
    for arguments in (("omp", "1"), ("omp", "3"), ("std", "3")):
        command = [sys.executable, "-c", PROGRAM, *arguments]
        digests.add(subprocess.run(command, capture_output=True, text=True, cwd=root, check=True).stdout)
    assert len(digests) == 1


INSTRUCTION_SETS = [("-march=x86-64", "-U__FLT16_MANT_DIG__"), ("-march=x86-64-v3",)]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flags are those of x86")
@pytest.mark.parametrize("flags", INSTRUCTION_SETS, ids=lambda f: "".join(f))
def test_other_instruction_sets(flags: tuple[str, ...], empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older processors, and compilers without a half-precision type: the same bytes, close outputs."""
    configs = [
        OscarConfig(sink=8, recent=20, page_size=16, window_dtype="float16"),
        OscarConfig(sink=8, recent=20, page_size=16, scale_dtype="float8_e4m3", group_size=8, k_bits=4),
    ]
    for config in configs:
        case = Case(config, AttentionSpec(0.1, softcap=20.0), 2, 3, 80)
        native = World(case, [70])
        expected = native.run(CpuBackend(), 0, [60, *[1] * 10])
        with monkeypatch.context() as patch:
            patch.setattr(build, "_flags", lambda: ("-std=c++17", "-O1", *flags, "-fopenmp-simd", "-fPIC", "-shared"))
            build.load.cache_clear()
            world = World(case, [70])
            result = world.run(CpuBackend(), 0, [60, *[1] * 10])
        build.load.cache_clear()
        assert torch.equal(world.layer.pages, native.layer.pages)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_calls_from_several_threads() -> None:
    """The GIL is released while the kernel runs; concurrent callers do not disturb each other."""
    case = Case(OscarConfig(page_size=16), AttentionSpec(0.1), 2, 2, 64)
    want = World(case, [400]).run(CpuBackend(), 0, [390, *[1] * 10])
    results: list[torch.Tensor] = []

    def work() -> None:
        results.append(World(case, [400]).run(CpuBackend(), 0, [390, *[1] * 10]))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert all(torch.equal(r, want) for r in results)


def test_wrong_tensors_are_refused() -> None:
    """Types, shapes and strides that the kernel does not read are an error before it runs."""
    layer = Case(OscarConfig(page_size=16), AttentionSpec(0.1), 2, 1, 64).cache(3, 3)
    good = dict(
        section_bytes=layer.layout.section_bytes, k_bits=2, v_bits=2, groups=1, meta_dtype=torch.float16, rotate=True,
        windows_only=False, sink=0, recent=1, sliding_window=None, scale=1.0, softcap=None,
        **{name: getattr(layer.transform, name) for name in layer.transform.__dataclass_fields__},
    )  # fmt: skip
    cache.Layer.of(layer.pages, layer.windows, **good)
    for change, match in (
        ({"k_mean": layer.transform.k_mean.double()}, "k_mean: expected float32"),
        ({"v_rotation": layer.transform.v_rotation[:1]}, "v_rotation"),
    ):
        with pytest.raises(ValueError, match=match):
            cache.Layer.of(layer.pages, layer.windows, **{**good, **change})
    with pytest.raises(ValueError, match="pages: expected uint8"):
        cache.Layer.of(layer.pages[:, :, ::2], layer.windows, **good)
    with pytest.raises(ValueError, match="windows: expected"):
        cache.Layer.of(layer.pages, layer.windows.transpose(3, 4).contiguous().transpose(3, 4), **good)
    table = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="tables: expected int32"):
        cache.Batch.of(torch.zeros(2), *[torch.zeros(1, dtype=torch.int32)] * 2, table, table, [0])

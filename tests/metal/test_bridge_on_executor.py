"""The bridge's own code (shapes, splits, query blocks, argument order), with the executor in the compiler's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oscar_kernels.metal import bridge
from oscar_serving.attention import AttentionSpec, BatchTables
from oscar_serving.codec.signed import Signed
from oscar_serving.codec.srft_int4 import SideTransform, SrftConfig
from oscar_serving.engines.apple import paged
from oscar_serving.engines.apple.attention import attend_in_blocks
from oscar_serving.engines.apple.encode import _encode_metal
from oscar_serving.engines.apple.paged import SrftBackend, SrftLayer
from tests.metal.cases import library, pack, random, reference, relative_error, source
from tests.metal.executor import Library, compiler
from tests.metal.test_encode import check

pytestmark = pytest.mark.skipif(compiler() is None, reason="g++ is not installed: apt-get install g++")


class Shader:
    """Looks like what ``torch.mps.compile_shader`` returns."""

    def __init__(self, kernels: Library) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*args: Any, threads: Any, group_size: Any) -> None:
            sizes = [(x,) if isinstance(x, int) else tuple(x) for x in (threads, group_size)]
            self._kernels.call(name, *args, threads=sizes[0], group_size=sizes[1])

        return call


@pytest.fixture(autouse=True)
def executor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "_library", lambda name, settings: Shader(library(source(name), **dict(settings))))


@pytest.mark.parametrize("rotation", ["srft", "srht"])
def test_encode_into_the_middle_of_a_buffer(rotation: str) -> None:
    config = SrftConfig(rotation=rotation, group_size=16, seed=3)  # type: ignore[arg-type]
    x, factors, matrix = random(1, 2, 2, 5, 64), random(2, 2, 64).exp(), config.matrix(64)
    out = Signed(torch.zeros(2, 2, 9, 32, dtype=torch.uint8), torch.zeros(2, 2, 9, 4).half())
    _encode_metal(SideTransform.build(matrix, factors), x, out, 3, 4, config)
    rows = [t[:, :, 3:8].contiguous() for t in out]
    check((x.double() @ matrix) / factors.double()[:, None], *rows, 4, 16)
    assert out.codes[:, :, :3].eq(0).all()
    assert out.codes[:, :, 8:].eq(0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_attend_in_query_blocks_and_splits(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridge, "QUERY_TOKENS", 3)
    monkeypatch.setattr(bridge, "SPLIT_KEYS", 128)
    q = random(3, 2, 6, 7, 64) / 4
    k, v = pack(random(4, 2, 2, 220, 64), 8, 16), pack(random(5, 2, 2, 220, 64), 4, 16)
    mask = torch.ones(2, 7, 200, dtype=torch.bool)
    mask[1, :, :150] = False
    used = mask if masked else None
    exact = reference(q, k, v, d=64, new_tokens=7, first=20, keys=200, window=170, mask=used)
    on_gpu = bridge.attend(q, *k, *v, used, 20, 200, 170, 0.0)
    on_cpu = attend_in_blocks(q, k, v, used, 20, 200, 170, 0.0, (8, 4))
    assert relative_error(on_gpu, exact) <= 1e-5
    assert relative_error(on_cpu, exact) <= 1e-5


@pytest.mark.parametrize("window", [None, 20])
def test_pages_of_the_engine(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's backend with the Metal functions in place of torch's, against the compiled CPU kernels."""
    spec = AttentionSpec(scale=0.2, sliding_window=window)
    lengths, new = [37, 50], [3, 1]
    table = torch.tensor([[3, 1, 4, 0], [2, 6, 5, 7]], dtype=torch.int32)
    config, cpu = SrftConfig(k_bits=8), torch.device("cpu")

    def outputs() -> list[torch.Tensor]:
        layer = SrftLayer.allocate(config, spec, heads=2, head_dim=64, pages=8, page_size=16)
        found = []
        for counts, ends in (
            ([a - n for a, n in zip(lengths, new, strict=True)], [34, 49]),
            (new, lengths),
        ):
            host = [0, counts[0], sum(counts)], ends, ends
            tables = BatchTables(*(torch.tensor(x, dtype=torch.int32) for x in host), table, table, host)
            k, v = (random(seed + len(found), sum(counts), 2, 64) for seed in (11, 13))
            backend = SrftBackend(cpu)
            backend.store(layer, k, v, tables)
            found.append(backend.attend(layer, random(15, sum(counts), 6, 64), k, v, tables))
        return found

    compiled = outputs()
    monkeypatch.setattr(paged, "cpu_kernels", lambda: None)
    monkeypatch.setattr(paged, "encode_into", _encode_metal)
    monkeypatch.setattr(paged, "attend_rotated", lambda q, k, v, *rest: bridge.attend(q, *k, *v, *rest[:-1]))
    for ours, expected in zip(outputs(), compiled, strict=True):
        assert relative_error(ours, expected) <= 2e-3  # a code next to a rounding threshold may differ


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_the_cpu_function_in_blocks(softcap: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from oscar_serving.engines.apple import attention

    monkeypatch.setattr(attention, "KEY_BLOCK", 13)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 2)
    q = random(6, 1, 4, 5, 64) / 4
    k, v = pack(random(7, 1, 2, 64, 64), 4, 32), pack(random(8, 1, 2, 64, 64), 4, 32)
    exact = reference(q, k, v, d=64, new_tokens=5, softcap=softcap)
    assert relative_error(attend_in_blocks(q, k, v, None, 0, 64, 0, softcap, (4, 4)), exact) <= 1e-5

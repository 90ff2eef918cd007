"""A whole vLLM engine on the CPU with a small random model: settings that must not matter do not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    patch = pytest.MonkeyPatch()
    # The V2 model runner's own kernels need Triton on the CPU; V1 plans and addresses blocks the same way.
    for name, value in (
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"), ("VLLM_USE_V2_MODEL_RUNNER", "0"), ("VLLM_CPU_KVCACHE_SPACE", "1"),
    ):  # fmt: skip
        patch.setenv(name, value)
    patch.syspath_prepend(str(Path(__file__).parents[2]))
    import cpu_engine

    from benchmarks import vllm_smoke

    cpu_engine.install()
    vllm_smoke.MODELS["tiny"] = vllm_smoke.MODELS["llama64"] | {"num_hidden_layers": 2, "intermediate_size": 512}
    args = vllm_smoke.parse(["--out", str(tmp_path_factory.mktemp("smoke")), "--stop"])
    engines = vllm_smoke.Engines(vllm_smoke.build_model("tiny", args.out), args.out, cpu=True)
    yield lambda check: vllm_smoke.CHECKS[check](engines, args)
    engines.close()
    patch.undo()


@pytest.mark.slow
@pytest.mark.parametrize("check", ["warm", "chunks", "decode", "k4v2"])
def test_smoke_check(smoke: object, check: str) -> None:
    assert smoke(check) == []  # type: ignore[operator]

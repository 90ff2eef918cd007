"""The operators of the bridge: refused without an Apple GPU, equal to the CPU codec with one."""

from __future__ import annotations

import pytest
import torch

from oscar_kernels.metal.bridge import MetalError, attend, encode, source
from oscar_serving.codec.signed import Signed
from oscar_serving.rotation import roots_of_unity, signs, srft
from tests.metal.cases import pack, random, reference, relative_error
from tests.metal.test_encode import check

APPLE = torch.backends.mps.is_available()
needs_mps = pytest.mark.skipif(not APPLE, reason="needs an Apple GPU (torch.backends.mps is not available)")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.skipif(APPLE, reason="an Apple GPU is here")
def test_without_an_apple_gpu_the_error_says_what_to_do() -> None:
    x, codes, scales = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, 1, 32, dtype=torch.uint8), torch.zeros(1, 1, 1, 4)
    with pytest.raises(MetalError, match="use tensors on the CPU"):
        encode(x, torch.ones(64), torch.ones(1, 64), torch.ones(64, 2), codes, scales.half(), 0, 4, True)


def test_settings_stand_before_the_text() -> None:
    text = source("encode", D=64, BITS=4)
    assert text.startswith("#define OSCAR_D 64\n#define OSCAR_BITS 4\n")
    assert "kernel void oscar_encode" in text


def test_rows_that_do_not_fit_are_refused() -> None:
    codes, scales = torch.zeros(1, 1, 4, 32, dtype=torch.uint8), torch.zeros(1, 1, 4, 4).half()
    with pytest.raises(MetalError, match="do not fit"):
        encode(
            torch.zeros(1, 1, 3, 64), torch.ones(64), torch.ones(1, 64), torch.ones(64, 2), codes, scales, 2, 4, True
        )


@needs_mps
@pytest.mark.mps
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_encode_on_the_gpu(dtype: torch.dtype, d: int) -> None:
    x, factors = (random(d, 1, 2, 500, d) * 3).to(dtype), random(d + 1, 2, d).exp()
    codes = torch.zeros(1, 2, 500, d // 2, dtype=torch.uint8, device="mps")
    scales = torch.zeros(1, 2, 500, d // 16, dtype=torch.float16, device="mps")
    roots = torch.view_as_real(roots_of_unity(d)).float().contiguous()
    constants = [t.to("mps") for t in (signs(d).float(), (1 / factors).float(), roots)]
    encode(x.to("mps"), *constants, codes, scales, 0, 4, True)
    check((x.double() @ srft(d)) / factors.double()[:, None], codes.cpu(), scales.cpu(), 4, 16)


@needs_mps
@pytest.mark.mps
@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attend_on_the_gpu(dtype: torch.dtype, d: int) -> None:
    q = (random(d, 2, 6, 3, d) * 2 / d**0.5).to(dtype)
    k, v = pack(random(d + 1, 2, 2, 1500, d), 8, 16), pack(random(d + 2, 2, 2, 1500, d), 4, 16)
    mask = torch.ones(2, 3, 1500, dtype=torch.bool)
    mask[0, :, :99] = False
    on_gpu = [Signed(*(t.to("mps") for t in x)) for x in (k, v)]
    actual = attend(q.to("mps"), *on_gpu[0], *on_gpu[1], mask.to("mps"), 0, 1500, 900, 0.0).cpu()
    exact = reference(q, k, v, d=d, new_tokens=3, mask=mask, window=900)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-8}[dtype]
    assert relative_error(actual, exact) <= limit

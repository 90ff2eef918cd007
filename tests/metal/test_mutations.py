"""Planted faults: each must be caught by the executor or by the comparison with float64."""

from __future__ import annotations

import pytest
import torch

from oscar_serving.rotation import srft
from tests.metal.cases import attend, encode, pack, random, reference, relative_error, source
from tests.metal.executor import CompileError, KernelFault, compiler
from tests.metal.test_encode import check

pytestmark = pytest.mark.skipif(compiler() is None, reason="g++ is not installed: apt-get install g++")

RACE = "race|before it is written"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"

#: Fault → (text, its replacement, which occurrence, what catches it).
ENCODE = {
    "no barrier before the stages": ("    " + BARRIER + "    uint side", "    uint side", 0, RACE),
    "no barrier after a stage": (BARRIER + "        side", "side", 0, RACE),
    "barrier under a condition": (BARRIER + "        side", "if (t < 7) " + BARRIER + " side", 0, "divergence|race"),
    "in place": ("line[1 - side][t] =", "line[side][t] =", 0, "race"),
    "shuffle too narrow": ("mask < OSCAR_GROUP / 2", "mask < OSCAR_GROUP / 4", 0, "values"),
    "shuffle too wide": ("mask < OSCAR_GROUP / 2", "mask < OSCAR_GROUP", 0, "values"),
    "nibbles swapped": ("(low & 15) | ((high & 15) << 4)", "(high & 15) | ((low & 15) << 4)", 0, "values"),
    "nibble without its mask": ("(low & 15) |", "low |", 0, "values"),
    "shared array too short": ("[2][OSCAR_HALF]", "[2][OSCAR_HALF - 1]", 0, "out of bounds"),
    "half-precision intermediate": ("sum = line[side][q + stride * p];",
                                    "sum = line[side][q + stride * p]; sum.x = float(half(sum.x));", 0, "values"),
    "inverse transform": ("roots[t])", "roots[(OSCAR_D - t) % OSCAR_D])", 0, "values"),
    "signs forgotten": ("odd * signs[2 * t + 1]", "odd", 0, "values"),
    "factors of the wrong head": ("(sequence % heads)", "((sequence + 1) % heads)", 0, "values"),
    "rounds to zero": ("+ 0.5f), -level", "), -level", 0, "values"),
    "codes from the unrounded scale": ("const float step = float(scale);",
                                       "const float step = largest / float(OSCAR_LEVEL);", 0, "values"),
    "writes a row too far": ("first + token;", "first + token + 1;", 0, "outside|values"),
    "reads too far": ("x[source + 1]", "x[source + 2]", 0, "outside|values"),
}  # fmt: skip
ATTEND = {
    "no barrier after the query": (BARRIER + "\n    float maximum", "\n    float maximum", 0, RACE),
    "no barrier before the join": (BARRIER + "    for (uint i", "    for (uint i", 0, RACE),
    "sign of the code lost": ("(((byte & 15) ^ 8) - 8)", "(byte & 15)", 0, "values"),
    "scale of the wrong group": ("OSCAR_GROUPS + g]", "OSCAR_GROUPS]", 0, "values"),
    "value scale of the wrong group": ("2 * pair / OSCAR_GROUP]", "pair / OSCAR_GROUP]", 0, "values"),
    "no correction of the sum": ("sum[r][s] = sum[r][s] * correction;", "", 0, "values"),
    "no correction of the total": ("total[r] * correction + simd_sum", "total[r] + simd_sum", 0, "values"),
    "sees the future": ("key <= position &&", "true &&", 0, "values"),
    "window too long": ("key > position - window)", "key >= position - window)", 0, "values"),
    "window ignored": ("(window == 0 || key > position - window)", "true", 0, "values"),
    "wrong head of the group": ("const long token = row / ratio;", "const long token = row % new_tokens;", 0, "values"),
    "mask of the wrong sequence": ("(sequence / heads) * new_tokens", "0 * new_tokens", 0, "values"),
    "reduction in a branch": ("simd_sum(score[r])", "(lane < 9 ? simd_sum(score[r]) : score[r])", 0, "divergence"),
    "tile past the end": ("const bool inside = key < end;", "const bool inside = true;", 0, "outside"),
    "shared query too small": ("query[OSCAR_ROWS][OSCAR_D]", "query[OSCAR_ROWS][OSCAR_D - 1]", 0, "out of bounds"),
    "splits not joined by weight": ("joined += partial[record + channel] * correction",
                                    "joined += partial[record + channel]", 0, "values"),
}  # fmt: skip


def planted(name: str, fault: tuple[str, str, int, str]) -> str:
    text, (old, new, occurrence, _) = source(name), fault
    parts = text.split(old)
    assert len(parts) > occurrence + 1, f"the fault no longer applies: {old!r} is not in {name}.metal"
    return old.join(parts[: occurrence + 1]) + new + old.join(parts[occurrence + 1 :])


def caught(run: object) -> str:
    """What caught a fault: the executor's message, ``values``, or nothing."""
    try:
        run()  # type: ignore[operator]
    except KernelFault as fault:
        return str(fault)
    except AssertionError:
        return "values"
    return ""


def run_encode(text: str | None) -> None:
    x, factors = random(1, 1, 2, 100, 128), random(2, 2, 128).exp()
    for schedule in (0, 1):
        codes, scales = encode(x, factors, text=text, schedule=schedule)
        check((x.double() @ srft(128)) / factors.double()[:, None], codes, scales, 4, 16)


def run_attend(text: str | None) -> None:
    q = random(3, 2, 4, 3, 64) / 4
    k, v = pack(random(4, 2, 2, 300, 64), 4, 16), pack(random(5, 2, 2, 300, 64), 4, 16)
    mask = torch.ones(2, 3, 300, dtype=torch.bool)
    mask[1, :, :90] = False
    options = {"d": 64, "new_tokens": 3, "window": 280, "mask": mask}
    for schedule in (0, 1):
        actual = attend(q, k, v, text=text, schedule=schedule, **options)  # type: ignore[arg-type]
        assert relative_error(actual, reference(q, k, v, **options)) <= 1e-5  # type: ignore[arg-type]


def test_the_shipped_files_pass() -> None:
    run_encode(None)
    run_attend(None)


@pytest.mark.parametrize("name", ENCODE)
def test_encode_fault_is_caught(name: str) -> None:
    found = caught(lambda: run_encode(planted("encode", ENCODE[name])))
    assert any(expected in found for expected in ENCODE[name][3].split("|")), found or "nothing caught it"


@pytest.mark.parametrize("name", ATTEND)
def test_attend_fault_is_caught(name: str) -> None:
    found = caught(lambda: run_attend(planted("attend", ATTEND[name])))
    assert any(expected in found for expected in ATTEND[name][3].split("|")), found or "nothing caught it"


def test_a_faulty_source_does_not_compile() -> None:
    with pytest.raises(CompileError):
        encode(random(1, 1, 1, 1, 64), torch.ones(1, 64), text=source("encode").replace("uint side", "uint sides"))

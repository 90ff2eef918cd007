"""Address spaces of the shipped files, by clang's OpenCL C++ mode: g++ knows none, and the executor erases them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.metal.cases import METAL, source

CLANG = next((path for name in ("clang", "clang-16", "clang-19", "clang-14") if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(CLANG is None, reason="clang is not installed: apt-get install clang")
STUBS = Path(__file__).parent / "opencl"
SETTINGS = ["D=128", "BITS=4", "K_BITS=8", "V_BITS=4", "GROUP=32", "ROWS=4", "ROTATE=1"]


def errors(text: str, element: str = "half") -> str:
    """What clang objects to."""
    # Metal's attributes and scalar references as kernel parameters have no counterpart in OpenCL.
    text = re.sub(r"constant (\w+)&", r"const \1", re.sub(r"\s*\[\[\w+(\(\d+\))?\]\]", "", text))
    # A conversion with the name of a vector type is a cast there, and takes a tuple.
    text = text.replace("float2(", "(float2)(")
    command = [str(CLANG), "-x", "clcpp", "-cl-std=clc++2021", "-fsyntax-only", "-Wno-unknown-pragmas", f"-I{STUBS}"]
    command += [
        "-Wno-everything",
        "-target",
        "spir64",
        *(f"-DOSCAR_{s}" for s in SETTINGS),
        f"-DOSCAR_T={element}",
        "-",
    ]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


FILES = sorted(path.stem for path in METAL.glob("*.metal"))


@pytest.mark.parametrize("element", ["float", "half"])
@pytest.mark.parametrize("name", FILES)
def test_shipped_file_is_accepted(name: str, element: str) -> None:
    assert errors(source(name), element) == ""


FAULTS = {
    "writes through const": ("encode", "device half* scales", "device const half* scales"),
    "constant memory written": ("attend", "device float* partial", "constant float* partial"),
    "device pointer from constant": (
        "attend",
        "static inline float2 oscar_pair_4(device const",
        "static inline float2 oscar_pair_4(threadgroup const",
    ),
    "pointer without a space": (
        "attend",
        "static inline float2 oscar_pair_4(device const",
        "static inline float2 oscar_pair_4(thread const",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_qualifier_is_rejected(fault: str) -> None:
    name, old, new = FAULTS[fault]
    text = source(name)
    assert old in text
    text = text.replace(old, new)
    if "oscar_pair_4" in old:
        text = text.replace("OSCAR_JOIN(oscar_pair_, OSCAR_K_BITS)", "oscar_pair_4")
    assert "error" in errors(text)

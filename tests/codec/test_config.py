"""What a configuration accepts; each error names the field, the value and what is allowed."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, asdict
from typing import Any

import pytest

from oscar_serving.config import KV_CACHE_DTYPES, ConfigError, OscarConfig


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("k_bits", 3, "2, 4"),
        ("v_bits", "2", "2, 4"),
        ("k_bits", True, "2, 4"),
        ("v_bits", 2.0, "2, 4"),
        ("sink", -1, "an integer from 0 to 2147483647"),
        ("sink", 1.5, "an integer from 0 to 2147483647"),
        ("sink", True, "an integer from 0 to 2147483647"),
        ("sink", 2**31, "an integer from 0 to 2147483647"),
        ("recent", 0, "an integer from 1 to 2147483647"),
        ("recent", None, "an integer from 1 to 2147483647"),
        ("group_size", 12, "None (whole head) or a multiple of 8"),
        ("group_size", 0, "None (whole head) or a multiple of 8"),
        ("group_size", "64", "None (whole head) or a multiple of 8"),
        ("page_size", 24, "a positive multiple of 16"),
        ("page_size", 0, "a positive multiple of 16"),
        ("page_size", -16, "a positive multiple of 16"),
        ("scale_dtype", "float32", "'float16', 'float8_e4m3'"),
        ("window_dtype", "int8", "'bfloat16', 'float16', 'float32'"),
        ("levels", "uniform", "'affine', 'lloyd_max'"),
        ("prefill_mode", "", "'raw', 'rule'"),
        ("rotation", None, "'artifact', 'hadamard', 'none'"),
        ("kv_bits", 2, "group_size, k_bits"),
    ],
)
def test_refused(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        OscarConfig.from_dict({field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}={value!r}: ")
    assert allowed in message
    assert "\n" not in message


def test_unhashable_values_are_refused_like_others() -> None:
    with pytest.raises(ConfigError, match=re.escape("k_bits=[2]: allowed is 2, 4")):
        OscarConfig.from_dict({"k_bits": [2]})


def test_defaults_are_the_published_recipe() -> None:
    config = OscarConfig()
    assert (config.k_bits, config.v_bits, config.sink, config.recent) == (2, 2, 64, 256)
    assert (config.prefill_mode, config.window_dtype, config.scale_dtype) == ("raw", "bfloat16", "float16")


def test_round_trip_and_copies() -> None:
    config = OscarConfig(k_bits=4, group_size=64, sink=0, recent=1, page_size=16)
    assert OscarConfig.from_dict(asdict(config)) == config
    assert config.with_(sink=8).sink == 8
    with pytest.raises(ConfigError, match="sink=-8"):
        config.with_(sink=-8)
    with pytest.raises(FrozenInstanceError):
        config.sink = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_names_of_cache_types(name: str) -> None:
    config = OscarConfig.from_dtype(name, sink=32)
    assert (config.k_bits, config.v_bits) == KV_CACHE_DTYPES[name]
    assert config.sink == 32


def test_unknown_cache_type() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int2': allowed is 'oscar_int2', 'oscar_k4v2'"):
        OscarConfig.from_dtype("int2")


def test_groups() -> None:
    assert OscarConfig().groups(96) == 1
    assert OscarConfig(group_size=32).groups(96) == 3
    for head_dim in (0, 4, 12, -8):
        with pytest.raises(ConfigError, match=f"head_dim={head_dim}: allowed is a multiple of 8"):
            OscarConfig().groups(head_dim)

"""Lets vLLM's CUDA wheel run its engine on a CPU: the few native operators that the CPU worker calls, in Python."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_LIBRARY: list[torch.library.Library] = []


def install() -> None:
    """Define the missing operators of ``torch.ops._C``, once."""
    if _LIBRARY or hasattr(torch.ops._C, "init_cpu_memory_env"):
        return
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    for layer in (RotaryEmbedding, RMSNorm):
        layer.forward_cpu = layer.forward_native
    layer_utils.check_cpu_sgl_kernel = lambda n, k, dtype: False
    lib = torch.library.Library("_C", "FRAGMENT")
    _LIBRARY.append(lib)
    for schema, function in (
        ("init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None),
        ("init_cpu_threads_env(str cores) -> str", lambda cores: ""),
        ("greedy_argmax(Tensor logits) -> Tensor", lambda logits: logits.argmax(-1)),
        (
            "compute_slot_mapping_kernel_impl(Tensor query_start, Tensor positions, Tensor block_table, "
            "Tensor(a!) slot_mapping, int block_size) -> ()",
            _slot_mapping,
        ),
    ):
        lib.define(schema)
        lib.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")


def _slot_mapping(
    query_start: Tensor, positions: Tensor, block_table: Tensor, slot_mapping: Tensor, block_size: int
) -> None:
    starts = query_start.tolist()
    slot_mapping.fill_(-1)
    for request, (start, end) in enumerate(pairwise(starts)):
        position = positions[start:end]
        block = block_table[request, position // block_size].long()
        slot_mapping[start:end] = block * block_size + position % block_size

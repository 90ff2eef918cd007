"""Tiny random models of every family served, and a byte-level tokenizer to go with them."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

EOS = 256
VOCAB = 257
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}

CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_COMMON),
    "qwen2": Qwen2Config(**_COMMON),
    "qwen3": Qwen3Config(**_COMMON, head_dim=32),
    "mistral-sliding": MistralConfig(**_COMMON, sliding_window=40),
    "phi3": Phi3Config(**_COMMON, original_max_position_embeddings=2048),
    "gemma2-softcap": Gemma2Config(
        **{**_COMMON, "num_hidden_layers": 4}, head_dim=32, sliding_window=40, attn_logit_softcapping=5.0,
        query_pre_attn_scalar=32,
    ),
    "gemma3": Gemma3TextConfig(
        **{**_COMMON, "num_hidden_layers": 6}, head_dim=32, sliding_window=40, query_pre_attn_scalar=32
    ),
    "llama-mha-80": LlamaConfig(**{**_COMMON, "num_key_value_heads": 4}, head_dim=80),
}  # fmt: skip


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A model of ``family`` with weights large enough that attention is far from uniform."""
    torch.manual_seed(seed)
    config = CONFIGS[family]
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and "embed" not in name:
            torch.nn.init.normal_(weight, std=1.6 / weight.shape[1] ** 0.5)
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token ``i`` is byte ``i``; token 256 ends the sequence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = [b for b in range(256) if b not in printable]
    symbols = {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(extra)}
    assert sorted(symbols) == alphabet
    backend = Tokenizer(models.BPE(vocab={**symbols, "<eos>": EOS}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")

"""Models of a few thousand parameters with random weights."""

from __future__ import annotations

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 97


def llama(head_dim: int = 32) -> PreTrainedModel:
    """Two full-attention layers, four query heads on two KV heads."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=2048, pad_token_id=0, eos_token_id=None,
        bos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def gemma(window: int = 24) -> PreTrainedModel:
    """Three sliding layers and a full one, QK norm."""
    torch.manual_seed(1)
    config = Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=1, head_dim=32, sliding_window=window, max_position_embeddings=2048, pad_token_id=0,
        eos_token_id=None, bos_token_id=None, initializer_range=0.2, sliding_window_pattern=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
    )  # fmt: skip
    return Gemma3ForCausalLM(config).eval()


def tokens(seed: int, *shape: int) -> torch.Tensor:
    """Random token ids, no padding among them."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))

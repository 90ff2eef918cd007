"""Tiny random models of the architectures that calibration is tested on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (hf.LlamaConfig, {"head_dim": 16}),
    "llama-mqa": (hf.LlamaConfig, {"head_dim": 24, "num_key_value_heads": 1}),
    "llama-mha": (hf.LlamaConfig, {"head_dim": 8, "num_key_value_heads": 4}),
    "qwen2": (hf.Qwen2Config, {"hidden_size": 64}),
    "qwen3": (hf.Qwen3Config, {"head_dim": 16}),
    "gemma3": (
        hf.Gemma3TextConfig,
        {"head_dim": 32, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "mistral": (hf.MistralConfig, {"head_dim": 16, "sliding_window": 40}),
    "phi3": (hf.Phi3Config, {"hidden_size": 64, "partial_rotary_factor": 0.5}),
}


def tiny_model(name: str, seed: int = 0, **options: Any) -> Any:
    """Random float32 model; weights large enough that attention is far from uniform."""
    kind, own = CONFIGS[name]
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(kind(**{**SIZES, **own, **options}), dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
            elif "bias" in parameter_name:
                parameter.normal_()
    return model.eval().requires_grad_(False)


def tiny_tokens(count: int, length: int, seed: int = 0) -> list[torch.Tensor]:
    """Random token sequences."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, SIZES["vocab_size"], (length,), generator=generator) for _ in range(count)]


def tiny_folder(path: Path, name: str, seed: int = 0) -> Path:
    """A tiny model saved with a byte-level tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(["<s>", "</s>", *letters])}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    tokenizer.save_pretrained(path)
    tiny_model(name, seed, vocab_size=258, eos_token_id=1).save_pretrained(path)
    return path

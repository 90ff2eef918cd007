"""A model folder as a user has one: a tiny random Llama, a byte-level tokenizer, a chat template that knows
tools.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

CONTEXT = 2048
SPECIAL = ("<eos>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% if tools %}"
    "{{ '<|im_start|>system\n<tools>' + (tools | tojson) + '</tools> <tool_call><|im_end|>\n' }}"
    "{% endif %}"
    "{% for m in messages %}"
    "{% if loop.first and m['role'] == 'assistant' %}{{ raise_exception('the user begins') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_model(folder: Path) -> Path:
    """Write the model to ``folder``; token id ``i`` below 256 is the ``i``-th letter of the byte alphabet."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[0], additional_special_tokens=list(SPECIAL[1:])
    )
    tokenizer.chat_template = TEMPLATE
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[1] ** 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

"""What the probe finds in models, and what it refuses in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as Causal
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    Phi3Config,
    Qwen3NextConfig,
    T5Config,
)

from oscar_serving.engines.hf.model import ModelError, load_model, pick_device, prepare_model

from .tiny import CONFIGS, tiny_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize("family", CONFIGS)
def test_probe_finds_every_layer(family: str) -> None:
    model = tiny_model(family)
    loaded = prepare_model(model)
    text = model.config
    assert [layer.index for layer in loaded.layers] == list(range(text.num_hidden_layers))
    assert {(layer.query_heads, layer.heads) for layer in loaded.layers} == {
        (text.num_attention_heads, text.num_key_value_heads)
    }
    assert {layer.head_dim for layer in loaded.layers} == {getattr(text, "head_dim", None) or 16}
    assert loaded.max_model_len == 2048


def test_probe_finds_windows_scale_and_softcap() -> None:
    gemma2 = prepare_model(tiny_model("gemma2-softcap")).layers
    assert [layer.spec.sliding_window for layer in gemma2] == [40, None, 40, None]
    assert {layer.spec.softcap for layer in gemma2} == {5.0}
    gemma3 = prepare_model(tiny_model("gemma3")).layers
    assert [layer.spec.sliding_window for layer in gemma3] == [40] * 5 + [None]
    assert {layer.spec.scale for layer in gemma3} == {32**-0.5}
    assert {layer.spec.sliding_window for layer in prepare_model(tiny_model("mistral-sliding")).layers} == {40}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (T5Config(), "encoder-decoder"),
        (BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2), "attention code of its own"),
        (Qwen3NextConfig(**SMALL, num_key_value_heads=2), "linear_attention"),
        (
            GptOssConfig(
                **SMALL, num_key_value_heads=2, head_dim=16, intermediate_size=32, num_local_experts=4,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            ),
            "s_aux",
        ),
        (
            DeepseekV3Config(
                **SMALL, intermediate_size=32, n_routed_experts=4, first_k_dense_replace=2, q_lora_rank=8,
                kv_lora_rank=8,
                qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, moe_intermediate_size=16,
            ),
            "latent attention",
        ),
        (LlamaConfig(**SMALL, intermediate_size=32, head_dim=12), "multiple of 8"),
        (LlamaConfig(**SMALL, intermediate_size=32, sliding_window=16), "attends with sliding_window=None"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_in_one_line(config: Any, message: str, tmp_path: Path) -> None:
    if config.is_encoder_decoder:
        config.save_pretrained(tmp_path)
        with pytest.raises(ModelError, match=message) as caught:
            load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, max_model_len=None)
    else:
        with pytest.raises(ModelError, match=message) as caught:
            prepare_model(Causal.from_config(config), name="tiny")
    assert "\n" not in str(caught.value)


def test_a_model_that_mixes_packed_sequences_is_refused() -> None:
    model = tiny_model("llama")
    inner = model.model.layers[0].mlp
    inner.register_forward_hook(lambda _module, _args, out: out + 0.3 * out.cumsum(1))  # a state along the row
    with pytest.raises(ModelError, match="mixes sequences"):
        prepare_model(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_numbers_are_refused(value: float) -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3] = value
    with pytest.raises(ModelError, match=r"logits in torch\.float32 are not finite"):
        prepare_model(model)


def test_rope_that_depends_on_length_is_served_up_to_where_it_does_not() -> None:
    config = LlamaConfig(
        **SMALL, intermediate_size=32, max_position_embeddings=128, rope_parameters={
            "rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    assert prepare_model(Causal.from_config(config)).max_model_len == 32
    with pytest.raises(ModelError, match="dynamic RoPE"):
        prepare_model(Causal.from_config(config), max_model_len=64)
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    phi = Phi3Config(
        **SMALL, intermediate_size=32, pad_token_id=0, max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )  # fmt: skip
    assert prepare_model(Causal.from_config(phi)).max_model_len == 32


def test_length_limit() -> None:
    assert prepare_model(tiny_model("llama"), max_model_len=100).max_model_len == 100
    with pytest.raises(ModelError, match=r"max_model_len=4096 .* 2048"):
        prepare_model(tiny_model("llama"), max_model_len=4096)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    def load(path: Path) -> None:
        load_model(path, device=torch.device("cpu"), dtype=torch.float32, max_model_len=None)

    with pytest.raises(ModelError, match=r"no config\.json"):
        load(tmp_path / "missing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "not-a-model"}))
    with pytest.raises(ModelError, match="not-a-model"):
        load(tmp_path)
    tiny_model("llama").save_pretrained(tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)


def test_device_that_is_not_there_is_named() -> None:
    assert pick_device("cpu").type == "cpu"
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="cuda"):
            pick_device("cuda")

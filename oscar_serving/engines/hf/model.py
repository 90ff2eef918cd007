"""Loading a Hugging Face decoder model, and finding out what its attention layers are by watching them.

The layers' shapes and constants are taken from a probe, not from the configuration: two copies of a few
tokens are sent through the model as one packed row, and the attention function notes how each layer calls it.
What the cache cannot serve is refused here, in one line.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from oscar_serving.attention.spec import AttentionSpec
from oscar_serving.engines.hf.attention import ATTENTION, RecordedCall, recording

PROBE_TOKENS = 6
SERVED_LAYER_TYPES = ("full_attention", "sliding_attention")
#: RoPE types whose frequencies change with the longest sequence of the batch; they are constant up to the
#: original length.
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


class ModelError(ValueError):
    """The model cannot be served; the message says what, why and what to do."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a loaded model."""

    index: int
    module: nn.Module
    query_heads: int
    heads: int
    head_dim: int
    spec: AttentionSpec


@dataclass(frozen=True)
class LoadedModel:
    """A model that calls the engine's attention function, and its attention layers in order."""

    model: Any
    config: Any
    layers: tuple[AttentionLayer, ...]
    max_model_len: int
    vocab_size: int


def pick_device(device: str) -> torch.device:
    """``auto`` → CUDA, MPS or CPU, the first there is; a named device that is not there is an error."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        return torch.device(next(name for name, available in there.items() if available))
    if not there[device]:
        raise ModelError(f"device={device!r}: not available here; use one of {[n for n, a in there.items() if a]}")
    return torch.device(device)


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` → bfloat16, but float32 on a CPU without bfloat16 arithmetic."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cpu" and not any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name):
        return torch.float32
    return torch.bfloat16


def load_model(path: Path, *, device: torch.device, dtype: torch.dtype, max_model_len: int | None) -> LoadedModel:
    """Load ``path`` (a folder with ``config.json`` and safetensors) and probe it.

    Raises
    ------
    ModelError
        The folder is not a model, or the model has something that the cache cannot serve.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a model folder (there is no config.json); `oscar models list` shows names")
    try:
        config = AutoConfig.from_pretrained(path)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(f"{path}/config.json: {_one_line(error)}") from error
    text = config.get_text_config(decoder=True)
    _check_config(path.name, config, text)
    limit = _length_limit(path.name, text, max_model_len)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, attn_implementation=ATTENTION)
    except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        raise ModelError(f"{path.name}: cannot be loaded: {_one_line(error)}") from error
    return prepare_model(model.to(device), max_model_len=limit, name=path.name)


def prepare_model(model: Any, *, max_model_len: int | None = None, name: str = "model") -> LoadedModel:
    """Check and probe a model that is in memory (its attention is switched to the engine's)."""
    text = model.config.get_text_config(decoder=True)
    kind = type(model).__name__
    _check_config(name, model.config, text)
    if not model._supports_attention_backend:
        raise ModelError(f"{name}: {kind} has attention code of its own that cannot be replaced; not supported")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelError(f"{name}: {kind}.forward has no logits_to_keep; not supported")
    limit = _length_limit(name, text, max_model_len)
    model.set_attn_implementation(ATTENTION)
    model.eval().requires_grad_(False)
    layers = _probe(name, model, text)
    return LoadedModel(model, model.config, layers, limit, model.get_input_embeddings().num_embeddings)


def _check_config(name: str, config: Any, text: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name}: encoder-decoder models ({config.model_type}) are not supported, only decoders")
    other = sorted(set(getattr(text, "layer_types", None) or ()) - set(SERVED_LAYER_TYPES))
    if other:
        served = ", ".join(SERVED_LAYER_TYPES)
        raise ModelError(f"{name}: layers of type {', '.join(other)} are not supported, only {served}")
    if getattr(text, "num_kv_shared_layers", 0):
        raise ModelError(f"{name}: layers that share another layer's K and V (num_kv_shared_layers) are not supported")
    if getattr(text, "use_bidirectional_attention", None):
        raise ModelError(f"{name}: use_bidirectional_attention is set; only causal attention is supported")


def _length_limit(name: str, text: Any, asked: int | None) -> int:
    own: int | None = getattr(text, "max_position_embeddings", None)
    parameters = getattr(text, "rope_parameters", None) or {}
    by_layer_type = parameters and all(isinstance(p, dict) for p in parameters.values())
    for rope in parameters.values() if by_layer_type else (parameters,):
        kind, original = rope.get("rope_type"), rope.get("original_max_position_embeddings") or own
        if kind in LENGTH_DEPENDENT_ROPE and original is not None:
            own = original
            if asked is not None and asked > original:
                raise ModelError(
                    f"{name}: max_model_len={asked} is above {own}; beyond, its {kind} RoPE depends on the "
                    f"other sequences of the batch; use at most {own}"
                )
    if own is not None and asked is not None and asked > own:
        raise ModelError(f"{name}: max_model_len={asked} is above the model's own limit of {own}")
    limit = asked if asked is not None else own
    if limit is None:
        raise ModelError(f"{name}: the configuration has no max_position_embeddings; give max_model_len")
    return limit


def _probe(name: str, model: Any, text: Any) -> tuple[AttentionLayer, ...]:
    """Send two copies of a few tokens as one row; see the module's docstring."""
    half = torch.arange(PROBE_TOKENS, device=model.device)
    positions = half.repeat(2)[None]
    ids = positions % model.get_input_embeddings().num_embeddings
    with recording() as calls, torch.inference_mode():
        try:
            logits = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=0).logits[0]
        except Exception as error:  # whatever the model's code raises means that it cannot be driven this way
            raise ModelError(f"{name}: cannot be run on packed sequences: {_one_line(error)}") from error
    layers = tuple(_served(name, call, text) for call in calls)
    count = getattr(text, "num_hidden_layers", len(layers))
    if [layer.index for layer in layers] != list(range(count)):
        raise ModelError(
            f"{name}: {len(layers)} attention calls for {count} layers; only models whose every layer is "
            "one plain self-attention are supported"
        )
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"{name}: its logits in {logits.dtype} are not finite numbers: the weights are damaged, or the model needs "
            "another dtype (bfloat16 or float32)"
        )
    first, second = logits.float().split(PROBE_TOKENS)
    if not torch.allclose(first, second, rtol=1e-2, atol=1e-2 * float(first.abs().max())):
        raise ModelError(f"{name}: mixes sequences packed in one row, or ignores position_ids; not supported")
    return layers


def _served(name: str, call: RecordedCall, text: Any) -> AttentionLayer:
    where = f"{name}, layer {call.index}"
    if call.foreign:
        raise ModelError(
            f"{where}: attention with {', '.join(call.foreign)} (learned sinks or biases) is not supported"
        )
    if not call.causal:
        raise ModelError(f"{where}: attention that is not causal is not supported")
    if call.value_dim != call.head_dim:
        raise ModelError(
            f"{where}: heads of {call.head_dim} channels in K and {call.value_dim} in V (latent attention)"
            " are not supported"
        )
    if call.head_dim % 8:
        raise ModelError(f"{where}: a head of {call.head_dim} channels is not a multiple of 8; not supported")
    window, types = call.spec.sliding_window, getattr(text, "layer_types", None)
    if types and 0 <= call.index < len(types):
        sliding = types[call.index] == "sliding_attention"
    else:
        sliding = getattr(text, "sliding_window", None) is not None
    if sliding != (window is not None):
        kind = "a sliding" if sliding else "a full"
        raise ModelError(f"{where}: is {kind} attention layer but attends with sliding_window={window}; not supported")
    return AttentionLayer(call.index, call.module, call.query_heads, call.heads, call.head_dim, call.spec)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__

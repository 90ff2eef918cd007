"""What a calibration depends on in a model: the shapes and position encoding of its attention layers."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

#: Layer types without a KV cache of their own.
_NO_CACHE = ("linear_attention", "mamba", "recurrent", "conv")
_DIGEST_ROWS = 8


@dataclass(frozen=True)
class Architecture:
    """Fields that must agree between a model and the artifact that it is served with.

    Attributes
    ----------
    model_type
        Hugging Face model type, such as ``llama``.
    layers, query_heads, kv_heads, head_dim, hidden_size
        Counts and sizes.
    sliding_window
        Tokens that a sliding layer sees; ``None`` if no layer slides.
    layer_types
        Type of each layer, or empty where all have full attention.
    rope
        Parameters of the rotary embedding as JSON with sorted keys.
    """

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    sliding_window: int | None
    layer_types: tuple[str, ...]
    rope: str

    @classmethod
    def of(cls, hf_config: Any) -> Architecture:
        """Architecture of a Hugging Face configuration (of the language model inside a multimodal one)."""
        text = hf_config.get_text_config(decoder=True)
        heads = int(text.num_attention_heads)
        types = tuple(getattr(text, "layer_types", None) or ())
        if set(types) == {"full_attention"}:
            types = ()
        slides = "sliding_attention" in types or (not types and bool(getattr(text, "sliding_window", None)))
        if getattr(text, "use_sliding_window", True) is False:
            slides = False
        return cls(
            model_type=str(text.model_type),
            layers=int(text.num_hidden_layers),
            query_heads=heads,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            hidden_size=int(text.hidden_size),
            sliding_window=int(text.sliding_window) if slides else None,
            layer_types=types,
            rope=_rope(text),
        )

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Architecture:
        """Parse what :meth:`to_dict` wrote; a missing or unknown field raises ``ValueError``."""
        if set(value) != {f.name for f in fields(cls)}:
            raise ValueError(f"architecture has the fields {sorted(value)}")
        return cls(**{**value, "layer_types": tuple(value["layer_types"])})

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self) | {"layer_types": list(self.layer_types)}

    def differences(self, other: Architecture) -> list[tuple[str, object, object]]:
        """``(field, own value, other's value)`` of every field that differs."""
        pairs = ((f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return [(name, mine, theirs) for name, mine, theirs in pairs if mine != theirs]

    def cached_layers(self) -> list[int]:
        """Indices of the layers that have a KV cache."""
        types = self.layer_types or ("full_attention",) * self.layers
        return [i for i, kind in enumerate(types) if not any(word in kind for word in _NO_CACHE)]


def _rope(text: Any) -> str:
    """Rotary parameters in one form for old (``rope_theta``, ``rope_scaling``) and new configurations."""
    rope = getattr(text, "rope_parameters", None)
    if not rope:
        rope = {
            "rope_theta": getattr(text, "rope_theta", None),
            **(getattr(text, "rope_scaling", None) or {}),
        }
        rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
        factor = getattr(text, "partial_rotary_factor", None)
        rope |= {"partial_rotary_factor": factor} if factor else {}
    return json.dumps(_plain(_one_type(rope)), sort_keys=True)


def _one_type(rope: dict[str, Any]) -> dict[str, Any]:
    """Drop ``type``, the old name of ``rope_type``, which SGLang adds to the configuration, per layer type too."""
    named = {k: _one_type(v) if isinstance(v, dict) else v for k, v in rope.items() if k != "type"}
    return named | ({"rope_type": rope["type"]} if "type" in rope and not rope.get("rope_type") else {})


def _plain(value: Any) -> Any:
    """Drop ``None`` entries and write every number as a float, so that 10000 and 10000.0 agree."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def weights_digest(folder: Path) -> str | None:
    """Digest of a few rows of the first layer's key projection in a folder of safetensors.

    Tells models of one architecture apart (a base model from its fine-tuned ones) without reading them whole.
    ``None`` where there is no such tensor.
    """
    wanted = re.compile(r"(^|\.)layers\.0\.self_attn\.(k_proj|qkv_proj)\.weight$")
    digest = hashlib.sha256()
    found = False
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    if wanted.search(name):
                        rows = file.get_slice(name)[:_DIGEST_ROWS]
                        digest.update(rows.float().contiguous().numpy().tobytes())
                        found = True
        except (SafetensorError, OSError):
            return None
    return digest.hexdigest()[:32] if found else None

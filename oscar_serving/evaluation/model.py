"""A Hugging Face model whose attention reads K and V back from a simulated cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscar_serving.calibration.architecture import Architecture
from oscar_serving.calibration.capture import LayerCall, capturing
from oscar_serving.evaluation.attention import Tiers, rule_attention
from oscar_serving.evaluation.storage import Storage

_PROBE_TOKENS = 8
#: Tokens of a layer's buffer are allocated in multiples of this.
_GROWTH = 256


class EvaluationError(ValueError):
    """The evaluation cannot be done as asked; the message says why."""


class SimulatedCache:
    """What a cache holds of one sequence, layer by layer; called by the model's attention.

    Parameters
    ----------
    storage
        Kind of cache.
    growing
        Keep what was written, for a model that is fed in pieces. Without it, each call is a whole sequence.
    """

    def __init__(self, storage: Storage, *, growing: bool = False) -> None:
        self.storage = storage
        self.length = 0
        self._growing = growing
        self._layers: dict[int, tuple[Tiers, int]] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """Write a layer's new tokens and attend for them; ``[query heads, tokens, d]``."""
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        q, k, v = (t.to(dtype) for t in (call.q, call.k, call.v))
        tiers = self.storage.read_back(call.layer, k, v)
        if self._growing:
            tiers = self._append(call.layer, tiers)
        return rule_attention(
            q, tiers, call.spec, sink=self.storage.sink, recent=self.storage.recent, sink_logits=call.sinks
        )

    def advance(self, tokens: int) -> None:
        """Count the tokens of a finished forward pass."""
        self.length += tokens

    def truncate(self, length: int) -> None:
        """Forget the tokens from ``length`` on."""
        if length > self.length:
            raise EvaluationError(f"cannot truncate {self.length} tokens to {length}")
        self.length = length
        self._layers = {index: (tiers, min(used, length)) for index, (tiers, used) in self._layers.items()}

    def _append(self, layer: int, new: Tiers) -> Tiers:
        one_tier = new.k_history is new.k_window
        buffers, used = self._layers.get(layer, (None, 0))
        end = used + new.k_history.shape[1]
        if buffers is None or buffers.k_history.shape[1] < end:
            room = -(-(end + end // 2) // _GROWTH) * _GROWTH
            grown = [t.new_empty(t.shape[0], room, t.shape[2]) for t in (new[:2] if one_tier else new)]
            if buffers is not None:
                for target, source in zip(grown, buffers, strict=False):
                    target[:, :used] = source[:, :used]
            buffers = Tiers(*(grown * 2 if one_tier else grown))
        for target, source in zip(buffers, new, strict=True):
            target[:, used:end] = source
        self._layers[layer] = (buffers, end)
        if one_tier:
            k, v = buffers.k_history[:, :end], buffers.v_history[:, :end]
            return Tiers(k, v, k, v)
        return Tiers(*(t[:, :end] for t in buffers))


class EvaluatedModel:
    """A causal language model, its tokenizer, and the way from hidden states to logits.

    Parameters
    ----------
    model, tokenizer
        From ``transformers``; the model is set to evaluation mode.
    name
        For reports.

    Raises
    ------
    EvaluationError
        The model does something to its logits that is not known here.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str = "model") -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config
        self._text = model.config.get_text_config(decoder=True)
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise EvaluationError(f"{name}: {type(model).__name__} has no output embeddings: not a language model")
        self._check_head()

    @classmethod
    def load(
        cls, path: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> EvaluatedModel:
        """Load a model folder with its tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        path = Path(path).expanduser()
        if not (path / "config.json").is_file():
            raise EvaluationError(f"{path}: not a model folder (there is no config.json)")
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        return cls(model, AutoTokenizer.from_pretrained(path), path.name)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    @property
    def max_length(self) -> int | None:
        """Longest sequence that the model was made for."""
        limit = getattr(self._text, "max_position_embeddings", None)
        return int(limit) if limit else None

    @property
    def identity(self) -> str:
        """Tells the model and its computing type apart from others: name, architecture, and a few of its weights."""
        digest = hashlib.sha256(repr(Architecture.of(self.config)).encode())
        for weight in (self._head.weight[:8], next(self._decoder.layers[0].parameters())):
            digest.update(weight.detach().float().cpu().contiguous().numpy().tobytes())
        return f"{self.name} {self.model.dtype} {digest.hexdigest()[:16]}"

    @property
    def vocab_size(self) -> int:
        """Logits a position."""
        return int(self._head.weight.shape[0])

    @contextmanager
    def through(self, cache: SimulatedCache) -> Iterator[None]:
        """Inside the block, the model's attention writes to and reads from ``cache``."""
        with capturing(self.model, cache.attend), torch.inference_mode():
            yield

    def hidden(self, tokens: Tensor, *, start: int = 0) -> Tensor:
        """Final hidden states ``[tokens, hidden]`` of one sequence (or of its part from position ``start``)."""
        ids = tokens.to(self.device)[None]
        positions = torch.arange(start, start + ids.shape[1], device=self.device)[None]
        return self._decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state[0]

    def sequence_hidden(self, tokens: Tensor, storage: Storage) -> Tensor:
        """Final hidden states of one whole sequence ``[tokens]`` whose K and V went through ``storage``."""
        with self.through(SimulatedCache(storage)):
            return self.hidden(tokens)

    def extend(self, tokens: Tensor, cache: SimulatedCache) -> Tensor:
        """Feed further tokens of the sequence in ``cache`` (growing); their final hidden states."""
        with self.through(cache):
            hidden = self.hidden(tokens, start=cache.length)
        cache.advance(len(tokens))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 ``[tokens, vocabulary]`` of hidden states."""
        with torch.inference_mode():
            logits = self._head(hidden).float()
            if scale := getattr(self._text, "logit_scale", None):
                logits *= scale
            if scale := getattr(self._text, "logits_scaling", None):
                logits /= scale
            if cap := getattr(self._text, "final_logit_softcapping", None):
                logits.div_(cap).tanh_().mul_(cap)
            return logits

    def _check_head(self) -> None:
        tokens = torch.arange(_PROBE_TOKENS, device=self.device) % self.vocab_size
        with torch.inference_mode():
            whole = self.model(input_ids=tokens[None], use_cache=False).logits[0].float()
            parts = self.logits(self.hidden(tokens))
        if not torch.allclose(whole, parts, rtol=1e-2, atol=1e-2 * float(whole.abs().max())):
            raise EvaluationError(
                f"{self.name}: {type(self.model).__name__} changes its logits in a way that is not known here"
            )

"""``calibrate``: a model and some text → an artifact."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oscar_serving.calibration.architecture import Architecture, weights_digest
from oscar_serving.calibration.artifact import Artifact, ArtifactError
from oscar_serving.calibration.candidates import k_candidates, v_candidates
from oscar_serving.calibration.capture import CaptureError, LayerCall, capturing, forward
from oscar_serving.calibration.moments import Moments
from oscar_serving.calibration.recipe import PRESETS, Recipe, default_config
from oscar_serving.calibration.select import LayerChoice, observe, stages
from oscar_serving.calibration.texts import Source, TextError, docstrings, file_text, generated, sequences
from oscar_serving.config import ConfigError, OscarConfig
from oscar_serving.version import __version__

#: Told (stage, steps done, steps in all).
Progress = Callable[[str, int, int], None]
STATE_FILE = ".calibration.safetensors"
_HELD_OUT_SHARE = 4
_SAVE_SECONDS = 20.0
_STATE_ELEMENTS = 64
#: Fewer say nothing about the channels of a head; the command line asks for as many.
_LEAST_TOKENS = 256


def calibrate(
    model: Path | str,
    out: Path | str,
    *,
    texts: Sequence[Path | str] = (),
    self_generate: bool = False,
    tokens: int = 16384,
    preset: str = "default",
    config: OscarConfig | None = None,
    sequence_length: int = 2048,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
    command: str = "",
    progress: Progress | None = None,
) -> Path:
    """Calibrate a model folder and write the artifact.

    Parameters
    ----------
    model
        Folder with ``config.json``, safetensors and tokenizer.
    out
        Folder for ``oscar.safetensors``; an interrupted run with the same settings goes on where it was.
    texts
        UTF-8 files. Without any, and without ``self_generate``: docstrings of Python's standard library.
    self_generate
        Add (or use only) text that the model generates.
    tokens
        Tokens to calibrate on; a quarter as many again are held out to choose on.
    preset
        A key of :data:`~oscar_serving.calibration.recipe.PRESETS`.
    config
        Cache layout and windows; :func:`~oscar_serving.calibration.recipe.default_config` if ``None``.
    sequence_length
        Tokens in a sequence, at most the model's limit.
    device, dtype
        ``auto``: CUDA, MPS or CPU; the model's own type, but float32 on a CPU. ``device="map"`` spreads the model over
        all GPUs and main memory.
    command
        How it was called, kept in the artifact.

    Returns
    -------
    Path
        The artifact's file.

    Raises
    ------
    ArtifactError, CaptureError, ConfigError, TextError
        What cannot be done, in one line.
    """
    say = progress or (lambda *_: None)
    if preset not in PRESETS:
        raise ConfigError(f"preset={preset!r}: allowed is {', '.join(map(repr, PRESETS))}")
    if tokens < 1 or sequence_length < 16:
        raise ConfigError(f"tokens={tokens}, sequence_length={sequence_length}: need at least 1 and 16")
    folder = Path(model).expanduser()
    loaded, tokenizer = load_model(folder, device=device, dtype=dtype)
    architecture = Architecture.of(loaded.config)
    config = config or default_config(architecture.head_dim)
    config.groups(architecture.head_dim)
    length = min(
        sequence_length,
        getattr(loaded.config.get_text_config(decoder=True), "max_position_embeddings", sequence_length),
    )
    named = [(Path(path).name, file_text(Path(path))) for path in texts]
    if not named and not self_generate:
        named = [("docstrings of Python's standard library", docstrings())]
    wanted = tokens + tokens // _HELD_OUT_SHARE
    found: list[Tensor] = []
    sources: list[Source] = []
    if named:
        share = wanted // 2 if self_generate else wanted
        found, sources = sequences(tokenizer, named, share, length)
    if self_generate:
        more, source = generated(
            loaded, tokenizer, wanted - sum(map(len, found)), length, seed=seed,
            progress=lambda done, total: say("generating text", done, total),
        )  # fmt: skip
        found, sources = _interleave(found, more), [*sources, source]
    if (have := sum(map(len, found))) < _LEAST_TOKENS:
        raise TextError(
            f"the calibration texts hold {have} tokens, at least {_LEAST_TOKENS} are needed: pass longer ones"
        )
    recipe = PRESETS[preset]
    calibration = {
        "preset": preset,
        "texts": [source.to_dict() for source in sources],
        "tokens": sum(map(len, found)),
        "sequence_length": length,
        "tool_version": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "compute_dtype": str(loaded.dtype).removeprefix("torch."),
    }
    _check_writable(Path(out))
    artifact = calibrate_model(loaded, found, recipe=recipe, config=config, state=Path(out) / STATE_FILE, progress=say)
    model_info = {"id": folder.resolve().name, "weights_digest": weights_digest(folder)}
    artifact = replace(
        artifact,
        metadata={"model": model_info, "calibration": {**calibration, **artifact.metadata["calibration"]}},
    )
    written = artifact.save(out)
    (Path(out) / STATE_FILE).unlink(missing_ok=True)
    return written


def calibrate_model(
    model: Any,
    token_sequences: Sequence[Tensor],
    *,
    recipe: Recipe,
    config: OscarConfig,
    state: Path | None = None,
    progress: Progress | None = None,
) -> Artifact:
    """Calibrate a Hugging Face model in memory on int64 sequences ``[tokens]``.

    The last fifth of the sequences (at least one, if there are two) is held out from the moments and decides between
    the candidates. ``state``: file in which unfinished moments are kept.
    """
    count = len(token_sequences) // (_HELD_OUT_SHARE + 1) or (1 if len(token_sequences) > 1 else 0)
    fit = list(token_sequences[: len(token_sequences) - count])
    held_out = list(token_sequences[len(token_sequences) - count :]) or fit
    moments = collect(model, fit, config, state=state, progress=progress)
    choices = candidates(moments, recipe, config)
    artifact = choose(model, choices, held_out, recipe=recipe, config=config, progress=progress)
    artifact.metadata["calibration"]["fit_tokens"] = sum(map(len, fit))
    return artifact


def collect(
    model: Any,
    token_sequences: Sequence[Tensor],
    config: OscarConfig,
    *,
    state: Path | None = None,
    progress: Progress | None = None,
) -> dict[int, Moments]:
    """Moments of every attention layer over the sequences; layer by layer, nothing but sums is kept."""
    say = progress or (lambda *_: None)
    key = _state_key(model, token_sequences, config)
    done, moments = _load_state(state, key)

    def receive(call: LayerCall) -> Tensor:
        if call.layer not in moments:
            moments[call.layer] = Moments.empty(call.heads, call.k.shape[-1], call.k.device)
        return moments[call.layer].to(call.k.device).update(call, config)

    saved = time.monotonic()
    with capturing(model, receive):
        for index in range(done, len(token_sequences)):
            say("moments", index, len(token_sequences))
            forward(model, token_sequences[index])
            if state is not None and time.monotonic() - saved > _SAVE_SECONDS:
                _save_state(state, key, index + 1, moments)
                saved = time.monotonic()
    say("moments", len(token_sequences), len(token_sequences))
    return moments


def candidates(moments: dict[int, Moments], recipe: Recipe, config: OscarConfig) -> dict[int, LayerChoice]:
    """What a recipe chooses from, by layer."""
    return {
        layer: LayerChoice(
            k_candidates(sums, recipe, config.scale_dtype), v_candidates(sums, recipe, config.scale_dtype)
        )
        for layer, sums in moments.items()
    }


def choose(
    model: Any,
    choices: dict[int, LayerChoice],
    held_out: Sequence[Tensor],
    *,
    recipe: Recipe,
    config: OscarConfig,
    progress: Progress | None = None,
) -> Artifact:
    """Keep, per layer and head, the candidate and the clips that do best on held-out sequences."""
    say = progress or (lambda *_: None)
    architecture = Architecture.of(model.config)
    if sorted(choices) != architecture.cached_layers():
        raise CaptureError(f"captured layers {sorted(choices)}, the model should have {architecture.cached_layers()}")
    done_stages = stages(recipe, config)
    for stage in done_stages:

        def receive(call: LayerCall, stage: str = stage) -> None:
            observe(choices[call.layer], call, config, stage)

        with capturing(model, receive):
            for index, tokens in enumerate(held_out):
                say(f"choosing {stage}", index, len(held_out))
                forward(model, tokens)
        say(f"choosing {stage}", len(held_out), len(held_out))
        for choice in choices.values():
            if stage == "rotations":
                choice.keep_best(config, per_head=recipe.per_head)
            else:
                choice.keep_clips(config, per_head=recipe.per_head)
    for choice in choices.values():
        if not choice.names:
            choice.keep_best(config, per_head=recipe.per_head)
        if recipe.clip != "shrink":
            choice.no_clip()
    return _artifact(choices, architecture, recipe, config)


def _artifact(
    choices: dict[int, LayerChoice],
    architecture: Architecture,
    recipe: Recipe,
    config: OscarConfig,
) -> Artifact:
    tally: dict[str, dict[str, int]] = {"k": {}, "v": {}}
    for choice in choices.values():
        for which, names in choice.names.items():
            for name in names:
                tally[which][name] = tally[which].get(name, 0) + 1
    calibration: dict[str, Any] = {
        "recipe": asdict(recipe),
        "chosen": tally,
        "relative_error": {
            which: {
                str(layer): [round(e, 6) for e in c.relative[which]]
                for layer, c in choices.items()
                if which in c.relative
            }
            for which in ("k", "v")
        },
    }
    if recipe.clip == "quantile":
        calibration["quantile_clip"] = list(recipe.quantiles)
    return Artifact(
        layers={layer: choice.transform(config) for layer, choice in sorted(choices.items())},
        config=config,
        architecture=architecture,
        metadata={"calibration": calibration},
        clips={k: v for layer, choice in choices.items() for k, v in choice.other_clips(layer, config).items()},
    )


def load_model(folder: Path, *, device: str, dtype: str) -> tuple[Any, Any]:
    """Model (in evaluation mode) and tokenizer of a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise ArtifactError(
            f"model {folder}: no config.json there; give a model folder or a name that `oscar models list` shows"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if device not in ("cpu", "cuda", "mps", "map"):
        raise ConfigError(f"device={device!r}: allowed is 'auto', 'cpu', 'cuda', 'mps', 'map'")
    kind: Any = (
        torch.float32 if dtype == "auto" and device == "cpu" else dtype if dtype == "auto" else getattr(torch, dtype)
    )
    options: dict[str, Any] = {"device_map": "auto"} if device == "map" else {}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, **options)
    if device != "map":
        loaded = loaded.to(device)
    return loaded.eval().requires_grad_(False), AutoTokenizer.from_pretrained(folder)


def _interleave(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[Tensor]:
    """Merge so that any tail holds both in proportion."""
    marked = [((i + 0.5) / len(part), t) for part in (first, second) for i, t in enumerate(part)]
    return [t for _, t in sorted(marked, key=lambda pair: pair[0])]


def _check_writable(folder: Path) -> None:
    """Make the folder and a file in it, so that a folder that cannot be written is known before the work is done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ArtifactError(
            f"{folder}: the artifact cannot be written there ({error.strerror or error}); give another folder"
        ) from error


def _state_key(model: Any, token_sequences: Sequence[Tensor], config: OscarConfig) -> str:
    """Digest of what the moments depend on; a few elements of each weight tell models of one architecture apart."""
    digest = hashlib.sha256(json.dumps([Architecture.of(model.config).to_dict(), config.sink, config.recent]).encode())
    digest.update(str(model.dtype).encode())
    for weight in model.parameters():
        if not weight.is_meta:  # offloaded by ``device="map"``
            digest.update(weight.detach().flatten()[:_STATE_ELEMENTS].float().cpu().numpy().tobytes())
    for tokens in token_sequences:
        digest.update(tokens.numpy().tobytes())
    return digest.hexdigest()


def _save_state(path: Path, key: str, done: int, moments: dict[int, Moments]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"{layer}.{n}": t.cpu().contiguous() for layer, m in moments.items() for n, t in m.state().items()}
    scratch = path.with_suffix(f".{os.getpid()}")  # two runs into one folder do not write each other's
    try:
        save_file(tensors, scratch, metadata={"key": key, "done": str(done)})
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _load_state(path: Path | None, key: str) -> tuple[int, dict[int, Moments]]:
    """Unfinished moments of a run with the same settings; nothing if there are none."""
    if path is None or not path.is_file():
        return 0, {}
    try:
        with safe_open(path, framework="pt") as reader:
            metadata = reader.metadata() or {}
            if metadata.get("key") != key:
                return 0, {}
            layers: dict[int, dict[str, Tensor]] = {}
            for name in reader.keys():  # noqa: SIM118
                layer, field = name.split(".")
                layers.setdefault(int(layer), {})[field] = reader.get_tensor(name)
            return int(metadata["done"]), {layer: Moments(**sums) for layer, sums in layers.items()}
    except (SafetensorError, OSError, TypeError, ValueError):
        return 0, {}

"""The published rotation files (RotationZoo, ``.pt``) in and out.

Formats 1 (one rotation a layer) and 2 (one a KV head) are read; format 3 is not orthogonal and is refused. Files are
unpickled with ``weights_only``, so that nothing in them runs, and all of it is checked, up to whether the stored
eigenvalues are those of the model that they are imported for.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oscar_serving.calibration.architecture import Architecture, weights_digest
from oscar_serving.calibration.artifact import Artifact, ArtifactError
from oscar_serving.calibration.candidates import Candidate, fp8_unit
from oscar_serving.calibration.recipe import Recipe, default_config
from oscar_serving.calibration.run import Progress, choose, collect, load_model
from oscar_serving.calibration.select import LayerChoice
from oscar_serving.calibration.texts import docstrings, sequences
from oscar_serving.config import OscarConfig
from oscar_serving.rotation import bit_reversal, check_orthogonal, hadamard
from oscar_serving.rotation.spectral import NotOrthogonalError
from oscar_serving.version import __version__

_VERSIONS: dict[Any, int] = {1: 1, "identity-v1": 1, 2: 2}
#: Below this rank correlation of stored eigenvalues and measured energies the file is another model's.
_LEAST_AGREEMENT = 0.5


@dataclass(frozen=True)
class ZooFile:
    """A validated rotation file.

    Attributes
    ----------
    version
        1 or 2.
    rotations
        Layer → float32 ``[d, d]`` (version 1) or ``[heads, d, d]`` (version 2).
    eigenvalues
        Layer → float32 of the same shape less the last dimension, where the file has them.
    """

    version: int
    rotations: dict[int, Tensor]
    eigenvalues: dict[int, Tensor]


def read_zoo(path: Path | str) -> ZooFile:
    """Read and check one file.

    Raises
    ------
    ArtifactError
        Not such a file, contains code, unknown or unsupported format, odd shapes, not orthogonal.
    """
    path = Path(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ArtifactError(
            f"{path}: refused, holds more than tensors and plain values: {_first_line(error)}"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise ArtifactError(f"{path}: cannot be read: {_first_line(error)}") from error
    if not isinstance(content, dict) or not isinstance(content.get("layers"), dict) or not content["layers"]:
        raise ArtifactError(f"{path}: not a rotation file: expected a dictionary with `format_version` and `layers`")
    version = content.get("format_version")
    if version == 3:
        raise ArtifactError(
            f"{path}: format 3 is not supported: its K map is not orthogonal and needs a query map of its own; "
            "use the format 1 or 2 file of the model, or run `oscar calibrate`"
        )
    if isinstance(version, (list, dict, Tensor)) or version not in _VERSIONS:
        raise ArtifactError(f"{path}: format_version {version!r}: allowed are 1, 'identity-v1' and 2")
    rotations: dict[int, Tensor] = {}
    eigenvalues: dict[int, Tensor] = {}
    for key, entry in content["layers"].items():
        layer = _layer_index(path, key, entry)
        rotation = entry.get("rotation")
        dims = 1 + _VERSIONS[version]
        if not isinstance(rotation, Tensor) or rotation.dim() != dims or not rotation.is_floating_point():
            shape = tuple(rotation.shape) if isinstance(rotation, Tensor) else type(rotation).__name__
            raise ArtifactError(f"{path}: layer {layer}: rotation {shape}, format {version} has {dims} dimensions")
        try:
            check_orthogonal(rotation, f"{path}: layer {layer}", tolerance=1e-4)
        except NotOrthogonalError as error:
            raise ArtifactError(str(error)) from error
        rotations[layer] = rotation.float()
        values = entry.get("eigenvalues")
        if isinstance(values, Tensor) and values.shape == rotation.shape[:-1]:
            eigenvalues[layer] = values.float()
    return ZooFile(_VERSIONS[version], rotations, eigenvalues)


def import_zoo(
    k_file: Path | str,
    v_file: Path | str,
    model: Path | str,
    out: Path | str,
    *,
    config: OscarConfig | None = None,
    tokens: int = 8192,
    sequence_length: int = 2048,
    device: str = "auto",
    progress: Progress | None = None,
) -> Path:
    """Turn a pair of rotation files into an artifact for a model folder, and return its file.

    The rotations are taken as they are; clips and FP8 units, which the files do not hold, are chosen on docstrings of
    Python's standard library.

    Raises
    ------
    ArtifactError
        The files are damaged, or are not this model's.
    """
    folder = Path(model).expanduser()
    k_zoo, v_zoo = read_zoo(k_file), read_zoo(v_file)
    loaded, tokenizer = load_model(folder, device=device, dtype="auto")
    architecture = Architecture.of(loaded.config)
    for path, zoo in ((k_file, k_zoo), (v_file, v_zoo)):
        _check_shapes(path, zoo, architecture)
    config = config or default_config(architecture.head_dim)
    found, _ = sequences(tokenizer, [("docstrings", docstrings())], tokens, sequence_length)
    moments = collect(loaded, found[:-1] or found, config, progress=progress)
    _check_agreement(k_file, k_zoo, {layer: m.qq for layer, m in moments.items()})
    choices = {
        layer: LayerChoice(
            [_candidate(k_zoo.rotations[layer], m.kk / m.tokens, m.heads, config)],
            [_candidate(v_zoo.rotations[layer], m.vv / m.tokens, m.heads, config)],
        )
        for layer, m in moments.items()
    }
    recipe = Recipe(("q",), ("scores",), ("none",), per_head=k_zoo.version == 2)
    artifact = choose(loaded, choices, found[-1:], recipe=recipe, config=config, progress=progress)
    calibration = {
        "preset": "imported",
        "files": [Path(k_file).name, Path(v_file).name],
        "format": k_zoo.version,
        "tool_version": __version__,
        "date": datetime.now(UTC).date().isoformat(),
    }
    info = {"id": folder.resolve().name, "weights_digest": weights_digest(folder)}
    return replace(artifact, metadata={"model": info, "calibration": calibration}).save(out)


def export_zoo(artifact: Artifact, k_file: Path | str, v_file: Path | str) -> None:
    """Write an artifact's rotations as a pair of format 2 files.

    Raises
    ------
    ArtifactError
        It subtracts means or maps K by more than a rotation, which the format cannot hold.
    """
    for layer, transform in artifact.layers.items():
        balanced = not torch.allclose(transform.k_rotation, transform.q_rotation, atol=1e-4)
        if balanced or transform.k_mean.any() or transform.v_mean.any():
            what = "maps K and Q apart" if balanced else "subtracts means"
            raise ArtifactError(
                f"layer {layer} {what}, which the published format cannot hold: "
                "calibrate with preset `oscar` and export that"
            )
    for path, name in ((k_file, "k_rotation"), (v_file, "v_rotation")):
        layers = {
            layer: {
                "layer_id": layer,
                "rotation": getattr(transform, name).clone(),
                "eigenvalues": torch.ones(transform.heads, transform.head_dim),  # not kept in an artifact
            }
            for layer, transform in artifact.layers.items()
        }
        content = {
            "format_version": 2,
            "objective": "cov_eig_hadamard_perhead",
            "source_grouping": "per_kv_head",
            "layers": layers,
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)


def _layer_index(path: Path, key: object, entry: object) -> int:
    try:
        layer = int(key)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ArtifactError(f"{path}: layer key {key!r} is not a number") from None
    if not isinstance(entry, dict) or int(entry.get("layer_id", layer)) != layer:
        raise ArtifactError(f"{path}: layer {layer}: its entry is damaged or says another layer_id")
    return layer


def _check_shapes(path: Path | str, zoo: ZooFile, architecture: Architecture) -> None:
    wanted = architecture.cached_layers()
    if sorted(zoo.rotations) != wanted:
        raise ArtifactError(f"{path}: layers: file {_span(sorted(zoo.rotations))}, model {_span(wanted)}")
    for layer, rotation in zoo.rotations.items():
        if rotation.shape[-1] != architecture.head_dim:
            raise ArtifactError(
                f"{path}: layer {layer}: head size: file {rotation.shape[-1]}, model {architecture.head_dim}"
            )
        if zoo.version == 2 and rotation.shape[0] != architecture.kv_heads:
            raise ArtifactError(
                f"{path}: layer {layer}: KV heads: file {rotation.shape[0]}, model {architecture.kv_heads}"
            )


def _check_agreement(path: Path | str, zoo: ZooFile, targets: dict[int, Tensor]) -> None:
    """Refuse K rotations whose stored eigenvalues are not the energies of this model's queries along their axes."""
    seen: list[Tensor] = []
    for layer, values in zoo.eigenvalues.items():
        rotation, target = zoo.rotations[layer].double(), targets[layer].cpu()
        if values.std() <= 1e-6 * values.abs().max():
            continue
        d = rotation.shape[-1]
        axes = rotation[..., torch.argsort(bit_reversal(d))] @ hadamard(d).mT
        target = target if zoo.version == 2 else target.mean(0)
        energy = torch.diagonal(axes.mT @ target @ axes, dim1=-2, dim2=-1)
        seen.append(_rank_correlation(energy.reshape(-1, d), values.double().reshape(-1, d)))
    if seen and float(torch.cat(seen).mean()) < _LEAST_AGREEMENT:
        raise ArtifactError(
            f"{path}: its eigenvalues are not those of this model's queries (rank correlation "
            f"{float(torch.cat(seen).mean()):.2f}): it was made for another model"
        )


def _rank_correlation(a: Tensor, b: Tensor) -> Tensor:
    """Spearman correlation of rows ``[n, d]`` → ``[n]``."""
    ranks = [x.argsort(-1).argsort(-1).double() for x in (a, b)]
    centered = [r - r.mean(-1, keepdim=True) for r in ranks]
    return (centered[0] * centered[1]).sum(-1) / (centered[0].norm(dim=-1) * centered[1].norm(dim=-1))


def _candidate(rotation: Tensor, second: Tensor, heads: int, config: OscarConfig) -> Candidate:
    d = rotation.shape[-1]
    per_head = rotation.expand(heads, d, d).to(second.device)
    zero = torch.zeros(heads, d, device=second.device)
    return Candidate("imported", per_head, per_head, zero, fp8_unit(per_head.double(), second, config.scale_dtype))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _span(layers: list[int]) -> str:
    return f"{len(layers)} ({layers[0]} … {layers[-1]})" if layers else "none"

"""The calibration artifact: one safetensors file with every layer's transform and where it came from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oscar_serving.calibration.architecture import Architecture
from oscar_serving.config import ConfigError, OscarConfig
from oscar_serving.rotation import LayerTransform

FILE_NAME = "oscar.safetensors"
FORMAT = "oscar-artifact"
FORMAT_VERSION = 2
_FIELDS = tuple(f.name for f in fields(LayerTransform))


class ArtifactError(ValueError):
    """An artifact cannot be read, or does not belong to the model; the message says why and what to do."""


@dataclass(frozen=True)
class Clip:
    """Clip factor and FP8 unit of one layer for one number of bits, float32 ``[heads]`` each."""

    shrink: Tensor
    unit: Tensor


@dataclass(frozen=True)
class Artifact:
    """Calibrated transforms of a model.

    Attributes
    ----------
    layers
        Layer index → transform, for the bits of ``config``.
    config
        Layout and windows that the calibration was made for.
    architecture
        What a model must look like to be served with it.
    metadata
        Free JSON: ``model`` (id, weights digest), ``calibration`` (preset, texts, tokens, choices, tool
        version, date, command), ``quality`` (summary of an evaluation).
    clips
        ``(layer, "k" | "v", bits)`` → clip for other numbers of bits than ``config``'s; see :meth:`for_bits`.
    """

    layers: dict[int, LayerTransform]
    config: OscarConfig
    architecture: Architecture
    metadata: dict[str, Any] = field(default_factory=dict)
    clips: dict[tuple[int, str, int], Clip] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | str) -> Artifact:
        """Read and validate an artifact folder or file.

        Raises
        ------
        ArtifactError
            No such file, truncated, unknown format version, missing or odd tensors, values that are not
            finite, rotations that are not orthogonal.
        """
        file = _file(path)
        try:
            with safe_open(file, framework="pt") as reader:
                header = _header(file, reader.metadata())
                tensors = {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ArtifactError(f"{file}: cannot be read ({error}): truncated or not a safetensors file") from error
        try:
            artifact = cls._parse(header, tensors)
            artifact.validate()
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{file}: damaged: {error}; calibrate again") from error
        return artifact

    @classmethod
    def plain(
        cls,
        hf_config: Any,
        rotation: Literal["hadamard", "none"] = "hadamard",
        *,
        config: OscarConfig | None = None,
    ) -> Artifact:
        """Uncalibrated artifact of a model: a Hadamard matrix or the identity in every layer, no clip."""
        if rotation not in ("hadamard", "none"):
            raise ArtifactError(f"rotation={rotation!r}: allowed is 'hadamard', 'none'")
        architecture = Architecture.of(hf_config)
        transform = LayerTransform.plain(architecture.kv_heads, architecture.head_dim, rotate=rotation == "hadamard")
        return cls(
            layers=dict.fromkeys(architecture.cached_layers(), transform),
            config=(config or OscarConfig()).with_(rotation=rotation),
            architecture=architecture,
            metadata={"calibration": {"preset": f"plain {rotation}"}},
        )

    def save(self, folder: Path | str) -> Path:
        """Write ``folder/oscar.safetensors`` (atomically) and return its path."""
        self.validate()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"layers.{i}.{n}": getattr(t, n) for i, t in self.layers.items() for n in _FIELDS}
        for (layer, which, bits), clip in self.clips.items():
            tensors[f"clips.{layer}.{which}{bits}.shrink"] = clip.shrink
            tensors[f"clips.{layer}.{which}{bits}.unit"] = clip.unit
        header = {
            "format_version": FORMAT_VERSION,
            "architecture": self.architecture.to_dict(),
            "config": asdict(self.config),
            "metadata": self.metadata,
        }
        target = folder / FILE_NAME
        scratch = folder / f".{FILE_NAME}.{os.getpid()}"
        content = {name: value.detach().cpu().clone().contiguous() for name, value in tensors.items()}
        try:
            save_file(content, scratch, metadata={FORMAT: json.dumps(header, sort_keys=True)})
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
        return target

    @cached_property
    def fingerprint(self) -> str:
        """Digest of transforms, clips and configuration: caches written under another one cannot be read."""
        digest = hashlib.sha256(json.dumps(asdict(self.config), sort_keys=True).encode())
        for index in sorted(self.layers):
            for name in _FIELDS:
                value = getattr(self.layers[index], name)
                digest.update(f"{index}.{name}{tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @property
    def model_id(self) -> str:
        """Name of the model that it was made for; empty for a plain one."""
        return str(self.metadata.get("model", {}).get("id", ""))

    @property
    def quantile_clip(self) -> tuple[float, float] | None:
        """Quantiles (K, V) at which preset ``paper`` clips each row online: to be evaluated, not served."""
        value = self.metadata.get("calibration", {}).get("quantile_clip")
        return (float(value[0]), float(value[1])) if value else None

    def validate(self) -> None:
        """Raise ``ValueError`` naming layer and field unless everything is consistent."""
        wanted = self.architecture.cached_layers()
        if sorted(self.layers) != wanted:
            raise ValueError(f"has the layers {sorted(self.layers)}, its architecture says {wanted}")
        for index, transform in self.layers.items():
            transform.validate(f"layers.{index}")
            heads = self.architecture.kv_heads
            if transform.heads != heads:
                raise ValueError(f"layers.{index}: {transform.heads} heads, its architecture says {heads}")
            self.config.groups(transform.head_dim)
        for (layer, which, bits), clip in self.clips.items():
            transform = replace(self.layers[layer], **{f"{which}_shrink": clip.shrink, f"{which}_unit": clip.unit})
            transform.validate(f"clips.{layer}.{which}{bits}")

    def check_model(self, hf_config: Any, *, serving: bool = True) -> None:
        """Raise :class:`ArtifactError`, both values side by side, unless it was made for this model.

        ``serving``: also refuse the artifacts of preset ``paper``, which can only be evaluated.
        """
        if serving and self.quantile_clip is not None:
            raise ArtifactError(
                "the artifact clips each row online at quantiles (preset `paper`), which is evaluated but not served: "
                "calibrate with preset `default`"
            )
        wrong = self.architecture.differences(Architecture.of(hf_config))
        if wrong:
            detail = "; ".join(f"{name}: artifact {mine}, model {theirs}" for name, mine, theirs in wrong)
            made_for = f" (made for {self.model_id})" if self.model_id else ""
            raise ArtifactError(
                f"the artifact{made_for} does not fit this model: {detail}; "
                "use the artifact of this model or calibrate one"
            )

    def for_bits(self, k_bits: int, v_bits: int) -> Artifact:
        """The same rotations with the clips of other numbers of bits (``oscar_k4v2``: 4 and 2).

        Raises
        ------
        ArtifactError
            The calibration did not choose clips for them.
        """
        if (k_bits, v_bits) == (self.config.k_bits, self.config.v_bits):
            return self
        layers = dict(self.layers)
        clips = dict(self.clips)
        for which, old, new in (("k", self.config.k_bits, k_bits), ("v", self.config.v_bits, v_bits)):
            if old == new:
                continue
            for index, transform in layers.items():
                clip = self._clip(index, which, new, transform)
                shrink, unit = f"{which}_shrink", f"{which}_unit"
                clips[index, which, old] = Clip(getattr(transform, shrink), getattr(transform, unit))
                layers[index] = replace(transform, **{shrink: clip.shrink, unit: clip.unit})
        return replace(self, layers=layers, clips=clips, config=self.config.with_(k_bits=k_bits, v_bits=v_bits))

    def _clip(self, layer: int, which: str, bits: int, transform: LayerTransform) -> Clip:
        if self.config.rotation != "artifact":
            return Clip(getattr(transform, f"{which}_shrink"), getattr(transform, f"{which}_unit"))
        try:
            return self.clips[layer, which, bits]
        except KeyError:
            raise ArtifactError(
                f"the artifact has no clip for {bits}-bit {which.upper()}: calibrate again with this version"
            ) from None

    @classmethod
    def _parse(cls, header: Mapping[str, Any], tensors: dict[str, Tensor]) -> Artifact:
        architecture = Architecture.from_dict(header["architecture"])
        layers = {
            index: LayerTransform(**{name: tensors.pop(f"layers.{index}.{name}") for name in _FIELDS})
            for index in architecture.cached_layers()
        }
        clips: dict[tuple[int, str, int], Clip] = {}
        for name in sorted(n for n in tensors if n.startswith("clips.") and n.endswith(".shrink")):
            _, layer, which, _ = name.split(".")
            unit = tensors.pop(name.removesuffix("shrink") + "unit")
            clips[int(layer), which[0], int(which[1:])] = Clip(tensors.pop(name), unit)
        if tensors:
            raise ValueError(f"unknown tensors {', '.join(sorted(tensors)[:3])}")
        config = OscarConfig.from_dict(header["config"])
        metadata = dict(header["metadata"])
        for name in ("model", "calibration", "quality"):
            if not isinstance(metadata.get(name, {}), dict):
                raise ValueError(f"metadata.{name} is not an object")
        return cls(layers, config, architecture, metadata, clips)


def read_header(path: Path | str) -> dict[str, Any]:
    """The JSON header of an artifact (``architecture``, ``config``, ``metadata``) without its tensors."""
    file = _file(path)
    try:
        with safe_open(file, framework="pt") as reader:
            return _header(file, reader.metadata())
    except (SafetensorError, OSError) as error:
        raise ArtifactError(f"{file}: cannot be read ({error}): truncated or not a safetensors file") from error


def _file(path: Path | str) -> Path:
    path = Path(path).expanduser()
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ArtifactError(f"{file}: no such artifact; `oscar calibrate MODEL --out {path}` makes one")
    return file


def _header(file: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if not metadata or FORMAT not in metadata:
        raise ArtifactError(f"{file}: a safetensors file, but not an OSCAR artifact")
    try:
        header = json.loads(metadata[FORMAT])
        version = header["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{file}: damaged header: {error!r}") from error
    if version != FORMAT_VERSION:
        raise ArtifactError(
            f"{file}: format version {version!r}, this release reads {FORMAT_VERSION}; calibrate again or upgrade"
        )
    return dict(header)

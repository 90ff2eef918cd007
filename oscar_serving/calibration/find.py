"""Finding the artifact of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from oscar_serving.calibration.architecture import weights_digest
from oscar_serving.calibration.artifact import FILE_NAME, ArtifactError, read_header

#: Folders of artifacts (or one artifact), separated like ``$PATH``; searched before the shipped ones.
SEARCH_VARIABLE = "OSCAR_ARTIFACTS"


def find_artifact(model: Path | str, choice: Path | str = "auto") -> Path:
    """Folder of the artifact to use with a model.

    Parameters
    ----------
    model
        Folder of the model.
    choice
        A path, taken as it is; or ``auto``: the artifact made for a model of that name (the folder's, or
        ``_name_or_path`` of its configuration) or with those weights, in the model's own folder,
        ``$OSCAR_ARTIFACTS``, or the shipped ones.

    Raises
    ------
    ArtifactError
        There is none.
    """
    if str(choice) != "auto":
        path = Path(choice).expanduser()
        if not path.exists():
            raise ArtifactError(f"{path}: no such artifact")
        return path
    model = Path(model).expanduser()
    names = _names(model)
    digest = weights_digest(model)
    places = list(known_artifacts(model))
    for folder in places:
        made_for = read_header(folder)["metadata"].get("model", {})
        same_weights = digest is not None and made_for.get("weights_digest") == digest
        if same_weights or str(made_for.get("id", "")).lower() in names:
            return folder
    raise ArtifactError(
        f"no calibration artifact for {model.name} among {len(places)} known ones: "
        f"run `oscar calibrate {model} --out DIR` and pass its folder, or set "
        f"${SEARCH_VARIABLE}; `hadamard` serves uncalibrated, with lower quality"
    )


def shipped_artifacts() -> Path:
    """Folder of the artifacts that come with the package."""
    return Path(next(iter(import_module("oscar_artifacts").__path__)))


def _names(model: Path) -> set[str]:
    names = {model.name.lower()}
    try:
        configured = str(json.loads((model / "config.json").read_text()).get("_name_or_path", ""))
    except (OSError, ValueError):
        configured = ""
    names.add(configured.rsplit("/", 1)[-1].lower())
    return names - {""}


def known_artifacts(model: Path | None = None) -> Iterator[Path]:
    """Folders that ``auto`` chooses from: the model's own, ``$OSCAR_ARTIFACTS``' and the shipped ones."""
    listed = [Path(p).expanduser() for p in os.environ.get(SEARCH_VARIABLE, "").split(os.pathsep) if p]
    own = [model] if model else []
    for place in listed:
        if not place.is_dir():
            raise ArtifactError(f"${SEARCH_VARIABLE}: {place} is not a folder")
    for place in (*own, *listed, shipped_artifacts()):
        if (place / FILE_NAME).is_file():
            yield place
        yield from sorted(p.parent for p in place.glob(f"*/{FILE_NAME}"))

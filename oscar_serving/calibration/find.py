"""Finding the artifact of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

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
        A path; or ``auto``: the artifact made for those weights, else one that does not know its weights and was made
        for a model of that name (the folder's, or ``_name_or_path`` of its configuration), in the model's own folder,
        ``$OSCAR_ARTIFACTS``, or the shipped ones.

    Raises
    ------
    ArtifactError
        There is none, or the path's was made for other weights.
    """
    model = Path(model).expanduser()
    digest = weights_digest(model)
    if str(choice) != "auto":
        path = Path(choice).expanduser()
        if not path.exists():
            raise ArtifactError(f"{path}: no such artifact")
        made_for = _made_for(path)
        if digest and digest != (made_for.get("weights_digest") or digest):
            raise ArtifactError(
                f"{path}: made for other weights, those of {made_for.get('id', 'an unnamed model')} (digest "
                f"{made_for['weights_digest'][:8]}, {model.name} has {digest[:8]}): "
                f"run `oscar calibrate {model} --out DIR`"
            )
        return path
    names, by_name, unreadable, count = _names(model), None, [], 0
    for folder in known_artifacts(model):
        count += 1
        try:
            made_for = _made_for(folder)
        except ArtifactError as error:  # most likely another model's
            unreadable.append(str(error))
            continue
        made_from = made_for.get("weights_digest")
        if digest and made_from == digest:
            return folder
        if by_name is None and not (digest and made_from) and str(made_for.get("id", "")).lower() in names:
            by_name = folder
    if by_name:
        return by_name
    raise ArtifactError(
        f"no calibration artifact for {model.name} among {count} known ones"
        + "".join(f" ({problem})" for problem in unreadable)
        + f": run `oscar calibrate {model} --out DIR` and pass its folder, or set "
        f"${SEARCH_VARIABLE}; `hadamard` serves uncalibrated, with lower quality"
    )


def _made_for(folder: Path) -> dict[str, Any]:
    metadata = read_header(folder).get("metadata")
    made_for = metadata.get("model", {}) if isinstance(metadata, dict) else None
    if not isinstance(made_for, dict):
        raise ArtifactError(f"{folder}: damaged header: its metadata does not say what model it was made for")
    return made_for


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

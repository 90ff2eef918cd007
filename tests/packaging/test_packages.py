"""The wheel and the source archive: complete, and working where nothing else of the checkout is."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from oscar_serving import __version__

ROOT = Path(__file__).parents[2]
#: Folder in the checkout → package in the wheel.
PACKAGES = {
    "oscar_serving": "oscar_serving",
    "kernels/oscar_kernels": "oscar_kernels",
    "calibration_artifacts": "oscar_artifacts",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[zipfile.ZipFile, tarfile.TarFile]:
    """Wheel and source archive, from a copy of what git tracks so that leftovers of the checkout cannot help."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listing.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    # From the source archive, as a package index's users do; the build tools are the environment's own.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    [wheel], [archive] = out.glob("*.whl"), out.glob("*.tar.gz")
    return zipfile.ZipFile(wheel), tarfile.open(archive)


def tracked(folder: str) -> set[str]:
    """Files that git tracks below ``folder``."""
    listing = subprocess.run(["git", "ls-files", "-z", folder], cwd=ROOT, capture_output=True, check=True, text=True)
    return {name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()}


@pytest.mark.parametrize("folder", PACKAGES)
def test_wheel_has_every_file_of_the_packages(built: tuple[zipfile.ZipFile, tarfile.TarFile], folder: str) -> None:
    names = set(built[0].namelist())
    wanted = {PACKAGES[folder] + name.removeprefix(folder) for name in tracked(folder)}
    assert wanted
    assert not wanted - names


def test_wheel_has_nothing_else(built: tuple[zipfile.ZipFile, tarfile.TarFile]) -> None:
    tops = {name.partition("/")[0] for name in built[0].namelist()}
    assert tops == {*PACKAGES.values(), f"oscar_serving-{__version__}.dist-info"}


def test_type_information_is_shipped(built: tuple[zipfile.ZipFile, tarfile.TarFile]) -> None:
    assert {"oscar_serving/py.typed", "oscar_kernels/py.typed"} <= set(built[0].namelist())


def test_metadata(built: tuple[zipfile.ZipFile, tarfile.TarFile]) -> None:
    metadata = email.message_from_bytes(built[0].read(f"oscar_serving-{__version__}.dist-info/METADATA"))
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"embedded", "vllm", "sglang", "apple", "dev"} <= set(metadata.get_all("Provides-Extra", []))


def test_source_archive_has_what_the_tests_need(built: tuple[zipfile.ZipFile, tarfile.TarFile]) -> None:
    prefix = f"oscar_serving-{__version__}/"
    names = {name.removeprefix(prefix) for name in built[1].getnames()}
    wanted = set().union(*map(tracked, (*PACKAGES, "tests", "launch", "docs", "benchmarks")))
    wanted |= {"README.md", "CHANGELOG.md", "LICENSE", "constraints.txt", "pyproject.toml"}
    assert not wanted - names


def test_wheel_works_in_an_environment_of_its_own(
    built: tuple[zipfile.ZipFile, tarfile.TarFile], tmp_path: Path
) -> None:
    """Requirements come from this environment by a path file; the checkout and its editable install do not."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
    )
    wheel = built[0].filename
    assert wheel is not None
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, wheel], check=True)
    (site / "requirements.pth").write_text(sysconfig.get_path("purelib"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=clean, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    where = run(python, "-c", "import oscar_serving, oscar_kernels; print(oscar_serving.__file__)")
    assert Path(where).is_relative_to(site)
    assert run(tmp_path / "env" / "bin" / "oscar", "--version") == f"oscar-serving {__version__}"
    page = "from oscar_serving.server import dashboard; print(len(dashboard._SCRIPT))"
    assert int(run(python, "-c", page)) > 0

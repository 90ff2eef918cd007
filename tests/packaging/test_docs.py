"""Links and commands in the documentation lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_between_files(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_readme_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    for script in ("./launch/quickstart.sh", "./launch/test.sh"):
        assert script in text
        assert (ROOT / script).stat().st_mode & 0o111


def test_every_metric_is_documented() -> None:
    text = (ROOT / "docs" / "server.md").read_text()
    source = (ROOT / "oscar_serving" / "server" / "metrics.py").read_text()
    names = set(re.findall(r'"((?:vllm:|oscar_)[a-z_0-9]+)"', source)) - {"oscar_build"}
    for name in names:
        assert f"`{name}" in text, name


def test_the_site_builds_offline(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.glob("*.html"):
        fetched = re.findall(r'(?:src="|<link[^>]* href=")(https?:[^"]+)', page.read_text())
        assert not fetched, page
    assert {p.stem for p in (ROOT / "docs").glob("*.md")} <= {p.stem for p in tmp_path.glob("*.html")}

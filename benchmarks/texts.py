"""Evaluation texts from Debian packages: English prose of four domains, none of them calibrated on.

``python -m benchmarks.texts FOLDER`` fetches the packages with apt (Debian or Ubuntu) and writes one UTF-8 text each.
"""

from __future__ import annotations

import gzip
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

#: Package → files in it that are read, in this order: ``*.dz`` is a dictd dictionary, the rest HTML.
PACKAGES = {
    "anarchism": "usr/share/doc/anarchism/html/sec*.html",
    "debian-handbook": "usr/share/doc/debian-handbook/html/en-US/*.html",
    "dict-devil": "usr/share/dictd/devil.dict.dz",
    "dict-jargon": "usr/share/dictd/jargon.dict.dz",
}
_SILENT = {"script", "style", "head", "nav"}
_BREAKS = {"p", "div", "li", "tr", "h1", "h2", "h3", "h4", "pre", "dt", "dd", "br", "blockquote"}


class _Text(HTMLParser):
    """Collects the visible text of a page, a paragraph a line."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in _SILENT
        if tag in _BREAKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._silent -= tag in _SILENT
        if tag in _BREAKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._silent <= 0:
            self.parts.append(data)


def html_text(page: str) -> str:
    """Visible text of an HTML page; blank lines between paragraphs."""
    parser = _Text()
    parser.feed(page)
    lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if len(line) > 40) + "\n"


def package_text(package: str) -> tuple[str, str]:
    """Text of a package and the package's version."""
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", "-q", package], cwd=scratch, check=True, capture_output=True)
        deb = next(Path(scratch).glob("*.deb"))
        subprocess.run(["dpkg-deb", "-x", deb, Path(scratch, "x")], check=True, capture_output=True)
        version = subprocess.run(["dpkg-deb", "-f", deb, "Version"], check=True, capture_output=True, text=True).stdout
        return "\n".join(_pages(Path(scratch, "x"), PACKAGES[package])), version.strip()


def _pages(root: Path, pattern: str) -> Iterator[str]:
    for path in sorted(root.glob(pattern)):
        if path.suffix == ".dz":
            yield gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        else:
            yield html_text(path.read_text(encoding="utf-8", errors="replace"))


def main(folder: Path) -> None:
    """Write ``PACKAGE_VERSION.txt`` for each package."""
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        text, version = package_text(package)
        target = folder / f"{package}_{version.replace(':', '_')}.txt"
        target.write_text(text, encoding="utf-8")
        print(f"{target}: {len(text)} characters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m benchmarks.texts FOLDER")
    main(Path(sys.argv[1]))

"""Makes the plugin known to SGLang where oscar-serving is on ``PYTHONPATH`` and not installed.

    export PYTHONPATH=$(python -m oscar_serving.engines.sglang.entry_point DIR):$PYTHONPATH

writes ``DIR/oscar_serving-<version>.dist-info``, in which Python finds the entry point, and prints ``DIR``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from oscar_serving.version import __version__

ENTRY_POINTS = """[sglang.srt.plugins]
oscar = oscar_serving.engines.sglang.plugin:register
"""


def write(folder: Path) -> Path:
    """Write the metadata below ``folder`` and return it."""
    info = folder / f"oscar_serving-{__version__}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: oscar-serving\nVersion: {__version__}\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])).resolve())

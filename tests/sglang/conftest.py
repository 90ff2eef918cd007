"""These tests run where SGLang is installed: ``launch/test-sglang.sh``. Elsewhere they are not collected."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from oscar_serving.engines.sglang.entry_point import write

    root = Path(__file__).parents[2]
    #: SGLang starts processes of its own: they must find the stubs, the checkout and the entry point.
    paths = [str(Path(__file__).parent / "stubs"), str(root), str(root / "kernels")]
    if not any(p.name == "oscar" for p in importlib.metadata.entry_points(group="sglang.srt.plugins")):
        paths.append(str(write(Path(tempfile.mkdtemp(prefix="oscar-entry-point-")))))
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = paths
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.pop("SGLANG_USE_CPU_ENGINE", None)

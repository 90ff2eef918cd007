"""These tests run where vLLM is installed: ``launch/test-vllm.sh``. Elsewhere they are not collected."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    from oscar_serving.engines.vllm.plugin import register

    register()

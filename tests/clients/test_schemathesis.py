"""schemathesis: cases made from the OpenAPI document, valid and not; no 5xx, and every answer as the document says.

OSCAR_SCHEMATHESIS_EXAMPLES=250   so many cases an operation, and the phase that goes through every boundary value
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..server.test_process import process
from ..server.tiny import build_model
from .conftest import KEY

pytest.importorskip("schemathesis")

#: The contract does not depend on the weights. A short context, since many cases generate up to its end.
OPTIONS = [
    "--served-model-name", "tiny", "--api-key", KEY, "--port", "0", "--device", "cpu", "--threads", "1",
    "--artifact", "hadamard", "--kv-cache-memory", "8MiB", "--max-model-len", "96", "--max-num-seqs", "32",
    "--dtype", "float32", "--page-size", "16", "--sink", "16", "--recent", "32", "--log-level", "warning",
]  # fmt: skip
#: What a schema cannot say is a 400 all the same: the context's length, the vocabulary, fields that exclude each other.
EXCLUDED = "positive_data_acceptance"


def test_document(tmp_path: Path) -> None:
    examples = os.environ.get("OSCAR_SCHEMATHESIS_EXAMPLES")
    phases = "coverage,fuzzing,stateful" if examples else "fuzzing,stateful"
    report = tmp_path / "report.json"
    with process(str(build_model(tmp_path / "tiny")), *OPTIONS) as (server, url, _):
        command = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json"]
        command += ["--header", f"Authorization: Bearer {KEY}", "--checks", "all", "--exclude-checks", EXCLUDED]
        command += ["--phases", phases, "--max-examples", examples or "30", "--continue-on-failure", "--seed", "1"]
        command += [
            "--request-timeout",
            "600",
            "--max-response-time",
            "600",
            "--generation-database",
            "none",
            "--output-sanitize",
            "false",
        ]
        command += ["--report", "json", "--report-json-path", str(report)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
        assert server.poll() is None
    assert done.returncode == 0, done.stdout
    made = json.loads(report.read_text())
    print(f"schemathesis: {made['test_cases']}, seed {made['seed']}")
    assert made["operations"]["tested"] == made["operations"]["total"] >= 11
    assert made["test_cases"]["generated"] >= (2000 if examples else 200)
    assert made["failures"] == made["errors"] == []

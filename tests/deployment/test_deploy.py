"""The Kubernetes manifest and the systemd unit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from .tools import DOCKER, ROOT, run, tool

UNIT = ROOT / "deploy" / "systemd" / "oscar-serving.service"


def manifest() -> dict[str, Any]:
    """Objects of the manifest by kind."""
    text = (ROOT / "deploy" / "kubernetes" / "vllm.yaml").read_text()
    return {item["kind"]: item for item in yaml.safe_load_all(text)}


def test_objects_of_the_manifest_fit_together() -> None:
    objects = manifest()
    assert set(objects) == {"PersistentVolumeClaim", "Service", "Deployment"}
    template = objects["Deployment"]["spec"]["template"]
    labels = template["metadata"]["labels"]
    assert objects["Service"]["spec"]["selector"] == labels
    assert objects["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    [container] = template["spec"]["containers"]
    [port] = objects["Service"]["spec"]["ports"]
    assert port["targetPort"] in {open_port["name"] for open_port in container["ports"]}
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    claim = volumes["models"]["persistentVolumeClaim"]["claimName"]
    assert claim == objects["PersistentVolumeClaim"]["metadata"]["name"]


def test_pod_is_hardened_and_probed_by_a_decode() -> None:
    spec = manifest()["Deployment"]["spec"]["template"]["spec"]
    [container] = spec["containers"]
    security = container["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert str(spec["securityContext"]["runAsUser"]) in (DOCKER / "Dockerfile.vllm").read_text()
    assert security["readOnlyRootFilesystem"] is True
    assert security["allowPrivilegeEscalation"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert spec["terminationGracePeriodSeconds"] > 60
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["exec"]["command"][-1] == "/opt/oscar/healthcheck.py"
        assert container[probe]["timeoutSeconds"] > 20  # the check's own limit is said before the probe's


def test_unit_under_systemd_analyze(tmp_path: Path) -> None:
    (tmp_path / UNIT.name).write_text(UNIT.read_text())
    done = run(tool("systemd-analyze"), "verify", "--man=no", tmp_path / UNIT.name)
    complaints = [line for line in done.stderr.splitlines() if UNIT.name in line]
    assert not complaints


def test_unit_names_options_of_the_command_line() -> None:
    pytest.importorskip("typer")
    [start] = re.findall(r"^ExecStart=(.*)$", UNIT.read_text(), flags=re.MULTILINE)
    text = (ROOT / "docs" / "cli.md").read_text()
    for option in re.findall(r"--[a-z-]+", start):
        assert f"`{option}`" in text
    assert "--host" not in start  # 127.0.0.1, unless $OSCAR_OPTIONS says otherwise

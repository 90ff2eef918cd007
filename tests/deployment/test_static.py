"""Shell scripts and image files under their linters, the compose file for each profile."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from .tools import DOCKER, ROOT, run, tool

SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *DOCKER.glob("*.sh"), ROOT / ".ci" / "run"])
IMAGES = sorted(DOCKER.glob("Dockerfile.*"))
SERVERS = ("vllm", "sglang", "embedded")
PROFILES = (*SERVERS, "monitoring")


def test_scripts_under_shellcheck() -> None:
    done = run(tool("shellcheck"), "--external-sources", *SCRIPTS, cwd=ROOT)
    assert done.returncode == 0, done.stdout


def test_images_under_hadolint() -> None:
    assert IMAGES
    done = run(tool("hadolint"), *IMAGES)
    assert done.returncode == 0, done.stdout


def compose(*profiles: str, **variables: str) -> dict[str, Any]:
    """The services as Compose understands the file, with these variables alone."""
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **variables}
    done = run(
        tool("docker-compose"), "--file", DOCKER / "docker-compose.yml", *chosen, "config", "--format=json", env=clean
    )
    assert done.returncode == 0, done.stderr
    services: dict[str, Any] = json.loads(done.stdout)["services"]
    return services


@pytest.mark.parametrize("profile", PROFILES)
def test_compose_file_is_valid_for_each_profile(profile: str) -> None:
    services = compose(profile)
    assert set(services) == ({"prometheus", "grafana"} if profile == "monitoring" else {profile})


def test_every_container_is_hardened() -> None:
    for name, service in compose(*PROFILES).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service["user"].startswith(("0", "root")), name
        for port in service["ports"]:
            assert port["host_ip"] == "127.0.0.1", name
        secrets = {secret["source"] for secret in service["secrets"]}
        values = " ".join(map(str, service.get("environment", {}).values()))
        assert secrets <= {"api-key", "grafana-password"}, name
        assert all(f"/run/secrets/{secret}" in values for secret in secrets) or name == "prometheus", name


@pytest.mark.parametrize("name", SERVERS)
def test_servers_answer_only_for_a_decode_and_get_their_time_to_end(name: str) -> None:
    service = compose(name)[name]
    assert service["healthcheck"]["test"] == ["CMD", "python3", "/opt/oscar/healthcheck.py"]
    assert service["stop_grace_period"] == "1m15s"  # more than the minute that requests get to finish
    readable = {volume["target"]: volume.get("read_only", False) for volume in service["volumes"]}
    assert readable == {"/models": True, "/artifacts": True, "/cache": False}
    devices = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    assert bool(devices) == (name != "embedded")


def test_options_reach_the_server() -> None:
    service = compose("vllm", OSCAR_MODEL="/models/m", OSCAR_OPTIONS="--tensor-parallel-size 2", OSCAR_GPUS="2")["vllm"]
    assert service["command"] == ["/models/m", "--tensor-parallel-size", "2"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["count"] == 2


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.suffix)
def test_images_hold_no_secret_and_no_root(image: Path) -> None:
    lines = image.read_text().splitlines()
    assert [line for line in lines if line.startswith("USER")][-1] == "USER 10001:10001"
    assert not [line for line in lines if "API_KEY" in line.upper() or "TOKEN=" in line.upper()]


def test_what_images_copy_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for image in IMAGES:
        for line in image.read_text().splitlines():
            if line.startswith("COPY --chmod"):
                assert set(line.split()[2:-1]) <= sent
    for name in sent:
        assert (ROOT / name).exists(), name

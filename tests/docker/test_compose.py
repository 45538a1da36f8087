"""docker/compose.yaml and what it mounts: the files are there, and they name each other rightly."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = COMPOSE["services"]


def read(path: str) -> Any:
    return yaml.safe_load((DOCKER / path).read_text(encoding="utf-8"))


def mounts(service: str) -> dict[str, str]:
    """Target -> source, of a service's volumes."""
    found = {}
    for volume in SERVICES[service]["volumes"]:
        source, target = re.fullmatch(r"(\$\{[^}]*\}|[^:]*):([^:]*)(?::ro)?", volume).groups()
        found[target] = source
    return found


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_has_one_server_and_what_watches_it(profile: str) -> None:
    names = {name for name, service in SERVICES.items() if profile in service["profiles"]}
    assert names == {f"server-{profile}", "prometheus", "grafana"}


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_docker_compose_takes_it(profile: str) -> None:
    """Debian 13: `apt install docker-compose`."""
    command = shutil.which("docker-compose")
    if command is None or " 1." in subprocess.run([command, "version"], capture_output=True, text=True).stdout:
        pytest.skip("docker-compose 2 is not installed")
    done = subprocess.run(
        [command, "--file", str(DOCKER / "compose.yaml"), "--profile", profile, "config"],
        capture_output=True,
        text=True,
        env={"PAGEDSERVE_API_KEY": "a-key"},
    )
    assert done.returncode == 0, done.stderr
    assert "a-key" in done.stdout


def test_nothing_is_reached_from_outside_unless_that_is_asked_for() -> None:
    for service in SERVICES.values():
        assert all(port.startswith("${BIND:-127.0.0.1}:") for port in service.get("ports", []))


def test_images_are_built_from_files_that_are_here() -> None:
    for name in ("server-cpu", "server-gpu"):
        build = SERVICES[name]["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).is_file()


def test_configuration_that_is_mounted_is_here() -> None:
    sources = [source for name in SERVICES for source in mounts(name).values() if source.startswith("./")]
    assert len(sources) == 3
    assert all((DOCKER / source).is_dir() for source in sources)


def test_named_volumes_are_declared() -> None:
    sources = {s for name in SERVICES for s in mounts(name).values() if not s.startswith((".", "$"))}
    assert sources == set(COMPOSE["volumes"])


def test_the_cache_lies_where_the_images_keep_it() -> None:
    for dockerfile in ("Dockerfile", "Dockerfile.cpu"):
        text = (DOCKER / dockerfile).read_text(encoding="utf-8")
        (volume,) = re.findall(r"^VOLUME (\S+)$", text, re.MULTILINE)
        assert mounts("server-cpu")[volume] == mounts("server-gpu")[volume] == "cache"


def test_prometheus_asks_the_server_and_sends_the_key() -> None:
    (job,) = read("prometheus/prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    for name in ("server-cpu", "server-gpu"):
        assert host in SERVICES[name]["networks"]["default"]["aliases"]
        assert SERVICES[name]["ports"][0].endswith(f":{port}")
    (config,) = SERVICES["prometheus"]["configs"]
    assert job["authorization"]["credentials_file"] == config["target"]
    assert "PAGEDSERVE_API_KEY" in COMPOSE["configs"][config["source"]]["content"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    dashboard = json.loads((DOCKER / "grafana/dashboards/pagedserve.json").read_text(encoding="utf-8"))
    (variable,) = [v for v in dashboard["templating"]["list"] if v["name"] == "datasource"]
    assert variable["current"]["value"] == source["uid"]
    (provider,) = read("grafana/provisioning/dashboards/pagedserve.yaml")["providers"]
    folder = provider["options"]["path"]
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(folder)
    assert (DOCKER / mounts("grafana")[folder] / Path(home).name).is_file()

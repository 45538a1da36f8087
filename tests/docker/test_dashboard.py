"""The Grafana dashboard: it asks for series that a server really exposes, and its panels do not cover each other."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.docker import dashboard
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.server import ServerProcess, free_port, server_process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("served")
    with server_process(tiny_llama(folder / "model"), "--api-key", "k", log=folder / "log") as process:
        yield process


def complete(server: ServerProcess) -> None:
    body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{server.base_url}/v1/completions", json=body, headers={"x-api-key": "k"}, timeout=60)
    assert answer.status_code == 200, answer.text


def test_every_series_is_exposed(server: ServerProcess) -> None:
    complete(server)
    page = httpx.get(f"{server.base_url}/metrics", headers={"x-api-key": "k"}).text
    exposed = {line.split("{")[0] for line in page.splitlines() if not line.startswith("#")}
    asked = {name for _, query in dashboard.queries() for name in dashboard.metric_names(query)}
    assert len(asked) > 20
    assert asked <= exposed


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard.panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = itertools.chain.from_iterable(
        itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
        for at in (panel["gridPos"] for panel in panels)
    )
    taken = list(cells)
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < 24


@pytest.mark.slow
def test_prometheus_answers_every_query(server: ServerProcess, tmp_path: Path) -> None:
    """Prometheus with our configuration reads a server that wants a key. Debian: `apt install prometheus`."""
    command = shutil.which("prometheus")
    if command is None:
        pytest.skip("prometheus is not installed")
    config = yaml.safe_load((dashboard.DOCKER / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"]["scrape_interval"] = "1s"
    (job,) = config["scrape_configs"]
    job["authorization"]["credentials_file"] = str(tmp_path / "key")
    job["static_configs"][0]["targets"] = [f"127.0.0.1:{server.port}"]
    (tmp_path / "key").write_text("k")
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    flags = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    process = subprocess.Popen(
        [command, *flags, f"--web.listen-address={address}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        without_data = set(dashboard.queries())
        deadline = time.monotonic() + 60
        while without_data and time.monotonic() < deadline:
            complete(server)
            time.sleep(1)
            without_data = {pair for pair in without_data if not _has_data(address, pair[1])}
        # Nothing was refused and nothing preempted or found in the cache: these have series, of zeros.
        assert not without_data
    finally:
        process.terminate()
        process.wait(30)


def _has_data(address: str, query: str) -> bool:
    """Whether a query gives at least one series; AssertionError where Prometheus does not understand it."""
    promql = query.replace("$__rate_interval", "10s").replace('model_name="$model_name"', 'model_name=~".+"')
    try:
        answer = httpx.get(f"http://{address}/api/v1/query", params={"query": promql}).json()
    except httpx.TransportError:
        return False  # it still starts
    assert answer["status"] == "success", (query, answer)
    return bool(answer["data"]["result"])

"""The images as users build and run them: the Dockerfile's own steps, a server, its health check, a request."""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from pagedserve import envs
from tests.docker.images import Images
from tests.helpers.demo_model import NAME, demo_model
from tests.helpers.server import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

USER = 1000


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Images]:
    folder = tmp_path_factory.mktemp("images")
    images = Images(folder)
    images.make_base()
    yield images
    shutil.rmtree(folder)


def test_the_cpu_image_serves(images: Images, tmp_path: Path) -> None:
    tag = "localhost/pagedserve:cpu"
    images.build("Dockerfile.cpu", tag)
    print(f"the CPU image: {images.num_bytes(tag) / 1e6:.0f} MB unpacked")
    config = images.config(tag)
    assert config["User"] == f"{USER}:{USER}"

    cache = tmp_path / "cache"  # what a volume of /home/pagedserve/.cache would hold after a first run
    (cache / "pagedserve").mkdir(parents=True)
    demo_model()
    shutil.copytree(envs.cache_dir() / "models", cache / "pagedserve" / "models")
    _give(cache, USER)
    mounts = (f"{cache}:/home/pagedserve/.cache",)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with images.container(tag) as container:
        command = images.command(container, *config["Entrypoint"], "--port", str(port), mounts=mounts)
        with (tmp_path / "log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_until_ready(url, server, tmp_path / "log")
            body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
            answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "model": NAME}, timeout=60).json()
            assert "Paris" in answer["choices"][0]["message"]["content"]

            kind, *check = config["Healthcheck"]["Test"]
            assert kind == "CMD"
            (setting,) = [value for value in config["Env"] if value.startswith("HEALTH_URL=")]
            assert setting == "HEALTH_URL=http://127.0.0.1:8000/health"
            healthy = images.command(container, "env", f"HEALTH_URL={url}/health", *check)
            assert subprocess.run(healthy).returncode == 0
            nobody = images.command(container, "env", f"HEALTH_URL=http://127.0.0.1:{free_port()}/health", *check)
            assert subprocess.run(nobody, stderr=subprocess.DEVNULL).returncode != 0

            packed = list((cache / "pagedserve" / "packed").iterdir())
            assert packed, "what the server keeps lies in the volume"
            assert {path.stat().st_uid for path in packed} == {USER}
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def _give(folder: Path, user: int) -> None:
    for path in (folder, *folder.rglob("*")):
        shutil.chown(path, user, user)


def _wait_until_ready(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError("not ready: " + log.read_text())

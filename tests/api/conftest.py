"""Servers that tests of the API share: one with a fake engine for each module, real ones for the session."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from pagedserve.api.app import build_app
from pagedserve.api.state import ApiState
from pagedserve.config import ServerConfig
from pagedserve.metrics import EngineMetrics
from tests.api.fake_engine import FakeEngine
from tests.api.scripts import SCRIPT
from tests.helpers.checkpoints import scripted_llama, tiny_llama
from tests.helpers.server import ServerProcess, app_server, server_process


@dataclass
class Front:
    """A live server over a FakeEngine."""

    client: httpx.Client
    engine: FakeEngine
    state: ApiState

    @property
    def base_url(self) -> str:
        return str(self.client.base_url)

    def complete(self, **body: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "hi", **body})

    def chat(self, **body: object) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], **body})

    def stop_batches(self) -> None:
        """Close the data folder as the end of a server does; the next request opens it again."""
        runner = self.state.batches._runner
        if runner is not None:
            asyncio.run_coroutine_threadsafe(self.state.batches.stop(), runner.get_loop()).result(10)


class FrontFactory:
    """Makes fronts with other settings; they end with the module."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._running: list[Iterator[Front]] = []

    def __call__(
        self,
        *,
        names: tuple[str, ...] = ("fake",),
        priorities: bool = False,
        template: str | None = None,
        **settings: object,
    ) -> Front:
        iterator = self._serve(names, priorities, template, settings)
        self._running.append(iterator)
        return next(iterator)

    def close(self) -> None:
        for iterator in self._running:
            next(iterator, None)

    def _serve(
        self, names: tuple[str, ...], priorities: bool, template: str | None, settings: dict[str, object]
    ) -> Iterator[Front]:
        engine = FakeEngine(self._folder, template=template)
        config = ServerConfig(**settings)  # type: ignore[arg-type]
        state = ApiState(config, names, EngineMetrics(names[0]), engine=engine, priorities_count=priorities)  # type: ignore[arg-type]
        with app_server(build_app(state)) as base_url, httpx.Client(base_url=base_url, timeout=30) as client:
            front = Front(client, engine, state)
            yield front
            front.stop_batches()


@pytest.fixture(scope="module")
def make_front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontFactory]:
    factory = FrontFactory(tmp_path_factory.mktemp("tokenizer"))
    yield factory
    factory.close()


@pytest.fixture(scope="module")
def front(make_front: FrontFactory) -> Front:
    return make_front()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server of a random model whose answers depend on all of the prompt."""
    flags = ("--max-num-seqs", "64", "--num-device-blocks", "800", "--num-threads", "1", "--served-model-name", "tiny")
    flags += ("--kv-cache-dtype", "float32")  # its numbers are compared with transformers' in fp32
    with server_process(tiny_model, *flags, log=tmp_path_factory.mktemp("log") / "tiny.log") as server:
        yield server


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server of a model that recites `scripts.SCRIPT`."""
    folder = scripted_llama(tmp_path_factory.mktemp("scripted"), SCRIPT)
    flags = ("--num-device-blocks", "800", "--num-threads", "1", "--served-model-name", "scripted")
    with server_process(folder, *flags, log=tmp_path_factory.mktemp("log") / "scripted.log") as server:
        yield server

"""What happens while torch is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pagedserve import packed_file, quantization
from pagedserve.config import ModelConfig
from pagedserve.errors import ModelNotFoundError
from pagedserve.kernels import native
from pagedserve.models.loader import load_model, parse_config
from pagedserve.quantization import packed_cache
from pagedserve.worker import ahead
from tests.helpers.checkpoints import tiny_llama
from tests.helpers.paged_model import CPU, PagedModel

needs_native = pytest.mark.skipif(not native.available(), reason="the native library is not built here")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelConfig:
    monkeypatch.setattr(packed_cache, "MIN_BYTES", 0)
    monkeypatch.setenv("PAGEDSERVE_CACHE_DIR", str(tmp_path / "cache"))
    return ModelConfig(model=str(tiny_llama(tmp_path / "model", tokenizer=False)))


def load(config: ModelConfig) -> object:
    attention = PagedModel(Path(config.model)).backend  # loads a model of its own
    files = ahead.begin(config)
    return load_model(
        files,
        parse_config(files),
        attention=attention,
        quant=quantization.select(config.weights_dtype, CPU),
        dtype=torch.float32,
        device=CPU,
        use_packed_cache=True,
    )


@needs_native
@pytest.mark.parametrize("weights_dtype", ["auto", "int8"])
def test_the_weights_that_are_read_ahead_are_those_that_loading_asks_for(
    model: ModelConfig, weights_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(model, weights_dtype=weights_dtype)
    first = load(model)  # nothing is there yet
    opened: list[Path] = []
    open_file = packed_file._open
    monkeypatch.setattr(packed_file, "_open", lambda path: opened.append(path) or open_file(path))
    second = load(model)
    assert len(opened) == 1, "loading opened a file of its own"
    hidden = torch.randn(3, 64)
    assert torch.equal(second.compute_logits(hidden), first.compute_logits(hidden))


@needs_native
def test_nothing_is_read_where_it_cannot_be_of_use(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model)
    monkeypatch.setattr(packed_file, "begin", pytest.fail)
    ahead.begin(replace(model, device="cuda"))
    ahead.begin(replace(model, load_format="dummy"))
    monkeypatch.setenv("PAGEDSERVE_PACKED_CACHE", "0")
    assert ahead.begin(model).path == Path(model.model)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        ahead.begin(ModelConfig(model=str(tmp_path / "nowhere")))


def test_it_needs_no_torch() -> None:
    code = "import sys, pagedserve.worker.ahead; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "torch" not in modules

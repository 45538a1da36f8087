from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.checkpoints import tiny_llama


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 320 ids and 512 positions with a byte-level tokenizer."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")

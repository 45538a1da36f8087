"""Each native architecture's step is one native call with the bits of its ops."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedserve.kernels import native
from tests.helpers.hf_checkpoints import write_random
from tests.models.test_architectures import CASES
from tests.worker.test_step_program import compared_driver, mixed_steps

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built here")


def write(folder: Path, name: str) -> Path:
    case = CASES[name]
    write_random(folder, case.model_type, seed=0, tokenizer=False, **{**case.sizes, **case.changes})
    return folder


@pytest.mark.parametrize("name", CASES)
def test_captured(tmp_path: Path, name: str) -> None:
    driver, graph = compared_driver(write(tmp_path, name))
    mixed_steps(driver)
    assert len(graph.shapes) == 4

"""Each native architecture's step is one native call with the bits of its ops; experts, routed by torch, are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedserve.kernels import native
from tests.helpers.hf_checkpoints import write_random
from tests.models.test_architectures import CASES
from tests.worker.driver import Driver
from tests.worker.test_step_program import compared_driver, mixed_steps

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built here")

WITH_EXPERTS = [name for name, case in CASES.items() if case.model_type in ("mixtral", "qwen3_moe")]


def write(folder: Path, name: str) -> Path:
    case = CASES[name]
    write_random(folder, case.model_type, seed=0, tokenizer=False, **{**case.sizes, **case.changes})
    return folder


@pytest.mark.parametrize("name", [name for name in CASES if name not in WITH_EXPERTS])
def test_captured(tmp_path: Path, name: str) -> None:
    driver, graph = compared_driver(write(tmp_path, name))
    mixed_steps(driver)
    assert len(graph.shapes) == 4


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_run_op_by_op(tmp_path: Path, name: str) -> None:
    driver = Driver(write(tmp_path, name), native=True)
    mixed_steps(driver)
    assert driver.runner.graph.op_names == []

"""The cuda backend: when it is chosen, and its steps, with csrc/cuda emulated and Triton interpreted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from pagedserve.attention import BACKENDS, AttentionSpec, select
from pagedserve.errors import ConfigError
from tests.helpers import cuda_emulation
from tests.helpers.emulated_cuda import emulated_cuda
from tests.kernels.interpreter import interpreted, small_cases

MODULE = "tests.kernels.cases.cuda_backend"
SPEC = AttentionSpec(
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    dtype=torch.float16,
    kv_cache_dtype=torch.float16,
    device=torch.device("cpu"),
    scale=0.125,
)


@pytest.fixture(scope="module")
def failures(request: pytest.FixtureRequest) -> dict[str, str]:
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = [item.callspec.params["name"] for item in items if "name" in item.callspec.params]
    return interpreted(MODULE, names, PAGEDSERVE_CUDA_LIBRARY=str(cuda_emulation.build()))


@pytest.mark.parametrize("name", small_cases(MODULE))
def test_steps_of_every_kind_share_a_pool(name: str, failures: dict[str, str]) -> None:
    assert not failures[name], failures[name]


def test_it_is_preferred_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    order = list(BACKENDS)
    assert order.index("cuda") < order.index("triton") < order.index("reference")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with emulated_cuda():
        assert select(SPEC).name == "cuda"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("meta")}, "runs on NVIDIA GPUs, not on meta"),
        ({"num_heads": 5}, "these cannot run: 5 query heads cannot share 2 KV heads"),
        ({"kv_cache_dtype": torch.bfloat16}, "no kernel reads a KV cache of torch.bfloat16 for activations of torch.f"),
        ({"dtype": torch.float32, "kv_cache_dtype": torch.int8}, "no kernel reads a KV cache of torch.int8"),
        ({"head_dim": 72}, "head_dim must be one of 64, 80, 96, 128, 256, it is 72"),
        ({"block_size": 4}, "block_size must be one of 8, 16, 32, 64, 128, it is 4"),
    ],
)
def test_it_tells_why_not(monkeypatch: pytest.MonkeyPatch, changes: dict, reason: str) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with emulated_cuda(), pytest.raises(ConfigError) as error:
        select(dataclasses.replace(SPEC, **changes), forced="cuda")
    assert reason in str(error.value)


def test_a_cpu_server_does_not_look_for_the_library() -> None:
    assert BACKENDS.resolve("cuda").why_not(SPEC) == "it runs on NVIDIA GPUs, not on cpu"

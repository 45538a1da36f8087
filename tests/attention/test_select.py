from __future__ import annotations

import dataclasses

import pytest
import torch

from pagedserve.attention import BACKENDS, AttentionBackend, AttentionSpec, select
from pagedserve.errors import ConfigError
from pagedserve.kernels import native

SPEC = AttentionSpec(
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    block_size=16,
    dtype=torch.float32,
    kv_cache_dtype=torch.bfloat16,
    device=torch.device("cpu"),
    scale=0.25,
)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_entry_is_a_backend_of_that_name(name: str) -> None:
    backend = BACKENDS.resolve(name)
    assert issubclass(backend, AttentionBackend)
    assert backend.name == name


@pytest.mark.skipif(not native.available(), reason="the native library is not built here")
def test_the_first_that_can_is_taken() -> None:
    assert select(SPEC).name == "cpu"
    assert select(SPEC, forced="reference").name == "reference"


@pytest.mark.skipif(not native.available(), reason="the native library is not built here")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.bfloat16}, "fp32"),
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "KV cache"),
        ({"device": torch.device("cuda")}, "runs on the CPU, not on cuda"),
        ({"head_dim": 20}, "head_dim must be a multiple of 8, it is 20"),
        ({"block_size": 24}, "block_size must be one of"),
    ],
)
def test_forcing_one_that_cannot_tells_why(changes: dict, reason: str) -> None:
    spec = dataclasses.replace(SPEC, **changes)
    with pytest.raises(ConfigError, match="'cpu' cannot run here: .*" + reason):
        select(spec, forced="cpu")
    assert select(spec).name == "reference"


def test_without_the_native_library_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    assert select(SPEC).name == "reference"
    with pytest.raises(ConfigError, match="native CPU library"):
        select(SPEC, forced="cpu")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": torch.device("meta")}, "runs on NVIDIA GPUs, not on meta"),
        ({"dtype": torch.float64}, "activations are bf16, fp16 or fp32"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "KV cache is bf16, fp16, fp32, int8 or fp8_e4m3"),
        ({"num_heads": 5}, "5 query heads cannot share 2 KV heads"),
        ({"num_heads": 130, "num_kv_heads": 1}, "at most 64 query heads"),
        ({"head_dim": 260}, "head_dim must be a multiple of 8 up to 256, it is 260"),
        ({"block_size": 24}, "block_size must be a power of two"),
    ],
)
def test_triton_tells_why_not(monkeypatch: pytest.MonkeyPatch, changes: dict, reason: str) -> None:
    triton = BACKENDS.resolve("triton")
    assert "runs on NVIDIA GPUs" in triton.why_not(SPEC)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert triton.why_not(SPEC) is None
    assert reason in triton.why_not(dataclasses.replace(SPEC, **changes))


def test_8_bit_floats_are_served_by_the_reference_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert select(dataclasses.replace(SPEC, kv_cache_dtype=torch.float8_e4m3fn)).name == "reference"
    assert "slow" in caplog.text and "KV cache is fp32, bf16, fp16 or int8" in caplog.text


def test_a_spec_no_backend_can_serve_and_an_unknown_name() -> None:
    with pytest.raises(ConfigError, match=r"cpu: .*; reference: 5 query heads cannot share 2 KV heads"):
        select(dataclasses.replace(SPEC, num_heads=5))
    with pytest.raises(ConfigError, match="unknown attention backend 'flash'; known: cpu, cuda, triton, reference"):
        select(SPEC, forced="flash")

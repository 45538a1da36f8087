"""Settings: sizes, ranges, immutability."""

from __future__ import annotations

import dataclasses

import pytest

from pagedserve.config import (
    CacheConfig,
    EngineConfig,
    FrontConfig,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
    parse_bytes,
)
from pagedserve.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("123", 123),
        ("2GiB", 2 * 1024**3),
        ("500MB", 500 * 1000**2),
        ("4g", 4 * 1024**3),
        ("1.5 KiB", 1536),
        ("8b", 8),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_bytes(text, "--flag") == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 parsecs", "nan", "inf", "1e9e9"])
def test_a_bad_size_names_the_flag(text: str) -> None:
    with pytest.raises(ConfigError, match="--flag"):
        parse_bytes(text, "--flag")


@pytest.mark.parametrize(
    ("config", "values", "flag"),
    [
        (CacheConfig, {"block_size": 12}, "--block-size"),
        (CacheConfig, {"gpu_memory_utilization": 0.0}, "--gpu-memory-utilization"),
        (CacheConfig, {"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        (CacheConfig, {"kv_cache_memory": "lots"}, "--kv-cache-memory"),
        (CacheConfig, {"swap_space": "some"}, "--swap-space"),
        (CacheConfig, {"kv_cache_resident": "half"}, "--kv-cache-resident"),
        (SchedulerConfig, {"max_num_seqs": 0}, "--max-num-seqs"),
        (SchedulerConfig, {"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
        (SchedulerConfig, {"watermark": 1.0}, "--watermark"),
        (SchedulerConfig, {"request_timeout": 0.0}, "--request-timeout"),
        (ModelConfig, {"max_model_len": 0}, "--max-model-len"),
        (ModelConfig, {"num_threads": 0}, "--num-threads"),
        (FrontConfig, {"max_logprobs": -1}, "--max-logprobs"),
        (ServerConfig, {"port": 70000}, "--port"),
        (ServerConfig, {"shutdown_timeout": -1.0}, "--shutdown-timeout"),
    ],
)
def test_a_value_out_of_range_names_the_flag(config: type, values: dict[str, object], flag: str) -> None:  # C084
    with pytest.raises(ConfigError, match=flag):
        config(**values)


def test_settings_cannot_be_changed_later() -> None:
    config = EngineConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.block_size = 32  # type: ignore[misc]

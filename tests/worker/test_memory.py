"""The plan from given amounts of memory, and the amounts from given system files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pagedserve.config import CacheConfig
from pagedserve.errors import ConfigError
from pagedserve.step import KVCacheSpec, MemoryPlan
from pagedserve.worker.memory import free_cpu_memory, free_memory, make_plan, usable_cores

MIB = 2**20
# A block of one MiB, so that numbers can be read.
SPEC = KVCacheSpec(num_layers=32, num_kv_heads=8, head_dim=64, block_size=16, dtype="float16", bytes_per_block=MIB)


def plan(
    free_mib: int,
    *,
    weights_bytes: int = 123,
    on_cpu: bool = True,
    host_mib: int | None = None,
    cache: dict | None = None,
    **more: Any,
) -> MemoryPlan:
    arguments = {"max_num_seqs": 64, "max_model_len": 4096, **more}
    return make_plan(
        cache=CacheConfig(**(cache or {})),
        spec=SPEC,
        weights_bytes=weights_bytes,
        free_bytes=free_mib * MIB,
        free_host_bytes=(free_mib if host_mib is None else host_mib) * MIB,
        on_cpu=on_cpu,
        **arguments,
    )


def test_on_cpu_at_most_half_of_what_is_free() -> None:
    made = plan(2000)
    assert made.num_device_blocks == 1000
    assert made.kv_bytes == 1000 * MIB
    assert (made.weights_bytes, made.spec) == (123, SPEC)
    assert plan(2000, cache={"gpu_memory_utilization": 0.25}).num_device_blocks == 500


def test_on_gpu_the_share_that_was_asked_for() -> None:
    assert plan(2000, on_cpu=False).num_device_blocks == 1800


def test_never_more_than_all_running_sequences_can_use() -> None:
    assert plan(10**6, max_num_seqs=3, max_model_len=100).num_device_blocks == 3 * math.ceil(100 / 16)


def test_a_size_or_a_number_of_blocks_instead_of_a_share() -> None:
    assert plan(2000, cache={"kv_cache_memory": "1900MiB"}).num_device_blocks == 1900
    assert plan(2000, cache={"num_device_blocks": 3}).num_device_blocks == 3


@pytest.mark.parametrize(
    ("cache", "flag"),
    [
        ({"kv_cache_memory": "3000MiB"}, "--kv-cache-memory 3000MiB: only 1.95 GiB are free"),
        ({"num_device_blocks": 3000}, r"--num-device-blocks 3000 \(2.93 GiB\): only 1.95 GiB are free"),
        ({"kv_cache_memory": "1MiB"}, "one short request needs 4 .*: raise --kv-cache-memory"),
        ({"kv_cache_memory": "10"}, "memory for 0 KV blocks"),
        ({"gpu_memory_utilization": 0.001}, "raise --gpu-memory-utilization"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_the_flag_to_change(cache: dict, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        plan(2000, cache=cache)


def test_a_cpu_pool_of_no_given_size_keeps_the_weights_size_in_memory() -> None:
    assert plan(4000).num_resident_blocks == 512
    assert plan(4000, weights_bytes=700 * MIB).num_resident_blocks == 700
    assert plan(1000).num_resident_blocks is None, "the pool is no larger"
    assert plan(4000, on_cpu=False).num_resident_blocks is None
    for size in ({"kv_cache_memory": "3000MiB"}, {"num_device_blocks": 3000}):
        assert plan(4000, cache=size).num_resident_blocks is None, "what was asked for is used"
        assert plan(4000, cache={**size, "kv_cache_resident": "10MiB"}).num_resident_blocks == 10


def test_a_short_model_needs_no_more_than_its_length() -> None:
    assert plan(2000, cache={"kv_cache_memory": "1MiB"}, max_model_len=16).num_device_blocks == 1


def test_the_host_pool_is_never_larger_than_the_device_pool_or_what_is_left() -> None:
    assert plan(2000, cache={"num_device_blocks": 10}).num_host_blocks == 10
    assert plan(2000, cache={"num_device_blocks": 10, "swap_space": "0"}).num_host_blocks == 0
    assert plan(2000, cache={"num_device_blocks": 100, "swap_space": "30MiB"}).num_host_blocks == 30
    # Both pools in one memory: 1,000 of 2,000 MiB are taken, half of the rest may be.
    assert plan(2000).num_host_blocks == 500
    assert plan(2000, on_cpu=False, host_mib=5000).num_host_blocks == 1800


def files(tmp_path: Path, available_kib: int, cgroup: dict[str, str]) -> tuple[Path, Path]:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {available_kib} kB\n")
    for name, text in cgroup.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return meminfo, tmp_path / "cgroup"


@pytest.mark.parametrize(
    ("cgroup", "expected"),
    [
        ({}, 8000 * 1024),
        ({"memory.max": "max\n", "memory.current": "5", "memory.stat": "inactive_file 1\n"}, 8000 * 1024),
        (
            {"memory.max": "3000000\n", "memory.current": "1000000\n", "memory.stat": "anon 5\ninactive_file 500000\n"},
            2500000,
        ),
        ({"memory.max": "1000\n", "memory.current": "5000\n", "memory.stat": "inactive_file 10\n"}, 0),
        ({"memory.max": "99000000000\n", "memory.current": "1\n", "memory.stat": "inactive_file 0\n"}, 8000 * 1024),
        (
            {
                "memory/memory.limit_in_bytes": "2000000\n",
                "memory/memory.usage_in_bytes": "500000\n",
                "memory/memory.stat": "total_inactive_file 100000\n",
            },
            1600000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "1\n",
                "memory/memory.stat": "total_inactive_file 0\n",
            },
            8000 * 1024,
        ),
    ],
    ids=["no group", "no limit", "v2 limit", "v2 beyond its limit", "v2 generous", "v1 limit", "v1 no limit"],
)
def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path, cgroup: dict[str, str], expected: int) -> None:
    assert free_cpu_memory(*files(tmp_path, 8000, cgroup)) == expected


def test_without_proc_a_share_of_the_whole(tmp_path: Path) -> None:
    assert free_cpu_memory(tmp_path / "none", tmp_path) > 0


def test_free_memory_of_this_machine() -> None:
    import psutil
    import torch

    assert 0 < free_memory(torch.device("cpu")) <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("text", "expected"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("", None)]
)
def test_cores_are_limited_by_the_containers_quota(tmp_path: Path, text: str, expected: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == (expected or usable_cores(tmp_path / "nowhere"))

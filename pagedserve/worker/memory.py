"""How much memory there is, and how many KV blocks it makes."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from pagedserve.config import CacheConfig, parse_bytes
from pagedserve.errors import ConfigError
from pagedserve.step import KVCacheSpec, MemoryPlan

# A pool that cannot hold one request of this many tokens (or of the model's length, if shorter) is a mistake.
MIN_POOL_TOKENS = 64
# On CPUs the pool shares the machine's memory with activations, the page cache and everything else.
MAX_CPU_SHARE = 0.5
# What cached prefixes may keep of the pool's memory on a CPU, at least.
MIN_RESIDENT_BYTES = 512 << 20
# The host pool leaves at least as much host memory free as it takes.
MAX_HOST_SHARE = 0.5


def make_plan(
    *,
    cache: CacheConfig,
    spec: KVCacheSpec,
    weights_bytes: int,
    free_bytes: int,
    free_host_bytes: int,
    max_num_seqs: int,
    max_model_len: int,
    on_cpu: bool,
) -> MemoryPlan:
    """Sizes both pools from what is free after the weights, on the device and on the host (on a CPU, the same memory).

    Raises ConfigError, naming the flag to change, when the pool would be too small to serve anything or larger than the
    memory there is.
    """
    num_blocks = _num_device_blocks(cache, spec, free_bytes, max_num_seqs, max_model_len, on_cpu)
    kv_bytes = num_blocks * spec.bytes_per_block
    host_bytes = int((free_host_bytes - (kv_bytes if on_cpu else 0)) * MAX_HOST_SHARE)
    host_bytes = min(host_bytes, parse_bytes(cache.swap_space, "--swap-space"))
    return MemoryPlan(
        weights_bytes=weights_bytes,
        kv_bytes=kv_bytes,
        num_device_blocks=num_blocks,
        num_host_blocks=min(num_blocks, host_bytes // spec.bytes_per_block),
        spec=spec,
        num_resident_blocks=_num_resident_blocks(cache, spec, weights_bytes, num_blocks) if on_cpu else None,
    )


def _num_resident_blocks(cache: CacheConfig, spec: KVCacheSpec, weights_bytes: int, num_blocks: int) -> int | None:
    """Blocks that keep their memory while running requests need fewer; None: all of the pool."""
    if cache.kv_cache_resident != "auto":
        num_bytes = parse_bytes(cache.kv_cache_resident, "--kv-cache-resident")
    elif cache.kv_cache_memory is not None or cache.num_device_blocks is not None:
        return None  # a size that was asked for is used
    else:
        num_bytes = max(weights_bytes, MIN_RESIDENT_BYTES)
    resident = num_bytes // spec.bytes_per_block
    return resident if resident < num_blocks else None


def _num_device_blocks(
    cache: CacheConfig, spec: KVCacheSpec, free_bytes: int, max_num_seqs: int, max_model_len: int, on_cpu: bool
) -> int:
    if cache.num_device_blocks is not None:
        asked = cache.num_device_blocks * spec.bytes_per_block
        _fits(f"--num-device-blocks {cache.num_device_blocks} ({_gib(asked)})", asked, free_bytes)
        return cache.num_device_blocks
    if cache.kv_cache_memory is not None:
        budget = parse_bytes(cache.kv_cache_memory, "--kv-cache-memory")
        _fits(f"--kv-cache-memory {cache.kv_cache_memory}", budget, free_bytes)
        blocks, change = budget // spec.bytes_per_block, "raise --kv-cache-memory"
    else:
        share = min(cache.gpu_memory_utilization, MAX_CPU_SHARE) if on_cpu else cache.gpu_memory_utilization
        # More than every running sequence at full length could ever use is not worth holding.
        useful = max_num_seqs * math.ceil(max_model_len / spec.block_size) * len(spec.layer_groups)
        blocks = min(int(free_bytes * share) // spec.bytes_per_block, useful)
        change = (
            f"free some memory ({_gib(free_bytes)} are free), raise --gpu-memory-utilization or use --kv-cache-memory"
        )
    needed = math.ceil(min(max_model_len, MIN_POOL_TOKENS) / spec.block_size) * len(spec.layer_groups)
    if blocks < needed:
        raise ConfigError(
            f"memory for {blocks} KV blocks of {spec.block_size} tokens, but one short request needs {needed} "
            f"({_gib(needed * spec.bytes_per_block)}): {change}"
        )
    return blocks


def _fits(setting: str, asked: int, free_bytes: int) -> None:
    if asked > free_bytes:
        raise ConfigError(f"{setting}: only {_gib(free_bytes)} are free after the weights; ask for less")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_cpu_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))


def free_cpu_memory(meminfo: Path, cgroup: Path) -> int:
    """What the machine has available, or what this process's control group (container) leaves, if that is less."""
    available = _meminfo_available(meminfo)
    limits = [
        _cgroup_headroom(cgroup, "memory.max", "memory.current", "inactive_file"),
        _cgroup_headroom(cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ]
    return min([available, *(limit for limit in limits if limit is not None)])


def _meminfo_available(meminfo: Path) -> int:
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Systems without /proc do not say what is available; a quarter of the whole leaves room for what runs beside us.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def _cgroup_headroom(folder: Path, limit_file: str, usage_file: str, cache_field: str) -> int | None:
    """Bytes below the group's limit, counting file cache that the kernel can drop as free; None without a limit."""
    try:
        limit = (folder / limit_file).read_text().strip()
        usage = int((folder / usage_file).read_text())
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not limit.isdigit() or int(limit) >= 2**60:
        return None
    return max(0, int(limit) - usage + int(fields.get(cache_field, 0)))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores that this process may keep busy: its affinity, or the CPU quota of its container, if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))

from __future__ import annotations

import pytest
import torch

from pagedserve.step import BlockOps
from pagedserve.worker.kv_storage import KVStorage


def storage(dtype: torch.dtype = torch.float32, num_device_blocks: int = 8, num_host_blocks: int = 4) -> KVStorage:
    made = KVStorage(
        num_device_blocks=num_device_blocks,
        num_host_blocks=num_host_blocks,
        num_layers=3,
        layer_block_shape=(2, 2, 4, 8),
        dtype=dtype,
        device=torch.device("cpu"),
    )
    made.device_pool.copy_(torch.arange(made.device_pool.numel()).view_as(made.device_pool) % 251)
    return made


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_swap_out_then_swap_in_then_copy(dtype: torch.dtype) -> None:
    """Only right in this order: block 1 leaves and returns as 2, which is copied to 6; a copy overwrites 1."""
    made = storage(dtype)
    before = made.device_pool.clone()
    seconds = made.execute(BlockOps(swap_out=[(1, 3), (5, 0)], swap_in=[(3, 2), (0, 7)], copy=[(0, 1), (2, 6)]))
    expected = before.clone()
    expected[2], expected[7] = before[1], before[5]
    expected[1], expected[6] = before[0], before[1]
    assert torch.equal(made.device_pool, expected)
    assert torch.equal(made.host_pool[3], before[1]) and torch.equal(made.host_pool[0], before[5])
    assert seconds > 0


def test_a_chain_of_copies_is_done_in_order() -> None:
    made = storage()
    before = made.device_pool.clone()
    made.execute(BlockOps(copy=[(0, 1), (1, 2)]))
    assert torch.equal(made.device_pool[1], before[0]) and torch.equal(made.device_pool[2], before[0])


def test_blocks_outside_the_pools_are_refused() -> None:
    made = storage()
    for wrong in (
        BlockOps(copy=[(0, 8)]),
        BlockOps(copy=[(-1, 0)]),
        BlockOps(swap_out=[(0, 4)]),
        BlockOps(swap_in=[(4, 0)]),
    ):
        with pytest.raises(IndexError, match="outside the pools"):
            made.execute(wrong)


def test_no_host_pool_is_a_pool_of_none() -> None:
    made = storage(num_host_blocks=0)
    assert len(made.host_pool) == 0
    with pytest.raises(IndexError):
        made.execute(BlockOps(swap_out=[(0, 0)]))


def test_pools_start_as_zeros_and_take_no_memory_until_written() -> None:
    """Resident memory of this process grows by far less than the 4 GiB that are allocated."""

    before = resident_kib()
    made = KVStorage(
        num_device_blocks=4096,
        num_host_blocks=0,
        num_layers=4,
        layer_block_shape=(2, 8, 16, 256),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    assert made.device_pool.nbytes == 4 * 2**30
    assert not made.device_pool[[0, 77, 4095]].any()
    assert made.device_pool.data_ptr() % 64 == 0 and made.device_pool.is_contiguous()
    assert resident_kib() - before < 256 * 1024


def test_discarded_blocks_return_their_memory_after_the_copies() -> None:
    """Their neighbours keep every byte, and they read as zeros when they are used again."""
    made = KVStorage(
        num_device_blocks=64,
        num_host_blocks=2,
        num_layers=3,
        layer_block_shape=(2, 2, 16, 1000),  # a block is no whole number of pages
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    made.device_pool.fill_(1.0)
    before, filled = made.device_pool[:3].clone(), resident_kib()
    made.execute(BlockOps(swap_out=[(7, 1)], copy=[(8, 2)], discard=[*range(3, 60)]))
    assert resident_kib() < filled - 57 * 3 * 2 * 2 * 16 * 1000 * 4 // 1024 * 0.9
    assert torch.equal(made.device_pool[:3], before) and (made.device_pool[60:] == 1.0).all()
    assert (made.host_pool[1] == 1.0).all()
    made.device_pool[5].fill_(2.0)
    assert (made.device_pool[5] == 2.0).all() and (made.device_pool[4, 1] == 0.0).all()

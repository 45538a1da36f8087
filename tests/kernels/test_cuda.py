"""The binding of csrc/cuda: what it refuses before anything runs. The kernels' numbers: test_cuda_emulation.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from pagedserve.errors import ConfigError
from pagedserve.kernels import cuda, native_cuda
from tests.helpers.emulated_cuda import emulated_cuda, forget_library


@pytest.fixture
def emulated() -> Iterator[None]:
    with emulated_cuda():
        yield


def kv_layer(**changes: object) -> cuda.KVLayer:
    sizes = {"head_dim": 64, "block_size": 16, "heads": 2, "dtype": torch.bfloat16} | changes
    pool = torch.zeros(4, 2, 2, sizes["heads"], sizes["block_size"], sizes["head_dim"], dtype=sizes["dtype"])
    return cuda.KVLayer(pool[:, 0], sizes["head_dim"], sizes["block_size"])


def step(num_seqs: int = 3) -> cuda.DecodeStep:
    return cuda.DecodeStep(
        seq_lens=torch.ones(num_seqs, dtype=torch.int32), block_tables=torch.zeros(num_seqs, 2, dtype=torch.int32)
    )


def decode(query: torch.Tensor, kv: cuda.KVLayer, out: torch.Tensor | None = None) -> torch.Tensor:
    return cuda.paged_decode(query, kv, step(), 0.125, None, None, out)


def query(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(*(shape or (3, 8, 64)), dtype=dtype)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: decode(query(2, 8, 64), kv_layer()), "query has 2 tokens, the step 3 rows"),
        (lambda: decode(query(3, 8, 128), kv_layer()), "does not fit the cache"),
        (lambda: decode(query(3, 7, 64), kv_layer()), "7 query heads cannot share 2 KV heads"),
        (lambda: decode(query().transpose(1, 2).contiguous().transpose(1, 2), kv_layer()), "heads must be contiguous"),
        (lambda: decode(torch.zeros(3, 8 * 64 + 1, dtype=torch.bfloat16)[:, 1:].view(3, 8, 64), kv_layer()), "aligned"),
        (lambda: decode(query(), kv_layer(), query(3, 8, 32)), "out must be like query"),
        (lambda: decode(query(), kv_layer(), query(dtype=torch.float16)), "out must be like query"),
        (lambda: cuda.KVLayer(torch.zeros(4, 2, 2, 16, 64), 64, 32), "does not hold blocks of 32 x 64"),
        (lambda: cuda.KVLayer(torch.zeros(4, 2, 2, 16, 64, dtype=torch.int64), 64, 16), "no CUDA kernel reads"),
        (lambda: cuda.KVLayer(torch.zeros(4, 2, 2, 16, 128)[..., ::2], 64, 16), "must be contiguous"),
        (lambda: cuda.KVLayer(torch.zeros(4097)[1:].view(1, 2, 2, 16, 64), 64, 16), "aligned to 16 bytes"),
        (lambda: step(70000), "at most 65535 rows"),
        (lambda: cuda.copy_blocks(torch.zeros(4, 3), torch.tensor([[0, 1]])), "12 bytes are no multiple of 16"),
        (lambda: cuda.copy_blocks(torch.zeros(4, 4), torch.tensor([[0, 4]])), "0 -> 4 outside the pools of 4 and 4"),
        (lambda: cuda.copy_blocks(torch.zeros(4, 4), torch.tensor([[0.0, 1.0]])), "pairs must be int64"),
        (lambda: cuda.copy_blocks(torch.zeros(4, 8)[:, ::2], torch.tensor([[0, 1]])), "pool must be contiguous"),
        (lambda: cuda.swap_blocks(torch.zeros(4, 4), torch.zeros(2, 4), torch.tensor([[-1, 0]])), "-1 -> 0 outside"),
        (lambda: cuda.swap_blocks(torch.zeros(4, 4), torch.zeros(2, 8), torch.tensor([[0, 0]])), "one dtype and shape"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("emulated")
def test_what_a_kernel_cannot_survive_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong()


@pytest.mark.usefixtures("emulated")
def test_what_has_no_kernel_says_so() -> None:
    with pytest.raises(ConfigError, match="no decode kernel for dtype 1, cache dtype 0, head_dim 64"):
        decode(query(), kv_layer(dtype=torch.float32))
    with pytest.raises(ConfigError, match="no decode kernel for dtype 1, cache dtype 1, head_dim 72"):
        decode(query(3, 8, 72), kv_layer(head_dim=72))
    with pytest.raises(ConfigError, match="block_size must be a power of two from 8 to 128, it is 24"):
        decode(query(), kv_layer(block_size=24))


@pytest.mark.usefixtures("emulated")
def test_drafts_need_their_starts() -> None:
    with pytest.raises(ValueError, match="need query_start_loc"):
        cuda.DecodeStep(
            seq_lens=torch.ones(2, dtype=torch.int32),
            block_tables=torch.zeros(2, 2, dtype=torch.int32),
            max_query_len=3,
        )
    with pytest.raises(ValueError, match=r"query_start_loc must be int32 \[3\]"):
        cuda.DecodeStep(
            seq_lens=torch.ones(2, dtype=torch.int32),
            block_tables=torch.zeros(2, 2, dtype=torch.int32),
            query_start_loc=torch.zeros(2, dtype=torch.int32),
            max_query_len=3,
        )


def test_a_chosen_library_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PAGEDSERVE_CUDA_LIBRARY", str(tmp_path / "none.so"))
    forget_library()
    with pytest.raises(ConfigError, match="there is no such file"):
        native_cuda.library()


def test_a_broken_library_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"no library")
    monkeypatch.setenv("PAGEDSERVE_CUDA_LIBRARY", str(broken))
    forget_library()
    assert native_cuda.library() is None and not native_cuda.is_emulated()
    assert "is not there" in native_cuda.why_not() and native_cuda.describe() == native_cuda.why_not()
    forget_library()

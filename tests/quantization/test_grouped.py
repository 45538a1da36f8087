"""8- and 4-bit groups as GPUs hold them, by the reference ops: lossless where a file has them, else near."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from pagedserve.errors import ConfigError, ModelLoadError
from pagedserve.models.planning import PlannedMethod
from pagedserve.quantization.grouped import GroupedMethod, GroupedWeight
from pagedserve.quantization.none import DenseWeight
from tests.helpers.gguf_rows import dequantized, random_rows

CPU = torch.device("cpu")


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("asked", ["auto", "int8"])
def test_blocks_of_a_file_are_held_without_loss(kind: str, asked: str) -> None:
    parts = [random_rows(kind, 5, 96), random_rows(kind, 3, 96, seed=1)]
    weight = GroupedMethod(asked, CPU).from_gguf(kind, parts, 96)
    wanted = dequantized(kind, np.concatenate(parts))
    assert isinstance(weight, GroupedWeight) and weight.rounding_error is None
    assert np.array_equal(weight.dequantize().numpy(), wanted)
    bits = {"Q8_0": 8.5, "Q4_0": 5.0, "Q4_1": 5.0}[kind]
    assert weight.nbytes == 8 * 96 * bits / 8
    x, bias = randn(4, 96), randn(8)
    assert_close(weight.matmul(x, bias), x @ torch.from_numpy(wanted).T + bias)
    assert torch.equal(weight.rows(torch.tensor([7, 0])), torch.from_numpy(wanted[[7, 0]]))


@pytest.mark.parametrize(("asked", "limit"), [("int8", 0.006), ("int4", 0.09)])
def test_dense_weights_are_quantised(asked: str, limit: float) -> None:
    parts = [randn(40, 256).bfloat16(), randn(200, 256).bfloat16()]
    weight = GroupedMethod(asked, CPU, torch.bfloat16).from_dense(parts)
    assert isinstance(weight, GroupedWeight) and weight.rounding_error is not None
    lost = weight.dequantize() - torch.cat(parts).float()
    assert float(lost.square().mean().sqrt()) == pytest.approx(weight.rounding_error.relative, rel=0.1)
    assert weight.rounding_error.relative < limit


def test_groups_without_spread_keep_their_number() -> None:
    rows = torch.zeros(3, 64)
    rows[1], rows[2, :32] = 0.75, -2.5
    for asked in ("int8", "int4"):
        found = GroupedMethod(asked, CPU).from_dense(rows).dequantize()
        assert_close(found, rows, rtol=1e-3, atol=0)


def test_types_that_are_no_groups_are_dense_or_quantised() -> None:
    rows = random_rows("Q6_K", 4, 256)
    kept = GroupedMethod("auto", CPU, torch.bfloat16).from_gguf("Q6_K", rows, 256)
    assert isinstance(kept, DenseWeight) and kept.weight.dtype is torch.bfloat16
    assert isinstance(GroupedMethod("int8", CPU).from_gguf("Q6_K", rows, 256), GroupedWeight)
    mixed = ["Q4_1", "Q8_0"], [random_rows("Q4_1", 4, 64), random_rows("Q8_0", 4, 64)]
    assert isinstance(GroupedMethod("auto", CPU).from_gguf(*mixed, 64), DenseWeight)
    assert GroupedMethod("int4", CPU).from_gguf(*mixed, 64).nbytes == 8 * 64 * 5 / 8


@pytest.mark.parametrize("asked", ["auto", "int8", "int4"])
@pytest.mark.parametrize("kinds", [["Q4_0", "Q4_1"], ["Q4_0", "Q8_0"], ["Q8_0", "F16"], ["BF16", "BF16"]], ids=str)
def test_sizes_are_planned(asked: str, kinds: list[str]) -> None:
    method = GroupedMethod(asked, CPU, torch.float16)
    sizes = {"F16": torch.float16, "BF16": torch.bfloat16}
    parts = [
        randn(4, 64).to(sizes[kind]).view(torch.uint8).numpy() if kind in sizes else random_rows(kind, 4, 64)
        for kind in kinds
    ]
    assert method.size_of(kinds, [4, 4], 64) == method.from_gguf(kinds, parts, 64).nbytes
    assert PlannedMethod(method).from_gguf(kinds, parts, 64).nbytes == method.size_of(kinds, [4, 4], 64)


def test_heads_keep_eight_bits_routers_and_experts_all() -> None:
    dense = randn(4, 64)
    assert GroupedMethod("int4", CPU).for_head().from_dense(dense).nbytes == 4 * 64 * 8.5 / 8
    for method in (GroupedMethod("int4", CPU).exact(), GroupedMethod("auto", CPU).for_experts()):
        assert torch.equal(method.from_dense(dense).dequantize(), dense)
    with pytest.raises(ConfigError, match="--weights-dtype int8: the experts of a mixture"):
        GroupedMethod("int8", CPU).for_experts()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 32 numbers, here are 40"):
        GroupedMethod("int4", CPU).from_dense(randn(4, 40))
    with pytest.raises(ConfigError, match="not float16"):
        GroupedMethod("float16", CPU)
    with pytest.raises(ModelLoadError, match="does not hold"):
        GroupedMethod("auto", CPU).from_gguf("Q4_0", np.zeros((1, 18), np.uint8), 64)

"""What a profile counts: bytes that must move and arithmetic, from the arguments of recorded calls."""

from __future__ import annotations

import pytest
import torch

from pagedserve.kernels import cpu, native, ops
from pagedserve.kernels.capture import Sample, capture
from pagedserve.kernels.step_profile import StepProfile, measure_ceilings

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built here")


def profile_of(function, inputs_at, sizes: tuple[int, int] = (3, 7)) -> StepProfile:
    """One replay of what `function(*inputs)` does, at the second size."""
    samples = []
    for size in sizes:
        inputs = inputs_at(size)
        samples.append(
            Sample(
                function=lambda inputs=inputs: [function(*inputs)],
                inputs=[
                    (x.struct.address if isinstance(x, cpu.AttentionRows) else x.data_ptr(), x.nbytes) for x in inputs
                ],
                counts=[size],
            )
        )
    program, out, profile = capture((samples[0], samples[1])), torch.empty(sizes[1], 96), StepProfile()
    with native.observing(profile.observe):
        program.run([sizes[1]], [address for address, _ in samples[1].inputs] + [out.data_ptr()])
    return profile


def test_a_product() -> None:
    packed = native.PackedMatrix("bfloat16", 96, 64)
    profile = profile_of(lambda x: ops.linear(x, packed), lambda size: [torch.randn(size, 64)])
    (cost,) = profile.sorted()
    assert cost.label == "linear bfloat16 64 -> 96" and (cost.calls, profile.num_steps) == (1, 1)
    assert cost.flops == 2 * 7 * 64 * 96 and cost.num_bytes == 2 * 64 * 96 + 4 * 7 * (64 + 96)
    assert cost.seconds == profile.seconds > 0


@pytest.mark.parametrize(("window", "pairs", "seen"), [(None, 20 + (18 + 19 + 20), 40), (5, 5 + 3 * 5, 5 + 7)])
def test_attention_counts_what_its_queries_see(window: int | None, pairs: int, seen: int) -> None:
    """A decoding row and a chunk of 3 tokens, both of 20 tokens of context; bf16 keys and values."""
    kv_cache = torch.zeros(8, 2, 2, 16 * 24, dtype=torch.bfloat16)

    def inputs(size: int) -> list:
        queries = [1, size - 1]
        starts = torch.tensor([0, 1, size], dtype=torch.int32)
        lens = torch.tensor([20, 20 if queries[1] == 3 else 19 + size], dtype=torch.int32)
        rows = cpu.AttentionRows(starts, lens, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), size)
        return [torch.randn(size, 4, 24), rows]

    profile = profile_of(
        lambda query, rows: cpu.attend(query, kv_cache, rows, 0.2, window, None, None), inputs, sizes=(3, 4)
    )
    (cost,) = profile.sorted()
    assert cost.flops == 4 * pairs * 4 * 24 and cost.num_bytes == seen * 2 * 2 * 24 * 2


def test_ceilings_are_numbers() -> None:
    before = torch.get_num_threads()
    bandwidth, arithmetic = measure_ceilings(1)
    assert bandwidth > 0 and arithmetic > 0 and torch.get_num_threads() == before

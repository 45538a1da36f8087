"""From native ops to a step program: what is recorded, what is refused, and that a replay gives the ops' bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pagedserve.kernels import native, ops
from pagedserve.kernels.capture import NotCapturableError, Sample, capture

pytestmark = pytest.mark.skipif(not native.available(), reason="the native library is not built here")

WIDTH = 48
GAMMA = torch.rand(WIDTH) + 0.5

Function = Callable[[torch.Tensor], torch.Tensor]


def address_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def program_of(function: Function, sizes: tuple[int, int] = (3, 7)) -> native.StepProgram:
    inputs = [torch.randn(size, WIDTH) for size in sizes]
    samples = [Sample(function=lambda x=x: [function(x)], inputs=[address_of(x)], counts=[x.shape[0]]) for x in inputs]
    return capture((samples[0], samples[1]))


def replay(program: native.StepProgram, x: torch.Tensor, width: int) -> torch.Tensor:
    out = torch.full((x.shape[0], width), torch.nan)
    program.run([x.shape[0]], [x.data_ptr(), out.data_ptr()])
    return out


def chain(x: torch.Tensor) -> torch.Tensor:
    """Several ops whose results live at different times, a residual in place, a slice of a wider buffer."""
    residual = ops.rms_norm(x, GAMMA, 1e-5)
    for _ in range(3):
        wide = torch.empty((x.shape[0], 2 * WIDTH))
        ops.rms_norm(residual, GAMMA, 1e-5, out=wide[:, :WIDTH])
        ops.rms_norm(x, GAMMA, 1e-5, out=wide[:, WIDTH:])
        ops.rms_norm(ops.silu_mul(wide), GAMMA, 1e-5, residual=residual)
    return ops.gelu_mul(regrouped(residual, x.shape[0]))


def regrouped(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    return x.view(num_rows, 2, WIDTH // 2).contiguous().view(num_rows, WIDTH)


@pytest.mark.parametrize("num_rows", [0, 1, 5, 300])
def test_a_replay_has_the_bits_of_the_ops(isa: str, num_threads: int, num_rows: int) -> None:
    program = program_of(chain)
    x = torch.randn(num_rows, WIDTH)
    kept = x.clone()
    out = replay(program, x, WIDTH // 2)
    assert torch.equal(out, chain(x)) and torch.equal(x, kept)


def test_threads_and_instruction_sets_may_change_between_replays(num_threads: int) -> None:
    program, x = program_of(chain), torch.randn(64, WIDTH)
    for name in native.available_isas():
        native.select_isa(name)
        assert torch.equal(replay(program, x, WIDTH // 2), chain(x))
    native.select_isa(None)


def test_nothing_is_computed_while_recording() -> None:
    residual = torch.zeros(7, WIDTH)

    def function(x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, GAMMA, 1e-5, residual=residual[: x.shape[0]])

    program = program_of(function)
    assert not residual.any()
    x = torch.randn(2, WIDTH)
    replay(program, x, WIDTH)
    assert torch.equal(residual[:2], x) and not residual[2:].any()


def test_an_observer_is_told_the_time_of_every_op() -> None:
    program = program_of(chain)
    runs: list[tuple] = []
    x, out = torch.randn(4, WIDTH), torch.empty(4, WIDTH // 2)
    with native.observing(lambda *run: runs.append(run)):
        program.run([4], [x.data_ptr(), out.data_ptr()])
        program.run([3], [x.data_ptr(), out.data_ptr()])
    program.run([4], [x.data_ptr(), out.data_ptr()])
    assert [run[:2] for run in runs] == [(program, [4]), (program, [3])]
    names = [name for name, _ in program.ops]
    assert names.count("ps_rms_norm") == 10 and names[-1] == "ps_gated_activation"
    for *_, seconds in runs:
        assert len(seconds) == len(names) and (seconds > 0).all()


def test_a_replay_reports_what_an_op_refuses() -> None:
    table = torch.randn(4, WIDTH)

    def function(ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(table, ids, torch.float32)

    inputs = [torch.zeros(size, dtype=torch.int64) for size in (3, 7)]
    program = capture(
        tuple(Sample(function=lambda x=x: [function(x)], inputs=[address_of(x)], counts=[len(x)]) for x in inputs)
    )
    ids, out = torch.tensor([1, 9]), torch.empty(2, WIDTH)
    with pytest.raises(ValueError, match=r"row_ids\[1\] is 9"):
        program.run([2], [ids.data_ptr(), out.data_ptr()])


def test_every_op_of_a_forward_can_be_captured() -> None:
    """The list in step_program.cpp names what ops.py calls within a forward."""
    program = native.StepProgram(1, 1)
    outside = ("ps_select_isa", "ps_set_num_threads", "ps_copy_blocks", "ps_linear_pack", "ps_program", "ps_sample")
    outside += ("ps_token_bitmask",)
    for name, letters in native.SIGNATURES.items():
        if not name.startswith(outside):
            program.add_op(name, [(native.VALUE, 0, 0)] * len(letters))


# ---- what is refused ------------------------------------------------------------------------------------------


def adds_in_torch(x: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x, GAMMA, 1e-5) + 1


def writes_in_torch(x: torch.Tensor) -> torch.Tensor:
    y = ops.rms_norm(x, GAMMA, 1e-5)
    y[:, 0] = 0
    return y


def reads_a_number(x: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x, GAMMA, float(x[0, 0].item()))


def depends_on_the_size(x: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x, GAMMA, 1e-5 * x.shape[0])


def more_ops_for_more_rows(x: torch.Tensor) -> torch.Tensor:
    y = ops.rms_norm(x, GAMMA, 1e-5)
    for _ in range(x.shape[0] - 3):
        y = ops.rms_norm(y, GAMMA, 1e-5)
    return y


def starts_at_the_last_row(x: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(ops.rms_norm(x, GAMMA, 1e-5)[-1:], GAMMA, 1e-5)


def returns_a_view(x: torch.Tensor) -> torch.Tensor:
    return ops.rms_norm(x, GAMMA, 1e-5)[1:]


def returns_its_input(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (adds_in_torch, "torch op aten.add"),
        (writes_in_torch, "torch op aten.fill_"),
        (reads_a_number, "torch op aten._local_scalar_dense"),
        (depends_on_the_size, "argument 12 of ps_rms_norm depends on the batch"),
        (more_ops_for_more_rows, "the ops depend on the size of the batch"),
        (starts_at_the_last_row, "argument 3 of ps_rms_norm depends on the batch"),
        (returns_a_view, "a result is not a tensor of its own"),
        (returns_its_input, "a result is not a tensor of its own"),
    ],
)
def test_what_cannot_be_captured_is_named(function: Function, reason: str) -> None:
    with pytest.raises(NotCapturableError, match=reason.replace("(", r"\(")):
        program_of(function)
    # The thread computes again.
    assert torch.isfinite(ops.rms_norm(torch.randn(2, WIDTH), GAMMA, 1e-5)).all()

"""A CPU's steps as a program of native ops: the model's code runs once, what it asked for is replayed by one call.

One program is good for any number of rows. Where the model does something that a program cannot express, steps run op
by op, and one line in the log says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pagedserve.kernels import capture, cpu, native
from pagedserve.log import get_logger
from pagedserve.worker.step_inputs import StepGraph, StepInputs, pool_of

logger = get_logger(__name__)


class StepProgramGraph(StepGraph):
    """One model's steps as one native program. The results lie in memory that the next step overwrites."""

    def __init__(self, model: Any, samples: Callable[[], tuple[StepInputs, StepInputs]]) -> None:
        """`samples` makes inputs of two sizes whose tokens are kept nowhere."""
        super().__init__(model)
        self._samples = samples
        self._program: native.StepProgram | None = None
        self._captured_for: tuple[int, ...] | None = None
        self._paths: list[_Path] = []
        self._results: list[torch.Tensor] = []

    @property
    def op_names(self) -> list[str]:
        """The ops of a captured step in order; empty where steps run op by op."""
        return [] if self._program is None else [name for name, _ in self._program.ops]

    def __call__(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        pool = pool_of(inputs)
        if pool != self._captured_for:
            self._captured_for = pool
            self._capture()
        if self._program is None:
            return self.run_eagerly(inputs)
        return self._replay(inputs)

    def _replay(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        program = self._program
        assert program is not None
        counts = inputs.counts
        for i, count in enumerate(counts):
            if self._results[i].shape[0] < count:
                self._results[i] = torch.empty((count + count // 4, self._results[i].shape[1]), dtype=torch.float32)
        hidden, logits = self._results
        addresses = [_address(path.of(inputs)) for path in self._paths]
        program.run(counts, [*addresses, hidden.data_ptr(), logits.data_ptr()])
        return hidden[: counts[0]], logits[: counts[1]]

    def _capture(self) -> None:
        self._program = None
        if self._captured_for is None or not native.available():
            return
        samples = self._samples()
        if not samples[0].context.kv_cache.is_cpu:
            return
        self._paths = list(_paths(samples[0]))
        try:
            self._program = capture.capture(
                tuple(
                    capture.Sample(
                        function=lambda inputs=inputs: self.run_eagerly(inputs),
                        inputs=[_place(path.of(inputs)) for path in self._paths],
                        counts=inputs.counts,
                    )
                    for inputs in samples
                )
            )
        except capture.NotCapturableError as error:
            logger.info("steps run op by op: %s cannot be part of a step program", error)
            return
        self._verify(samples[1])

    def _verify(self, inputs: StepInputs) -> None:
        """A program is believed when it has given the bits of the ops it stands for."""
        wanted = self.run_eagerly(inputs)
        self._results = [x.new_empty((0, x.shape[1])) for x in wanted]
        found = self._replay(inputs)
        if not all(torch.equal(x.view(torch.int32), y.view(torch.int32)) for x, y in zip(wanted, found, strict=True)):
            logger.warning("steps run op by op: their step program gives other numbers; please report this")
            self._program = None


# ---- where in the inputs addresses come from ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Path:
    """The way from StepInputs to a tensor or an AttentionRows."""

    steps: tuple[str | int, ...]

    def of(self, inputs: StepInputs) -> torch.Tensor | cpu.AttentionRows:
        value: Any = inputs
        for step in self.steps:
            value = getattr(value, step) if isinstance(step, str) else value[step]
        return value


def _paths(value: Any, steps: tuple[str | int, ...] = ()) -> Iterator[_Path]:
    """Everything in the inputs that a native call may be given the address of; the pool stays where it is."""
    if steps[-1:] == ("kv_cache",):
        return
    if isinstance(value, torch.Tensor | cpu.AttentionRows):
        yield _Path(steps)
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from _paths(getattr(value, part.name), (*steps, part.name))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _paths(part, (*steps, i))


def _address(value: torch.Tensor | cpu.AttentionRows) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.struct.address


def _place(value: torch.Tensor | cpu.AttentionRows) -> tuple[int, int]:
    """Address and bytes."""
    return _address(value), value.nbytes

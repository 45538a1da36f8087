"""From a Python function over native ops to a step program: recorded twice, at two sizes; what differs is a parameter.

While recording, nothing is computed: native calls are taken down, torch may only make empty tensors and views. Every
address in a call is then a place in a tensor made within the function (a buffer), in one of its inputs, or a constant
such as a weight; every number is a constant or a multiple of one of the counts. A function that does anything else is
not capturable, and the reason names the op.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedserve.kernels import native

_Argument = tuple[int, int, int]  # kind, index, value: see native.StepProgram


class NotCapturableError(Exception):
    """Why a function cannot become a step program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One size to record a function at."""

    function: Callable[[], Sequence[torch.Tensor]]  # its results are contiguous tensors that it made
    inputs: Sequence[tuple[int, int]]  # address and bytes of everything that changes from run to run
    counts: Sequence[int]  # the numbers of rows; the samples' must not be proportional


def capture(samples: tuple[Sample, Sample]) -> native.StepProgram:
    """The program of the samples' function. Its inputs are the samples' inputs, then its results.

    Raises NotCapturableError.
    """
    first, second = (_Recording(sample).run() for sample in samples)
    if [call.name for call in first.calls] != [call.name for call in second.calls]:
        raise NotCapturableError("the ops depend on the size of the batch")
    if len(first.buffers) != len(second.buffers) or first.results != second.results:
        raise NotCapturableError("the buffers depend on the size of the batch")
    counts = tuple(zip(samples[0].counts, samples[1].counts, strict=True))
    calls = [_merge_calls(a, b, counts) for a, b in zip(first.calls, second.calls, strict=True)]
    sizes = [
        _merge((native.VALUE, 0, a), (native.VALUE, 0, b), counts, "a buffer", 0)
        for a, b in zip(first.buffer_bytes, second.buffer_bytes, strict=True)
    ]
    num_inputs = len(samples[0].inputs)
    results = {buffer: num_inputs + i for i, buffer in enumerate(first.results)}
    return _assemble(calls, sizes, results, num_counts=len(counts), num_inputs=num_inputs + len(results))


@dataclass(slots=True)
class _Call:
    name: str
    arguments: list[_Argument]


class _Recording(TorchDispatchMode):
    """Takes down one run of a function."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch's hook: True, its default, would import the compiler (two seconds) to keep it away from this class.
        return False

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self._sample = sample
        self.calls: list[_Call] = []
        self.buffers: list[torch.UntypedStorage] = []  # kept: an address must not be used twice
        self.results: list[int] = []
        # Where addresses belong: (first byte, end, kind, index), sorted.
        self._places: list[tuple[int, int, int, int]] = sorted(
            (address, address + size, native.INPUT, i) for i, (address, size) in enumerate(sample.inputs)
        )

    def run(self) -> _Recording:
        with native.recording(self), self:
            results = self._sample.function()
        for result in results:
            kind, index, offset = self._argument(result.data_ptr())
            if kind != native.BUFFER or offset or not result.is_contiguous() or index in self.results:
                raise NotCapturableError("a result is not a tensor of its own that the function made")
            self.results.append(index)
        return self

    @property
    def buffer_bytes(self) -> list[int]:
        return [storage.nbytes() for storage in self.buffers]

    def record(self, name: str, arguments: tuple[Any, ...]) -> None:
        converted = [
            self._argument(native.word(getattr(value, "_as_parameter_", value)))
            if is_pointer
            else (native.VALUE, 0, native.word(value))
            for is_pointer, value in zip(native.pointer_positions(name), arguments, strict=True)
        ]
        self.calls.append(_Call(name, converted))

    def _argument(self, address: int) -> _Argument:
        place = bisect_right(self._places, (address, 2**63, 0, 0)) - 1
        if place >= 0:
            begin, end, kind, index = self._places[place]
            if begin <= address < end:
                return kind, index, address - begin
        return native.VALUE, 0, address

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided):
            storage = result.untyped_storage()
            insort(
                self._places,
                (storage.data_ptr(), storage.data_ptr() + storage.nbytes(), native.BUFFER, len(self.buffers)),
            )
            self.buffers.append(storage)
            return result
        # A view, or a tensor handed through: it lies where something lay before, and nothing was written.
        known = {_address(x) for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = [_address(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if func._schema.is_mutable or not made or not known.issuperset(made):
            raise NotCapturableError(f"torch op {func}")
        return result


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _merge(a: _Argument, b: _Argument, counts: Sequence[tuple[int, int]], name: str, position: int) -> _Argument:
    """One argument as it was at two sizes."""
    if a == b:
        return a
    if a[0] == b[0] == native.VALUE:
        for index, (first, second) in enumerate(counts):
            if a[2] % first == 0 and a[2] // first * second == b[2]:
                return native.COUNT, index, a[2] // first
    raise NotCapturableError(f"argument {position} of {name} depends on the batch")


def _merge_calls(a: _Call, b: _Call, counts: Sequence[tuple[int, int]]) -> _Call:
    pairs = enumerate(zip(a.arguments, b.arguments, strict=True))
    return _Call(a.name, [_merge(x, y, counts, a.name, position) for position, (x, y) in pairs])


@dataclass(slots=True)
class _Slot:
    """Memory that buffers take in turn."""

    count_index: int | None
    num_bytes: int
    is_free: bool = field(default=True)


def _assemble(
    calls: list[_Call], sizes: list[_Argument], results: dict[int, int], *, num_counts: int, num_inputs: int
) -> native.StepProgram:
    """The program, its buffers placed in as few slots as their lives allow."""
    last_use = {index: i for i, call in enumerate(calls) for kind, index, _ in call.arguments if kind == native.BUFFER}
    slots: list[_Slot] = []
    slot_of: dict[int, int] = {}

    def place(index: int) -> int:
        kind, count, size = sizes[index]
        count_index = count if kind == native.COUNT else None
        free = [i for i, slot in enumerate(slots) if slot.is_free and slot.count_index == count_index]
        # The smallest that is large enough, else the largest.
        best = min(free, key=lambda i: (slots[i].num_bytes < size, abs(slots[i].num_bytes - size)), default=None)
        if best is None:
            best = len(slots)
            slots.append(_Slot(count_index, size))
        slots[best].num_bytes = max(slots[best].num_bytes, size)
        slots[best].is_free = False
        return best

    placed: list[_Call] = []
    for i, call in enumerate(calls):
        arguments: list[_Argument] = []
        for kind, index, value in call.arguments:
            if kind == native.BUFFER and index in results:
                kind, index = native.INPUT, results[index]
            elif kind == native.BUFFER:
                if index not in slot_of:
                    slot_of[index] = place(index)
                index = slot_of[index]
            arguments.append((kind, index, value))
        placed.append(_Call(call.name, arguments))
        for kind, index, _ in call.arguments:
            if kind == native.BUFFER and index in slot_of and last_use[index] == i:
                slots[slot_of[index]].is_free = True

    program = native.StepProgram(num_counts, num_inputs)
    for slot in slots:
        program.add_buffer(slot.num_bytes, slot.count_index)
    for call in placed:
        try:
            program.add_op(call.name, call.arguments)
        except (ValueError, native.ConfigError) as error:
            raise NotCapturableError(str(error)) from error
    return program

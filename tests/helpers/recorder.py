"""A device of CPU tensors that captures and replays as a GPU does: what is taken down is what was launched.

While a function is captured nothing is computed: native calls and kernel launches only go onto the list, with the very
addresses and numbers they were given, and reading a number on the host is an error. Replaying runs the list, so a
Python value that changes from step to step, a tensor made from one, or an input that nobody has filled, shows as a
wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagedserve.attention.backend import AttentionMetadata
from pagedserve.attention.cpu import CpuBackend
from pagedserve.kernels import cpu, native
from pagedserve.worker.decode_graphs import CaptureError

Kernel = Callable[..., None]

RELEASED = -1  # in RecordingDevice.reserved


class RecordingDevice:
    """A `decode_graphs.CaptureDevice` for CPU tensors, with memory for as many captures as one likes."""

    def __init__(self, num_captures: int | None = None) -> None:
        self.num_captures = num_captures
        self.reserved: list[int] = []
        self.num_captured = 0

    def reserve(self, num_bytes: int) -> None:
        self.reserved.append(num_bytes)

    def release(self) -> None:
        self.reserved.append(RELEASED)

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        if self.num_captures is not None and self.num_captured >= self.num_captures:
            raise torch.OutOfMemoryError("no memory for another capture")
        function()
        recorder = _Recorder()
        recorder.take_down(function)
        self.num_captured += 1

        def replay() -> None:
            for launch in recorder.launches:
                launch()

        return replay


def launch(kernel: Kernel, *arguments: Any) -> None:
    """Runs `kernel`, which writes into its arguments; while capturing, takes the launch down instead."""
    if _Recorder.active is not None:
        _Recorder.active.launches.append(lambda: kernel(*arguments))
    else:
        kernel(*arguments)


class _Recorder(TorchDispatchMode):
    active: ClassVar[_Recorder | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Callable[[], object]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler to keep it away from this class

    def take_down(self, function: Callable[[], None]) -> None:
        _Recorder.active = self
        try:
            with native.recording(self), self:
                function()
        finally:
            _Recorder.active = None

    def record(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.launches.append(lambda: native.call(name, *arguments))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or torch.Tag.dynamic_output_shape in func.tags:
            raise CaptureError(f"{func} is not permitted while capturing")
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        result = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.launches.append(lambda: func(*args, **kwargs))
        elif not any(returned.alias_info for returned in func._schema.returns):  # a view needs no launch
            outputs = tree_leaves(result)
            self.launches.append(lambda: _write(outputs, tree_leaves(func(*args, **kwargs))))
        return result


def _write(outputs: list[Any], values: list[Any]) -> None:
    for output, value in zip(outputs, values, strict=True):
        if isinstance(output, torch.Tensor):
            output.copy_(value)


@dataclass(slots=True, kw_only=True)
class PlannedMetadata(AttentionMetadata):
    """With what the device has counted."""

    num_live: torch.Tensor  # int64 []: rows that have a context


def take_triton_launches() -> None:
    """From now on launches of Triton kernels (under the interpreter) can be captured too: grid and numbers as they are,
    tensors by their addresses."""
    from pagedserve.kernels.triton.variants import Launch

    run = Launch.run

    def run_or_record(self: Launch) -> None:
        launch(lambda: run(self))

    Launch.run = run_or_record


class CapturableBackend(CpuBackend):
    """The native CPU attention as kernels that are launched, after a plan made on the device: rows of no context
    are left as they are, full of NaN."""

    name = "capturable"
    why_not_captured = None

    def build_metadata(self, *, seq_lens: torch.Tensor, **more: Any) -> PlannedMetadata:
        return PlannedMetadata(seq_lens=seq_lens, **more, num_live=(seq_lens > 0).sum())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        sliding_window: int | None = None,
    ) -> torch.Tensor:
        window = self.spec.sliding_window if sliding_window is None else sliding_window
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        launch(_attend, self.spec, query, key, value, kv_cache, metadata, metadata.max_query_len, window, out)
        return out

    def forward_qkv(self, qkv, positions, cos_sin, kv_cache, metadata, *, sliding_window=None):
        spec = self.spec
        heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        query, key, value = qkv.view(qkv.shape[0], -1, spec.head_dim).split(heads, dim=1)
        cpu.rotary_embedding(positions, query, key, cos_sin)
        return self.forward(query, key, value, kv_cache, metadata, sliding_window=sliding_window)


def _attend(spec, query, key, value, kv_cache, metadata, max_query_len, window, out) -> None:
    """All that may change is read from tensors now, when the kernel runs."""
    num_live = int(metadata.num_live)
    num_tokens = int(metadata.query_start_loc[num_live])
    assert int(metadata.query_start_loc.diff().max()) <= max_query_len
    assert int(metadata.seq_lens.max()) <= metadata.max_seq_len
    out.fill_(torch.nan)
    cpu.write_kv(key, value, kv_cache, metadata.slot_mapping)
    rows = cpu.AttentionRows(
        metadata.query_start_loc[: num_live + 1],
        metadata.seq_lens[:num_live],
        metadata.block_tables[:num_live],
        num_tokens,
    )
    if num_live:
        cpu.attend(query[:num_tokens], kv_cache, rows, spec.scale, window, spec.soft_cap, out[:num_tokens])

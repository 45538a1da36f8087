"""Decode steps captured once a size and replayed: on a GPU, hundreds of launches become one.

A captured step reads its inputs where they were when it was captured, with the numbers of rows that it then had. So it
has input tensors of its own at fixed places, comes in a few sizes, and a step of fewer rows is padded: such a row has
no context (`seq_lens` 0) and keeps nothing (slot -1). Prompts, and steps that mix them with decodes, run op by op.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pagedserve.attention import AttentionBackend
from pagedserve.layers.attention import ForwardContext
from pagedserve.log import get_logger
from pagedserve.worker.step_inputs import StepGraph, StepInputs, pool_of

logger = get_logger(__name__)

# Above this many rows a step's arithmetic hides its launches.
MAX_ROWS = 512
# A size that was used so often is worth the pause that capturing takes, even if nobody leaves us a quiet moment.
USES_BEFORE_CAPTURE = 8


class CaptureError(Exception):
    """Why a step cannot be captured, in one line."""


class CaptureDevice(Protocol):
    """What can take down the work that a function gives to a device, and give it the same work again.

    All captures share one pool of memory, so their results are only good until the next replay.
    """

    def reserve(self, num_bytes: int) -> None:
        """Gives the pool one piece of memory that large, for all captures to divide. Raises as `capture` does."""

    def release(self) -> None:
        """Gives that piece back; captures that still exist keep what they use."""

    def capture(self, function: Callable[[], None]) -> Callable[[], None]:
        """Runs `function` once, then takes it down; what comes back replays it. Raises CaptureError, or
        torch.OutOfMemoryError with nothing changed."""


def decode_sizes(max_num_rows: int) -> tuple[int, ...]:
    """The numbers of rows that decode steps are captured for: 1, 2, 4, then every multiple of 8, and the last one."""
    most = min(max_num_rows, MAX_ROWS)
    return (*(n for n in (1, 2, 4, *range(8, most, 8)) if n < most), most)


class Sizes:
    """Which sizes there are, which of them steps have asked for, and which one is worth capturing next."""

    def __init__(self, max_num_rows: int) -> None:
        self.all = decode_sizes(max_num_rows)
        self._uses = dict.fromkeys(self.all, 0)
        self._refused: set[int] = set()

    def of(self, num_rows: int) -> int | None:
        """The smallest size for so many rows; None where all are too small."""
        place = bisect_left(self.all, num_rows)
        return self.all[place] if place < len(self.all) else None

    def use(self, size: int) -> bool:
        """A step had this size and found no capture; True where it has become worth a pause."""
        self._uses[size] += 1
        return self._uses[size] >= USES_BEFORE_CAPTURE and size not in self._refused

    def refuse(self, size: int) -> None:
        """There is no memory for this one; it is not asked for again until `forget`."""
        self._refused.add(size)

    def next(self, captured: set[int]) -> int | None:
        """The largest size that steps had and that is not captured; None where there is none."""
        wanted = (s for s in reversed(self.all) if self._uses[s] and s not in captured and s not in self._refused)
        return next(wanted, None)

    def forget(self) -> None:
        """Start afresh: what steps asked for then says nothing of now."""
        self._uses = dict.fromkeys(self.all, 0)
        self._refused.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """The largest decode step there can be."""

    max_num_rows: int
    max_model_len: int
    block_size: int
    num_groups: int = 1
    # What a step of that many rows takes beside its inputs and results, if known.
    activation_bytes: int = 0

    @property
    def max_blocks(self) -> int:
        """Of a row and layer group."""
        return -(-self.max_model_len // self.block_size)


class DecodeGraphs(StepGraph):
    """One model's decode steps by size, captured when there is time for it; all other steps op by op.

    The results lie in memory that the next step overwrites.
    """

    def __init__(self, model: Any, attention: AttentionBackend, device: CaptureDevice, shape: DecodeShape) -> None:
        super().__init__(model)
        self._attention = attention
        self._device: CaptureDevice | None = device  # None: it could not capture a step, and is not asked again
        self._shape = shape
        self._sizes = Sizes(shape.max_num_rows)
        self._replays: dict[int, Callable[[], None]] = {}
        self._captured_for: tuple[int, ...] | None = None
        self._context: ForwardContext | None = None  # of the last decode step: where pool and layers lie
        self._inputs: DecodeInputs | None = None
        self._results: tuple[torch.Tensor, torch.Tensor] | None = None
        self.num_replays = 0

    @property
    def static_bytes(self) -> int:
        tensors = [*(self._inputs.tensors if self._inputs is not None else ()), *(self._results or ())]
        return sum(tensor.nbytes for tensor in tensors)

    @property
    def captured(self) -> tuple[int, ...]:
        """The sizes that are replayed, ascending."""
        return tuple(sorted(self._replays))

    def __call__(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._sizes.of(inputs.counts[0]) if self._device is not None and inputs.is_decode else None
        if size is None or inputs.context.metadata.max_seq_len > self._shape.max_model_len:
            return self.run_eagerly(inputs)
        self._follow(inputs)
        if size not in self._replays and not (self._sizes.use(size) and self._capture(size)):
            return self.run_eagerly(inputs)
        return self._replay(size, inputs)

    def capture_next(self) -> bool:
        """Captures the largest size that steps have had; False where there is none left."""
        size = self._sizes.next(set(self._replays)) if self._device is not None else None
        if size is None:
            return False
        self._capture(size)
        return True

    def drop(self) -> None:
        self._replays.clear()
        self._sizes.forget()
        if self._device is not None:
            self._device.release()

    def _follow(self, inputs: StepInputs) -> None:
        """A pool that has moved leaves captures behind that write where it was."""
        pool = pool_of(inputs)
        if pool != self._captured_for:
            self.drop()
            self._captured_for = pool
            self._context = inputs.context

    def _replay(self, size: int, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._inputs is not None and self._results is not None
        num_rows = inputs.counts[0]
        self._inputs.fill(inputs, size)
        self._replays[size]()
        self.num_replays += 1
        hidden, logits = self._results
        return hidden[:num_rows], logits[:num_rows]

    def _capture(self, size: int) -> bool:
        assert self._device is not None and self._context is not None
        try:
            if self._inputs is None:
                self._inputs = DecodeInputs(self._shape, self._context.kv_cache.device)
            if not self._replays:
                self._device.reserve(self._shape.activation_bytes)
            # Whatever they held belongs to a step that is over: running it again must not write into its blocks.
            self._inputs.clear()
            self._replays[size] = self._device.capture(self._step(size))
        except torch.OutOfMemoryError:
            logger.info("decode steps of up to %d rows run op by op: there is no memory to capture them", size)
            self._sizes.refuse(size)
        except CaptureError as error:
            logger.warning("decode steps run op by op: they cannot be captured: %s", error)
            self.drop()
            self._device = None
        return size in self._replays

    def _step(self, size: int) -> Callable[[], None]:
        """The work that is captured: from the inputs' fixed places to the results'."""
        assert self._inputs is not None and self._context is not None
        static, context = self._inputs, self._context

        def step() -> None:
            # Within: what attention plans on the device is planned anew by every replay.
            inputs = static.of(size, self._attention, context)
            # Every row is sampled from its only token.
            hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.context)
            logits = self._model.compute_logits(hidden)
            if self._results is None:
                # Outside of the pool that captures share, and once for all sizes: kept by each, logits of a large
                # vocabulary would take gigabytes.
                rows = self._sizes.all[-1]
                self._results = (hidden.new_empty((rows, *hidden.shape[1:])), logits.new_empty((rows, logits.shape[1])))
            for result, value in zip(self._results, (hidden, logits), strict=True):
                result[:size].copy_(value)

        return step


class DecodeInputs:
    """The inputs of captured steps, at places that never change. Rows that no step uses are padding."""

    def __init__(self, shape: DecodeShape, device: torch.device) -> None:
        rows, groups = decode_sizes(shape.max_num_rows)[-1], shape.num_groups
        self._shape = shape
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((groups, rows), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros((groups, rows, shape.max_blocks), dtype=torch.int32, device=device)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._last_tokens = torch.arange(rows, dtype=torch.int64, device=device)
        self._num_used = 0  # rows beyond are padding already

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (
            self._token_ids, self._positions, self._slots, self._seq_lens, self._tables, self._starts,
            self._last_tokens,
        )  # fmt: skip

    def of(self, size: int, attention: AttentionBackend, context: ForwardContext) -> StepInputs:
        """The first `size` rows as one step's inputs; its context is as long as the model allows, so that whatever
        attention plans for it will do for every step."""
        metadata, *more = [
            attention.build_metadata(
                query_start_loc=self._starts[: size + 1],
                seq_lens=self._seq_lens[:size],
                block_tables=self._tables[group, :size],
                slot_mapping=self._slots[group, :size],
                max_query_len=1,
                max_seq_len=self._shape.max_model_len,
            )
            for group in range(self._shape.num_groups)
        ]
        return StepInputs(
            token_ids=self._token_ids[:size],
            positions=self._positions[:size],
            last_tokens=self._last_tokens[:size],
            context=ForwardContext(
                metadata=metadata, more_metadata=tuple(more), kv_cache=context.kv_cache, places=context.places
            ),
        )

    def fill(self, inputs: StepInputs, size: int) -> None:
        """Takes the rows of a step, of which there are at most `size`, over."""
        num_rows = inputs.counts[0]
        groups = (inputs.context.metadata, *inputs.context.more_metadata)
        # One launch for all of one type.
        torch._foreach_copy_(
            [self._token_ids[:num_rows], self._positions[:num_rows], *self._slots[:, :num_rows]],
            [inputs.token_ids, inputs.positions, *(metadata.slot_mapping for metadata in groups)],
        )
        self._seq_lens[:num_rows].copy_(groups[0].seq_lens)
        for tables, metadata in zip(self._tables, groups, strict=True):
            # Entries behind a row's context are never read, so what an earlier step left there may stay.
            tables[:num_rows, : metadata.block_tables.shape[1]].copy_(metadata.block_tables)
        if num_rows < self._num_used:
            self._pad(num_rows, self._num_used)
        self._num_used = num_rows

    def clear(self) -> None:
        """Makes every row padding."""
        self._pad(0, self._num_used)
        self._num_used = 0

    def _pad(self, start: int, end: int) -> None:
        self._token_ids[start:end].zero_()
        self._positions[start:end].zero_()
        self._seq_lens[start:end].zero_()
        self._slots[:, start:end].fill_(-1)

"""What the worker's rows have to be told: the differences between one step and the next."""

from __future__ import annotations

from pagedserve.sequence import Request, Sequence
from pagedserve.step import NewSequence, SchedulerOutput


class WorkerRows:
    """The sequences for which the worker has a row, or will have when the next step is sent."""

    def __init__(self) -> None:
        self._seq_ids: set[int] = set()
        self._new: list[NewSequence] = []
        self._forks: list[tuple[int, int, int]] = []
        self._appended: list[tuple[int, int]] = []
        self._released: list[int] = []

    @property
    def is_changed(self) -> bool:
        """Whether the worker holds rows that are no longer needed."""
        return bool(self._released)

    def add(self, sequence: Sequence, request: Request, block_ids: list[int]) -> None:
        """A sequence arrives, or returns."""
        self._seq_ids.add(sequence.seq_id)
        self._new.append(
            NewSequence(
                seq_id=sequence.seq_id,
                token_ids=sequence.token_ids.copy(),
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_computed_tokens=sequence.num_computed_tokens,
                block_ids=block_ids,
                sampling_params=request.sampling_params,
                seed=request.seed,
                choice_index=sequence.choice_index,
                eos_token_ids=request.eos_token_ids,
            )
        )

    def is_new(self, sequence: Sequence) -> bool:
        """Whether the row comes into being with the next step (a fork of it is possible only after that)."""
        return any(new.seq_id == sequence.seq_id for new in self._new)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child's row is a copy of the parent's."""
        self._seq_ids.add(child.seq_id)
        self._forks.append((parent.seq_id, child.seq_id, child.choice_index))

    def append(self, sequence: Sequence, token_id: int) -> None:
        """The control plane chose a token."""
        self._appended.append((sequence.seq_id, token_id))

    def release(self, sequence: Sequence) -> None:
        """The sequence ended, or lost its blocks; nothing happens where it has no row."""
        seq_id = sequence.seq_id
        if seq_id not in self._seq_ids:
            return
        self._seq_ids.remove(seq_id)
        if self._new and self.is_new(sequence):
            self._new = [new for new in self._new if new.seq_id != seq_id]
        else:
            self._released.append(seq_id)

    def record(self, output: SchedulerOutput) -> None:
        """Write the differences down in the step's order: forks, released, appended, new."""
        output.new, self._new = self._new, []
        output.released, self._released = self._released, []
        if self._forks or self._appended:
            # A beam may have been forked after the last step and have lost its row before this one.
            gone = set(output.released)
            stillborn = {child for _, child, _ in self._forks} & gone
            output.forks = [fork for fork in self._forks if fork[1] not in stillborn]
            output.released = [seq_id for seq_id in output.released if seq_id not in stillborn]
            output.appended = [entry for entry in self._appended if entry[0] not in gone]
            self._forks, self._appended = [], []

"""A fixed row for each live sequence: its tokens, blocks and sampling state, kept between steps.

The control plane sends differences; a step's inputs are gathered from here. A preempted sequence is released and comes
back as new, so nothing is kept for it.
"""

from __future__ import annotations

import numpy as np

from pagedserve.sampling.batch import SamplingState
from pagedserve.step import NewSequence, SchedulerOutput
from pagedserve.worker.block_tables import BlockTables, grown


class Rows:
    """State of the live sequences, as columns by row."""

    def __init__(self, num_rows: int, block_size: int, num_tokens: int = 1024, num_groups: int = 1) -> None:
        """Room for `num_rows` sequences of `num_tokens` tokens to begin with; both grow."""
        self.token_ids = np.zeros((num_rows, num_tokens), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int64)
        # How many of them are known here; at most one more is drawn by a step whose results have not been asked for,
        # and `places` says where among the tokens that step draws.
        self.num_known = np.zeros(num_rows, dtype=np.int64)
        self.places = np.zeros(num_rows, dtype=np.int64)
        self.block_tables = BlockTables(num_rows, -(-num_tokens // block_size), block_size, num_groups)
        self.states: list[SamplingState | None] = [None] * num_rows
        # Live sequences whose prompt logprobs are wanted: nearly always none.
        self.with_prompt_logprobs: set[int] = set()
        # Live sequences that want a vector and no tokens, with the sum of their hidden states where that is needed.
        self.with_pooling: dict[int, np.ndarray | None] = {}
        self.draws = np.ones(num_rows, dtype=np.bool_)  # False for the rows of those sequences
        # Whether what is drawn is the row's next token: the control plane chooses those of beams.
        self.grows = np.ones(num_rows, dtype=np.bool_)
        # Changes whenever a row changes hands, so that what was built for a set of rows can be kept until then.
        self.generation = 0
        self._row_of: dict[int, int] = {}
        self._free = list(range(num_rows - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._row_of)

    def apply(self, output: SchedulerOutput) -> None:
        """Brings the rows up to date with a step's differences, in the order that SchedulerOutput documents."""
        for parent, child, choice_index in output.forks:
            self._fork(parent, child, choice_index)
        for seq_id in output.released:
            # After a step that failed, nobody knows which of its rows came into being.
            if seq_id in self._row_of:
                self._release(seq_id)
        for seq_id, token_id in output.appended:
            self.append(np.array([self.row_of(seq_id)]), np.array([token_id]))
        for new in output.new:
            self._add(new)
        for seq_id, block_ids in zip(output.seq_ids, output.new_block_ids, strict=True):
            if block_ids:
                self.block_tables.append(self.row_of(seq_id), block_ids)
        for seq_id, index, block_id, group in output.replaced_blocks:
            self.block_tables.replace(self.row_of(seq_id), index, block_id, group)

    def row_of(self, seq_id: int) -> int:
        row = self._row_of.get(seq_id)
        if row is None:
            raise KeyError(f"sequence {seq_id} has no row: it was never sent as new, or was released")
        return row

    def rows_of(self, seq_ids: list[int]) -> np.ndarray:
        """int64 [len(seq_ids)]"""
        try:
            return np.array([self._row_of[s] for s in seq_ids], dtype=np.int64)
        except KeyError as missing:
            raise KeyError(f"sequence {missing} has no row: it was never sent as new, or was released") from None

    def state_of(self, seq_id: int) -> SamplingState:
        state = self.states[self.row_of(seq_id)]
        assert state is not None
        return state

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Adds one token to each of `rows` (int64 [n], all different)."""
        lengths = self.num_tokens[rows]
        if len(rows):
            self.token_ids = grown(self.token_ids, (len(self.states), int(lengths.max()) + 1))
        self.token_ids[rows, lengths] = token_ids
        self.num_tokens[rows] = self.num_known[rows] = lengths + 1

    def expect(self, rows: np.ndarray) -> None:
        """A step draws a token for each of `rows` (int64 [n], all different), in this order."""
        self.token_ids = grown(self.token_ids, (len(self.states), int(self.num_tokens[rows].max()) + 1))
        self.num_tokens[rows] += self.grows[rows]
        self.places[rows] = np.arange(len(rows))

    def rows_left(self, seq_ids: list[int]) -> np.ndarray:
        """int64 [len(seq_ids)]; -1 for sequences that were released."""
        return np.array([self._row_of.get(seq_id, -1) for seq_id in seq_ids], dtype=np.int64)

    def learn(self, rows: np.ndarray, lengths: np.ndarray, token_ids: np.ndarray) -> None:
        """What was expected when these rows (-1: it is gone) had `lengths` tokens."""
        is_wanted = (rows >= 0) & self.grows[rows]
        rows, lengths = rows[is_wanted], lengths[is_wanted]
        self.token_ids[rows, lengths] = np.maximum(token_ids[is_wanted], 0)
        self.num_known[rows] = lengths + 1

    def _add(self, new: NewSequence) -> None:
        row = self._take_row(new.seq_id)
        count = len(new.token_ids)
        # One more than it has: the token that is about to be sampled.
        self.token_ids = grown(self.token_ids, (len(self.states), count + 1))
        self.token_ids[row, :count] = new.token_ids
        self.num_tokens[row] = self.num_known[row] = count
        self.grows[row] = new.sampling_params.beam is None and new.sampling_params.pooling is None
        self.block_tables.set(row, new.block_ids)
        self.states[row] = SamplingState(
            new.sampling_params, new.seed, new.choice_index, new.num_prompt_tokens, new.eos_token_ids
        )
        if new.sampling_params.prompt_logprobs is not None:
            self.with_prompt_logprobs.add(new.seq_id)
        if new.sampling_params.pooling is not None:
            self.with_pooling[new.seq_id] = None
            self.draws[row] = False

    def _fork(self, parent: int, child: int, choice_index: int) -> None:
        target = self._take_row(child)
        source = self.row_of(parent)
        count = self.num_tokens[source]
        self.token_ids[target, :count] = self.token_ids[source, :count]
        for column in (self.num_tokens, self.num_known, self.places, self.grows):
            column[target] = column[source]
        self.block_tables.copy(source, target)
        self.states[target] = self.state_of(parent).fork(choice_index)

    def _release(self, seq_id: int) -> None:
        row = self.row_of(seq_id)
        del self._row_of[seq_id]
        self.states[row] = None
        self.with_prompt_logprobs.discard(seq_id)
        self.with_pooling.pop(seq_id, None)
        self.draws[row] = True
        self._free.append(row)
        self.generation += 1

    def _take_row(self, seq_id: int) -> int:
        if seq_id in self._row_of:
            raise ValueError(f"sequence {seq_id} already has a row")
        if not self._free:
            self._grow()
        row = self._row_of[seq_id] = self._free.pop()
        self.generation += 1
        return row

    def _grow(self) -> None:
        # Beams fork before the dead ones are released, so more rows than running sequences may be alive for a moment.
        have = len(self.states)
        self.token_ids = grown(self.token_ids, (have + 1, self.token_ids.shape[1]))
        self.num_tokens = grown(self.num_tokens, (have + 1,))
        self.num_known, self.places = grown(self.num_known, (have + 1,)), grown(self.places, (have + 1,))
        more = np.ones(len(self.num_tokens) - have, dtype=np.bool_)
        self.draws, self.grows = np.append(self.draws, more), np.append(self.grows, more)
        self.block_tables.grow(have + 1)
        self.states += [None] * (len(self.num_tokens) - have)
        self._free += range(len(self.states) - 1, have - 1, -1)

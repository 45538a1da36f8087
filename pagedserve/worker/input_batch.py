"""The inputs of one forward, gathered from the rows by a few array operations whatever the number of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagedserve.sampling_params import SamplingParams
from pagedserve.step import NewSequence, SchedulerOutput
from pagedserve.worker.rows import Rows


@dataclass(slots=True, kw_only=True)
class InputBatch:
    """One step in batch order, as numpy columns. Sequence i owns tokens query_start_loc[i] .. [i + 1] - 1."""

    rows: np.ndarray  # int64 [num_seqs]
    num_tokens: np.ndarray  # int64 [num_seqs], that the row has before this step
    num_computed: np.ndarray  # int64 [num_seqs], before this step
    is_sampled: np.ndarray  # bool [num_seqs]: the step computes all tokens that the row has, and it wants one more
    token_ids: np.ndarray  # int64 [num_tokens], but for those that the step before draws:
    unknown: np.ndarray  # int64 [num_unknown], their places in token_ids
    drawn_places: np.ndarray  # int64 [num_unknown], their places among the tokens that the step before draws
    positions: np.ndarray  # int64 [num_tokens]
    query_start_loc: np.ndarray  # int32 [num_seqs + 1]
    seq_lens: np.ndarray  # int32 [num_seqs], context length including this step's tokens
    block_tables: np.ndarray  # int32 [num_groups, num_seqs, max_blocks]
    slot_mapping: np.ndarray  # int64 [num_groups, num_tokens]
    max_query_len: int
    max_seq_len: int


def gather(rows: Rows, output: SchedulerOutput) -> InputBatch:
    """The inputs of the scheduled sequences (at least one). ValueError where a row lacks tokens or blocks for them."""
    batch_rows = rows.rows_of(output.seq_ids)
    counts = np.array(output.num_scheduled, dtype=np.int64)
    starts = np.array(output.num_computed, dtype=np.int64)
    ends = starts + counts
    lengths = rows.num_tokens[batch_rows]
    if (counts < 1).any() or (ends > lengths).any():
        raise ValueError("a step schedules tokens that its sequence does not have")

    query_start_loc = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=query_start_loc[1:])
    token_rows = np.repeat(batch_rows, counts)
    positions = np.arange(query_start_loc[-1]) + np.repeat(starts - query_start_loc[:-1], counts)
    max_seq_len = int(ends.max())
    tables = rows.block_tables
    num_blocks = -(-max_seq_len // tables.block_size)
    if (tables.num_blocks[batch_rows] * tables.block_size < ends).any():
        raise ValueError("a step schedules tokens for which its sequence has no block")
    unknown = np.flatnonzero(ends > rows.num_known[batch_rows])
    return InputBatch(
        rows=batch_rows,
        num_tokens=lengths,
        num_computed=starts,
        is_sampled=(ends == lengths) & rows.draws[batch_rows],
        token_ids=rows.token_ids[token_rows, positions].astype(np.int64),
        unknown=query_start_loc[unknown + 1] - 1,
        drawn_places=rows.places[batch_rows[unknown]],
        positions=positions,
        query_start_loc=query_start_loc.astype(np.int32),
        seq_lens=ends.astype(np.int32),
        block_tables=tables.gather(batch_rows, num_blocks),
        slot_mapping=tables.slots(token_rows, positions),
        max_query_len=int(counts.max()),
        max_seq_len=max_seq_len,
    )


# What a step is captured with: (tokens computed before, tokens in this step, tokens that follow) of each sequence.
_SAMPLES = (((0, 4, 3), (5, 1, 0), (0, 2, 0)), ((3, 5, 1), (0, 1, 0), (7, 1, 0), (0, 2, 9), (2, 4, 0)))


def sample_batches(block_size: int, num_groups: int) -> list[tuple[InputBatch, np.ndarray]]:
    """Two made-up steps of different numbers of tokens, sequences and samples, and the last tokens of those sampled.

    They read block 0 and keep nothing: every slot is -1.
    """
    return [_sample_batch(shape, block_size, num_groups) for shape in _SAMPLES]


def _sample_batch(
    shape: tuple[tuple[int, int, int], ...], block_size: int, num_groups: int
) -> tuple[InputBatch, np.ndarray]:
    rows = Rows(len(shape), block_size, num_groups=num_groups)
    params = SamplingParams(temperature=0.0)
    output = SchedulerOutput(step_id=-1)
    for seq_id, (computed, count, more) in enumerate(shape):
        total = computed + count + more
        output.new.append(
            NewSequence(
                seq_id=seq_id,
                token_ids=[0] * total,
                num_prompt_tokens=total,
                num_computed_tokens=computed,
                block_ids=[0] * (-(-total // block_size) * num_groups),
                sampling_params=params,
                seed=0,
                choice_index=0,
            )
        )
        output.seq_ids.append(seq_id)
        output.num_scheduled.append(count)
        output.num_computed.append(computed)
        output.new_block_ids.append([])
    rows.apply(output)
    batch = gather(rows, output)
    batch.slot_mapping[:] = -1
    return batch, batch.query_start_loc[np.flatnonzero(batch.is_sampled) + 1] - 1

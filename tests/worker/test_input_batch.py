from __future__ import annotations

import random

from pagedserve.sampling_params import SamplingParams
from pagedserve.step import NewSequence, SchedulerOutput
from pagedserve.worker.input_batch import gather
from pagedserve.worker.rows import Rows


def test_gathered_columns_equal_a_loop_over_sequences_and_tokens() -> None:
    pick = random.Random(0)
    for block_size, num_groups in ((1, 1), (4, 1), (16, 3), (4, 2)):
        rows = Rows(3, block_size, num_tokens=4, num_groups=num_groups)
        lengths = [pick.randrange(1, 60) for _ in range(9)]
        tokens = [[pick.randrange(1000) for _ in range(n)] for n in lengths]
        tables = [[pick.sample(range(500), -(-n // block_size)) for _ in range(num_groups)] for n in lengths]
        rows.apply(
            SchedulerOutput(
                step_id=0,
                new=[
                    NewSequence(
                        seq_id=i,
                        token_ids=tokens[i],
                        num_prompt_tokens=1,
                        num_computed_tokens=0,
                        block_ids=[block for lane in tables[i] for block in lane],
                        sampling_params=SamplingParams(),
                        seed=0,
                        choice_index=0,
                    )
                    for i in range(9)
                ],
            )
        )
        order = pick.sample(range(9), 6)
        starts = [pick.randrange(lengths[i]) for i in order]
        counts = [pick.randrange(1, lengths[i] - s + 1) for i, s in zip(order, starts, strict=True)]
        batch = gather(
            rows,
            SchedulerOutput(
                step_id=1, seq_ids=order, num_scheduled=counts, num_computed=starts, new_block_ids=[[]] * 6
            ),
        )
        places = [(i, p) for i, s, c in zip(order, starts, counts, strict=True) for p in range(s, s + c)]
        assert batch.token_ids.tolist() == [tokens[i][p] for i, p in places]
        assert batch.positions.tolist() == [p for _, p in places]
        assert batch.slot_mapping.tolist() == [
            [tables[i][group][p // block_size] * block_size + p % block_size for i, p in places]
            for group in range(num_groups)
        ]
        ends = [s + c for s, c in zip(starts, counts, strict=True)]
        assert batch.query_start_loc.tolist() == [sum(counts[:k]) for k in range(7)]
        assert batch.seq_lens.tolist() == ends
        assert batch.is_sampled.tolist() == [e == lengths[i] for i, e in zip(order, ends, strict=True)]
        assert (batch.max_query_len, batch.max_seq_len) == (max(counts), max(ends))
        assert batch.slot_mapping.flags.c_contiguous and batch.block_tables.flags.c_contiguous
        assert batch.block_tables.shape == (num_groups, 6, -(-max(ends) // block_size))
        for group in range(num_groups):
            for row, i, end in zip(batch.block_tables[group].tolist(), order, ends, strict=True):
                used = -(-end // block_size)
                assert row[:used] == tables[i][group][:used]
        dtypes = {name: getattr(batch, name).dtype.name for name in ("query_start_loc", "seq_lens", "block_tables")}
        assert set(dtypes.values()) == {"int32"}
        assert {batch.token_ids.dtype.name, batch.positions.dtype.name, batch.slot_mapping.dtype.name} == {"int64"}

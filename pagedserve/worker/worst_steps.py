"""The largest steps that the scheduler may ever send, so that their memory can be measured before pools are sized."""

from __future__ import annotations

from pagedserve.sampling_params import SamplingParams
from pagedserve.step import NewSequence, SchedulerOutput

# What a request may ask of the sampler that takes memory: every row is copied, ranked and summed.
_WISHES = SamplingParams(
    temperature=1.0,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    logprobs=20,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={0: 1.0},
)


def worst_steps(
    *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, block_size: int, num_groups: int
) -> list[SchedulerOutput]:
    """Two steps of as many tokens and sampled sequences as there may be: equal prompts, and one long prompt beside
    decodes. All lie in block 0. Each is followed by one that releases its sequences."""
    num_rows = min(max_num_seqs, max_num_batched_tokens)
    num_tokens = min(max_num_batched_tokens, num_rows * max_model_len)
    equal = [num_tokens // num_rows + (i < num_tokens % num_rows) for i in range(num_rows)]
    longest = min(num_tokens - (num_rows - 1), max_model_len)
    uneven = [longest, *[1] * (num_rows - 1)]
    return _and_gone(equal, block_size, num_groups) + _and_gone(uneven, block_size, num_groups)


def decode_step(num_rows: int, num_groups: int) -> list[SchedulerOutput]:
    """Likewise, of so many sequences of one token."""
    return _and_gone([1] * num_rows, 1, num_groups)


def _and_gone(counts: list[int], block_size: int, num_groups: int) -> list[SchedulerOutput]:
    step = _step(counts, block_size, num_groups)
    return [step, SchedulerOutput(step_id=-1, released=step.seq_ids)]


def _step(counts: list[int], block_size: int, num_groups: int) -> SchedulerOutput:
    seq_ids = [-1 - i for i in range(len(counts))]
    new = [
        NewSequence(
            seq_id=seq_id,
            token_ids=[0] * count,
            num_prompt_tokens=count,
            num_computed_tokens=0,
            block_ids=[0] * (-(-count // block_size) * num_groups),
            sampling_params=_WISHES,
            seed=0,
            choice_index=0,
        )
        for seq_id, count in zip(seq_ids, counts, strict=True)
    ]
    return SchedulerOutput(
        step_id=-1,
        new=new,
        seq_ids=seq_ids,
        num_scheduled=counts,
        num_computed=[0] * len(counts),
        new_block_ids=[[] for _ in counts],
    )

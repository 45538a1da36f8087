"""What is done to logits before a token is drawn: masks of structured output, penalties over a row's own tokens."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from pagedserve.kernels.triton.variants import Launch, Variant

_BLOCK = 2048  # tokens of one program that masks
_TOKENS = 1024  # of a row's history that a program counts at a time
# Rows whose tokens are counted at once; each needs a counter for every token of the vocabulary.
MAX_COUNTED_ROWS = 64


@triton.jit(do_not_specialize=["num_rows", "vocab_size", "masks_stride"])
def token_bitmask_kernel(logits, rows, masks, num_rows, vocab_size, logits_stride, masks_stride, BLOCK: tl.constexpr):
    entry = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + entry)
    inside = tokens < tl.where((row >= 0) & (row < num_rows), vocab_size, 0)
    words = tl.load(masks + entry * masks_stride + (tokens >> 5), mask=inside, other=-1)
    forbidden = ((words >> (tokens & 31)) & 1) == 0
    tl.store(logits + row * logits_stride + tokens, float("-inf"), mask=inside & forbidden)


def apply_token_bitmask(
    logits: torch.Tensor,  # [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [num_masked]
    masks: torch.Tensor,  # int32 [num_masked, num_words]
) -> Launch:
    return Launch(
        kernel=token_bitmask_kernel,
        grid=(len(rows), triton.cdiv(logits.shape[1], _BLOCK)),
        arguments={
            "logits": logits,
            "rows": rows,
            "masks": masks,
            "num_rows": logits.shape[0],
            "vocab_size": logits.shape[1],
            "logits_stride": logits.stride(0),
            "masks_stride": masks.stride(0),
        },
        constexprs={"BLOCK": _BLOCK},
    )


@triton.jit(do_not_specialize=["num_entries", "vocab_size"])
def penalties_kernel(
    logits, rows, token_ids, slots, prompt_lens, lengths, repetition, presence, frequency, counters,
    num_entries, vocab_size, logits_stride, history_stride, counters_stride, TOKENS: tl.constexpr,
):  # fmt: skip
    """Counts a row's tokens in counters that are all zero, then takes each counter back: whoever finds it above zero
    is the one that changes the token's logit. So the work is that of the history, whatever the vocabulary's size."""
    mine = counters + tl.program_id(0).to(tl.int64) * counters_stride
    for entry in range(tl.program_id(0), num_entries, tl.num_programs(0)):
        row = tl.load(rows + entry)
        history = token_ids + tl.load(slots + entry) * history_stride
        prompt_len = tl.load(prompt_lens + entry).to(tl.int32)
        length = tl.load(lengths + entry).to(tl.int32)
        repeat = tl.load(repetition + entry)
        present = tl.load(presence + entry)
        frequent = tl.load(frequency + entry)
        # A prompt's tokens count for the repetition penalty alone.
        start = tl.where(repeat == 1.0, prompt_len, 0)
        for first in range(start, length, TOKENS):
            places = first + tl.arange(0, TOKENS)
            tokens = tl.load(history + places, mask=places < length, other=-1)
            is_token = (tokens >= 0) & (tokens < vocab_size)
            # Bit 0: in the prompt; above it, how often in the output.
            tl.atomic_or(mine + tokens, 1, mask=is_token & (places < prompt_len), sem="relaxed")
            tl.atomic_add(mine + tokens, 2, mask=is_token & (places >= prompt_len), sem="relaxed")
        tl.debug_barrier()
        for first in range(start, length, TOKENS):
            places = first + tl.arange(0, TOKENS)
            tokens = tl.load(history + places, mask=places < length, other=-1)
            is_token = (tokens >= 0) & (tokens < vocab_size)
            found = tl.atomic_xchg(mine + tokens, 0, mask=is_token, sem="relaxed")
            is_first = is_token & (found > 0)
            pointers = logits + row * logits_stride + tokens
            value = tl.load(pointers, mask=is_first, other=0.0).to(tl.float32)
            count = (found >> 1).to(tl.float32)
            value = tl.where(value > 0, tl.div_rn(value, repeat), value * repeat)
            value -= frequent * count + tl.where(count > 0, present, 0.0)
            tl.store(pointers, value, mask=is_first)
        tl.debug_barrier()


@cache
def _counters(device: torch.device, vocab_size: int) -> torch.Tensor:
    """int32 [MAX_COUNTED_ROWS, vocab_size], all zero between two kernels."""
    return torch.zeros(MAX_COUNTED_ROWS, vocab_size, dtype=torch.int32, device=device)


def apply_penalties(
    logits: torch.Tensor,  # float32 [num_rows, vocab_size]
    rows: torch.Tensor,  # int64 [n], all different
    token_ids: torch.Tensor,  # int32 [num_slots, capacity]
    slots: torch.Tensor,  # int64 [n]
    prompt_lens: torch.Tensor,  # int64 [n]
    lengths: torch.Tensor,  # int64 [n]
    repetition: torch.Tensor,  # float32 [n]
    presence: torch.Tensor,  # float32 [n]
    frequency: torch.Tensor,  # float32 [n]
) -> Launch:
    counters = _counters(logits.device, logits.shape[1])
    return Launch(
        kernel=penalties_kernel,
        grid=(min(len(rows), MAX_COUNTED_ROWS),),
        arguments={
            "logits": logits,
            "rows": rows,
            "token_ids": token_ids,
            "slots": slots,
            "prompt_lens": prompt_lens,
            "lengths": lengths,
            "repetition": repetition,
            "presence": presence,
            "frequency": frequency,
            "counters": counters,
            "num_entries": len(rows),
            "vocab_size": logits.shape[1],
            "logits_stride": logits.stride(0),
            "history_stride": token_ids.stride(0),
            "counters_stride": counters.stride(0),
        },
        constexprs={"TOKENS": _TOKENS},
    )


def variants() -> list[Variant]:
    logits = torch.empty(48, 128256, device="meta")
    rows = torch.empty(48, dtype=torch.int64, device="meta")
    masks = torch.empty(48, 128256 // 32, dtype=torch.int32, device="meta")
    wishes = (logits[:, 0].contiguous(),) * 3
    return [
        apply_token_bitmask(logits, rows, masks).variant("token_bitmask", representative=True),
        apply_penalties(logits, rows, masks, rows, rows, rows, *wishes).variant("penalties", representative=True),
    ]

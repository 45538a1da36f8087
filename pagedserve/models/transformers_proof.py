"""The proof that a model gives the same logits over paged KV as by itself, made while it loads.

Two short sequences are computed in interleaved chunks, as a busy server would. A model whose layers keep a state beside
keys and values, or look at other tokens of the batch, cannot pass.
"""

from __future__ import annotations

from typing import Any

import torch

from pagedserve.attention import AttentionBackend
from pagedserve.errors import ModelLoadError
from pagedserve.layers.attention import ForwardContext

# Each step's rows: (sequence, number of its next tokens).
STEPS = (((0, 4),), ((0, 1), (1, 3)), ((1, 1), (0, 6)), ((0, 1), (1, 2)))
LENGTHS = [sum(count for step in STEPS for sequence, count in step if sequence == wanted) for wanted in (0, 1)]
# Of the largest logit. Half precision rounds at every layer, and differently in each order of additions.
_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.05}
_KV_TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.01}  # of a cache beside activations of more bits
_COARSE_TOLERANCE = 0.2


def tokens(vocab_size: int, device: torch.device) -> list[torch.Tensor]:
    """Both sequences, int64 [num_tokens] each."""
    return [(torch.arange(length, device=device) * 7919 + 13 * length) % vocab_size for length in LENGTHS]


@torch.inference_mode()
def prove(model: Any, attention: AttentionBackend, expected: list[torch.Tensor]) -> None:
    """ModelLoadError unless `model` gives the `expected` logits (fp32 [num_tokens, vocab] of each sequence)."""
    spec = attention.spec
    found = [torch.cat(parts) for parts in _paged_logits(model, attention)]
    difference = max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, expected, strict=True))
    largest = max(float(logits.abs().max()) for logits in expected)
    tolerance = max(
        _TOLERANCE.get(spec.dtype, _COARSE_TOLERANCE), _KV_TOLERANCE.get(spec.kv_cache_dtype, _COARSE_TOLERANCE)
    )
    if not difference <= tolerance * max(largest, 1e-6):  # a NaN is no pass
        raise ModelLoadError(
            f"{model.config.architecture}: logits through paged attention differ from transformers' own by "
            f"{difference:.2g} (largest logit {largest:.2g}): its layers keep or see more than keys and values"
        )


def _paged_logits(model: Any, attention: AttentionBackend) -> list[list[torch.Tensor]]:
    """Logits of each sequence, a part for each step that it was in."""
    spec = attention.spec
    size = spec.block_size
    num_blocks = [-(-length // size) for length in LENGTHS]
    tables = [list(range(num_blocks[0])), list(range(num_blocks[0], sum(num_blocks)))]
    shape = (sum(num_blocks), model.num_layers, *attention.layer_block_shape)
    kv_cache = torch.zeros(shape, dtype=spec.kv_cache_dtype, device=spec.device)
    ids = tokens(model.vocab_size, spec.device)
    done = [0, 0]
    parts: list[list[torch.Tensor]] = [[], []]

    def ints(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=spec.device)

    for step in STEPS:
        # (sequence, position) of each token.
        places = [(s, done[s] + i) for s, count in step for i in range(count)]
        counts = [count for _, count in step]
        for s, count in step:
            done[s] += count
        metadata = attention.build_metadata(
            query_start_loc=ints([sum(counts[:i]) for i in range(len(counts) + 1)], torch.int32),
            seq_lens=ints([done[s] for s, _ in step], torch.int32),
            block_tables=ints([tables[s] + [0] * (num_blocks[0] - num_blocks[s]) for s, _ in step], torch.int32),
            slot_mapping=ints([tables[s][p // size] * size + p % size for s, p in places], torch.int64),
            max_query_len=max(counts),
            max_seq_len=max(done[s] for s, _ in step),
        )
        hidden = model.forward(
            torch.stack([ids[s][p] for s, p in places]),
            ints([p for _, p in places], torch.int64),
            ForwardContext(metadata=metadata, kv_cache=kv_cache),
        )
        for (s, _), logits in zip(step, model.compute_logits(hidden).split(counts), strict=True):
            parts[s].append(logits)
    return parts

"""Sampler: logits in, one token a row out, in the order that the package's docstring gives."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagedserve.kernels import ops
from pagedserve.sampling.batch import SamplingBatch, TokenHistory, TokenMasks
from pagedserve.sampling.logits import sanitize
from pagedserve.sampling.logprobs import best_tokens, chosen_logprobs, take_rows, token_logprobs
from pagedserve.step import TokenLogprobs

UNUSABLE_LOGITS = "the model's output is not a number for every token"
NO_TOKEN_LEFT = (
    "structured output, logit_bias, allowed_token_ids, bad_words and min_tokens together leave no token to choose"
)


@dataclass(slots=True, kw_only=True)
class SamplerOutput:
    """Results by place in the batch. Rows in `candidates` (beam search) and in `errors` have no token (-1)."""

    token_ids: np.ndarray  # int64 [batch]
    logprobs: list[float]  # of the token, from raw logits; 0.0 for rows that did not need it
    top_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Draws tokens.

    `vocab_limit` is the number of ids that the tokenizer can decode, where the model's head is padded past it: the ids
    beyond are neither drawn nor ranked nor counted in any probability (C042).
    """

    def __init__(self, vocab_size: int, vocab_limit: int | None = None) -> None:
        self.vocab_size = min(vocab_size, vocab_limit or vocab_size)

    def score(self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> list[TokenLogprobs]:
        """Logprobs of tokens that are known already, those of a prompt: `token_ids` int64 [n] under `logits`
        float32 [n, >= vocab_size], which it may overwrite."""
        # Not cut as below: a prompt may name an id that cannot be drawn.
        logits[:, self.vocab_size :] = -torch.inf
        sanitize(logits)
        num_top = min(num_top, self.vocab_size)
        return token_logprobs(torch.log_softmax(logits, dim=-1), token_ids, [num_top] * len(token_ids))

    def __call__(
        self, logits: torch.Tensor, batch: SamplingBatch, history: TokenHistory, masks: TokenMasks | None = None
    ) -> SamplerOutput:
        """Samples `logits` float32 [batch, >= vocab_size], which it may overwrite. `batch` is made for this sampler's
        `vocab_size`."""
        logits = logits[:, : self.vocab_size]
        positions = history.lengths - batch.num_prompt_tokens
        if batch.is_plain and masks is None:
            token_ids = batch.filters.draw(logits, positions).cpu().numpy()
            unusable = np.flatnonzero(token_ids < 0).tolist()
            return SamplerOutput(
                token_ids=token_ids,
                logprobs=[0.0] * len(token_ids),
                errors=dict.fromkeys(unusable, UNUSABLE_LOGITS),
            )
        errors = dict.fromkeys(sanitize(logits), UNUSABLE_LOGITS)
        raw = torch.log_softmax(take_rows(logits, batch.logprobs), dim=-1) if batch.logprobs else None
        if batch.beam:
            # transformers' beam search applies its processors to log-probabilities; so do we.
            logits[batch.beam] = torch.log_softmax(take_rows(logits, batch.beam), dim=-1)
        if masks is not None:
            ops.apply_token_bitmask(logits, masks.rows, masks.masks)
        for processor in batch.processors:
            processor.apply(logits, history)
        if batch.processors or masks is not None:
            for i in sanitize(logits):
                errors.setdefault(i, NO_TOKEN_LEFT)

        tokens = batch.filters.draw(logits, positions)
        output = SamplerOutput(token_ids=tokens.cpu().numpy(), logprobs=[0.0] * len(batch.states), errors=errors)
        if raw is not None:
            self._report(raw, tokens, batch, output)
        if batch.beam:
            best = best_tokens(take_rows(logits, batch.beam), [batch.states[i].num_candidates for i in batch.beam])
            output.candidates.update(zip(batch.beam, best, strict=True))
        output.token_ids[batch.beam] = -1
        for i in errors:
            output.token_ids[i] = -1
            output.top_logprobs.pop(i, None)
            output.candidates.pop(i, None)
        return output

    def _report(self, raw: torch.Tensor, tokens: torch.Tensor, batch: SamplingBatch, output: SamplerOutput) -> None:
        """Logprobs of the rows in `batch.logprobs`, from `raw` [len(batch.logprobs), vocab_size]."""
        chosen = tokens[batch.logprobs]
        for i, value in zip(batch.logprobs, chosen_logprobs(raw, chosen), strict=True):
            output.logprobs[i] = value
        asked = [place for place, i in enumerate(batch.logprobs) if batch.states[i].params.logprobs is not None]
        if not asked:
            return
        num_top = [batch.states[batch.logprobs[place]].params.logprobs or 0 for place in asked]
        entries = token_logprobs(take_rows(raw, asked), take_rows(chosen, asked), num_top)
        for place, entry in zip(asked, entries, strict=True):
            output.top_logprobs[batch.logprobs[place]] = entry

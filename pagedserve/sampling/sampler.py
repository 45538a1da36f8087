"""Sampler: logits in, one token a row out, in the order that the package's docstring gives.

A call has three parts. `prepare` needs the rows' tokens but no logits; `draw` only gives work to the device; what comes
back from it tells the results when they have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from pagedserve.kernels import ops
from pagedserve.kernels.reference_sampling import usable
from pagedserve.sampling.batch import SamplingBatch, TokenHistory, TokenMasks
from pagedserve.sampling.logits import Change, sanitize
from pagedserve.sampling.logprobs import best_tokens, chosen_logprobs, distributions, take_rows, token_logprobs
from pagedserve.sampling.transfers import Later, Readback
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


@dataclass(frozen=True, slots=True)
class SamplerCall:
    """One call, ready for its logits."""

    batch: SamplingBatch
    uniform: torch.Tensor  # float64 [batch]
    changes: list[Change]
    masks: TokenMasks | None


@dataclass(slots=True, kw_only=True)
class Drawn:
    """What a call drew: on the device for whatever goes on from it there, and on its way to the host."""

    token_ids: torch.Tensor  # int64 [batch], on the device; -1 where nothing is possible
    _batch: SamplingBatch
    _host_ids: torch.Tensor
    _unusable: torch.Tensor | None = None  # bool [batch] each
    _impossible: torch.Tensor | None = None
    _logprobs: Later[list[float]] | None = None  # of the rows in batch.logprobs
    _top_logprobs: Later[list[TokenLogprobs]] | None = None  # of those among them that ask
    _candidates: Later[list[list[tuple[int, float]]]] | None = None  # of the rows in batch.beam

    def output(self) -> SamplerOutput:
        """The results, once the readback has arrived."""
        batch = self._batch
        token_ids = self._host_ids.numpy().copy()  # on CPUs the next step's forward may be reading them
        output = SamplerOutput(token_ids=token_ids, logprobs=[0.0] * len(token_ids))
        if self._unusable is None:
            output.errors = dict.fromkeys(np.flatnonzero(token_ids < 0).tolist(), UNUSABLE_LOGITS)
            return output
        if self._impossible is not None:
            output.errors = dict.fromkeys(_true_places(self._impossible), NO_TOKEN_LEFT)
        output.errors.update(dict.fromkeys(_true_places(self._unusable), UNUSABLE_LOGITS))
        if self._logprobs is not None:
            for i, value in zip(batch.logprobs, self._logprobs(), strict=True):
                output.logprobs[i] = value
        if self._top_logprobs is not None:
            output.top_logprobs.update(zip(batch.top_logprobs, self._top_logprobs(), strict=True))
        if self._candidates is not None:
            output.candidates.update(zip(batch.beam, self._candidates(), strict=True))
        output.token_ids[batch.beam] = -1
        for i in output.errors:
            output.token_ids[i] = -1
            output.top_logprobs.pop(i, None)
            output.candidates.pop(i, None)
        return output


class Sampler:
    """Draws tokens.

    `vocab_limit` is the number of ids that the tokenizer can decode, where the model's head is padded past it: the ids
    beyond are neither drawn nor ranked nor counted in any probability (C042).
    """

    def __init__(self, vocab_size: int, vocab_limit: int | None = None) -> None:
        self.vocab_size = min(vocab_size, vocab_limit or vocab_size)

    def score(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int, readback: Readback
    ) -> Later[list[TokenLogprobs]]:
        """Logprobs of tokens that are known already, those of a prompt: `token_ids` int64 [n] under `logits`
        float32 [n, >= vocab_size], which it may overwrite."""
        # Not cut as below: a prompt may name an id that cannot be drawn.
        logits[:, self.vocab_size :] = -torch.inf
        sanitize(logits)
        num_top = min(num_top, self.vocab_size)
        return token_logprobs(distributions(logits), token_ids, [num_top] * len(token_ids), readback)

    def prepare(self, batch: SamplingBatch, history: TokenHistory, masks: TokenMasks | None = None) -> SamplerCall:
        """What can be done before there are logits. `batch` is made for this sampler's `vocab_size`."""
        uniform = batch.filters.uniforms(history.lengths - batch.num_prompt_tokens)
        return SamplerCall(batch, uniform, [processor.prepare(history) for processor in batch.processors], masks)

    def draw(self, logits: torch.Tensor, call: SamplerCall, readback: Readback) -> Drawn:
        """Samples `logits` float32 [batch, >= vocab_size], which it may overwrite."""
        batch, masks = call.batch, call.masks
        logits = logits[:, : self.vocab_size]
        if batch.is_plain and masks is None:
            tokens = batch.filters.draw(logits, call.uniform)
            return Drawn(token_ids=tokens, _batch=batch, _host_ids=readback.take(tokens))
        unusable = readback.take(sanitize(logits))
        raw = distributions(take_rows(logits, batch.logprobs)) if batch.logprobs else None
        if raw is logits and (call.changes or masks is not None):
            raw = logits.clone()
        if batch.beam:
            # transformers' beam search applies its processors to log-probabilities; so do we.
            logits[batch.beam_rows] = torch.log_softmax(usable(take_rows(logits, batch.beam)), dim=-1)
        if masks is not None:
            ops.apply_token_bitmask(logits, masks.rows, masks.masks)
        for change in call.changes:
            change(logits)
        impossible = readback.take(sanitize(logits)) if call.changes or masks is not None else None

        tokens = batch.filters.draw(logits, call.uniform)
        drawn = Drawn(
            token_ids=tokens,
            _batch=batch,
            _host_ids=readback.take(tokens),
            _unusable=unusable,
            _impossible=impossible,
        )
        if raw is not None:
            self._report(raw, tokens, drawn, readback)
        if batch.beam:
            num_best = [batch.states[i].num_candidates for i in batch.beam]
            drawn._candidates = best_tokens(take_rows(logits, batch.beam), num_best, readback)
        return drawn

    def _report(self, raw: torch.Tensor, tokens: torch.Tensor, drawn: Drawn, readback: Readback) -> None:
        """Logprobs of the rows in `batch.logprobs`, from `raw` [len(batch.logprobs), vocab_size]."""
        batch = drawn._batch
        # Where nothing is possible the token is -1; what is told of it is dropped.
        chosen = take_rows(tokens, batch.logprobs).clamp(min=0)
        drawn._logprobs = chosen_logprobs(raw, chosen, readback)
        asked = [place for place, i in enumerate(batch.logprobs) if batch.states[i].params.logprobs is not None]
        if asked:
            num_top = [batch.states[i].params.logprobs or 0 for i in batch.top_logprobs]
            drawn._top_logprobs = token_logprobs(take_rows(raw, asked), take_rows(chosen, asked), num_top, readback)


def _true_places(is_true: torch.Tensor) -> list[int]:
    return is_true.nonzero().flatten().tolist()

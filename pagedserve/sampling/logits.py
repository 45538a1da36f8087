"""Changes to logits that depend on a request's wishes and on its tokens so far.

Each processor is built for the rows that need it and changes logits in place. None reads or writes another row, and
ids outside the vocabulary are dropped when a processor is built, so that none can reach a neighbour's logits (C033).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagedserve.kernels import ops
from pagedserve.kernels.reference_sampling import usable
from pagedserve.sampling.gpu_penalties import GpuPenalties
from pagedserve.sampling.transfers import to_device

if TYPE_CHECKING:
    from pagedserve.sampling.batch import SamplingState, TokenHistory


# A change that is made to logits [batch, vocab_size] in place.
Change = Callable[[torch.Tensor], None]


def sanitize(logits: torch.Tensor) -> torch.Tensor:
    """Makes `logits` [num_rows, vocab_size] usable in place: NaN counts as -inf, +inf as a huge number.

    Returns which rows have nothing usable in them, bool [num_rows]; they are set to zero so that nothing later meets a
    NaN. On GPUs the logits stay as they are: its kernels take each number for what it counts as.
    """
    if ops.on_gpu(logits.device):
        return torch.isneginf(ops.best_logits(logits))
    # amax carries NaN and +inf up, so one cheap pass clears the usual batch.
    best = logits.amax(dim=-1)
    if bool(torch.isfinite(best).all()):
        return torch.zeros_like(best, dtype=torch.bool)
    logits.copy_(usable(logits))
    is_unusable = torch.isneginf(logits.amax(dim=-1))
    logits.masked_fill_(is_unusable.unsqueeze(1), 0.0)
    return is_unusable


class TokenCounts:
    """The distinct tokens of one sequence and how often each was generated; sparse, and brought up to date lazily."""

    def __init__(self, num_prompt_tokens: int, vocab_size: int, with_prompt: bool) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = vocab_size
        self._num_seen = 0 if with_prompt else num_prompt_tokens
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float32)

    @property
    def ids(self) -> np.ndarray:
        """int64 [num_distinct]: tokens of prompt (if asked for) and output."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """float32 [num_distinct]: how often each stands in the output."""
        return self._counts[: len(self._place)]

    def catch_up(self, token_ids: np.ndarray) -> None:
        """Counts the tokens of `token_ids` (all of the sequence) that it has not seen yet."""
        start, end = self._num_seen, len(token_ids)
        if end <= start:
            return
        self._num_seen = end
        split = min(max(self._num_prompt_tokens, start), end)
        if end - start == 1:
            # A decode step; it need not pay for what a long prompt needs.
            self._add(int(token_ids[start]), end - split)
            return
        for part, weight in ((token_ids[start:split], 0), (token_ids[split:end], 1)):
            for token_id, count in zip(*(a.tolist() for a in np.unique(part, return_counts=True)), strict=True):
                self._add(token_id, weight * count)

    def copy(self) -> TokenCounts:
        other = TokenCounts(self._num_prompt_tokens, self._vocab_size, with_prompt=True)
        other._num_seen = self._num_seen
        other._place = dict(self._place)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    def _add(self, token_id: int, count: int) -> None:
        if token_id >= self._vocab_size:
            return
        place = self._place.get(token_id)
        if place is not None:
            self._counts[place] += count
            return
        place = self._place[token_id] = len(self._place)
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[place], self._counts[place] = token_id, count


class LogitsProcessor(ABC):
    """One wish, for the rows of a batch that have it."""

    @staticmethod
    @abstractmethod
    def applies(state: SamplingState) -> bool:
        """Whether a row needs this processor at some point of its life."""

    @abstractmethod
    def __init__(self, rows: list[int], states: list[SamplingState], vocab_size: int, device: torch.device) -> None: ...

    @abstractmethod
    def prepare(self, history: TokenHistory) -> Change:
        """What to do to logits that follow these tokens, in its own rows only. The logits may not be there yet."""


def _known(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    return [t for t in token_ids if 0 <= t < vocab_size]


def _index(rows: Sequence[int], ids: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs (row, id) for every id of every row: the index of their logits, two int64 tensors of one length."""
    row_index = np.repeat(np.asarray(rows, dtype=np.int64), [len(x) for x in ids])
    id_index = np.fromiter((t for x in ids for t in x), dtype=np.int64, count=len(row_index))
    return to_device(row_index, device, torch.int64), to_device(id_index, device, torch.int64)


class LogitBias(LogitsProcessor):
    """Adds the request's bias to the named tokens' logits."""

    @staticmethod
    def applies(state: SamplingState) -> bool:
        return bool(state.params.logit_bias)

    def __init__(self, rows: list[int], states: list[SamplingState], vocab_size: int, device: torch.device) -> None:
        biases = [s.params.logit_bias or {} for s in states]
        ids = [_known(list(b), vocab_size) for b in biases]
        self._where = _index(rows, ids, device)
        values = [b[t] for b, known in zip(biases, ids, strict=True) for t in known]
        self._values = to_device(values, device, torch.float32)

    def prepare(self, history: TokenHistory) -> Change:
        return self._apply

    def _apply(self, logits: torch.Tensor) -> None:
        logits[self._where] += self._values


class AllowedTokens(LogitsProcessor):
    """Leaves only the tokens that the request allows."""

    @staticmethod
    def applies(state: SamplingState) -> bool:
        return state.params.allowed_token_ids is not None

    def __init__(self, rows: list[int], states: list[SamplingState], vocab_size: int, device: torch.device) -> None:
        ids = [_known(s.params.allowed_token_ids or (), vocab_size) for s in states]
        self._rows = to_device(rows, device, torch.int64)
        self._where = _index(rows, ids, device)

    def prepare(self, history: TokenHistory) -> Change:
        return self._apply

    def _apply(self, logits: torch.Tensor) -> None:
        allowed = logits[self._where]
        logits[self._rows] = -torch.inf
        logits[self._where] = allowed


class BadWords(LogitsProcessor):
    """Forbids the token that would complete a bad word; the tokens before it stay possible (C034)."""

    @staticmethod
    def applies(state: SamplingState) -> bool:
        return bool(state.params.bad_words_token_ids)

    def __init__(self, rows: list[int], states: list[SamplingState], vocab_size: int, device: torch.device) -> None:
        self._device = device
        words = [[w for w in s.params.bad_words_token_ids if w and 0 <= w[-1] < vocab_size] for s in states]
        self._single = _index(rows, [[w[0] for w in row if len(w) == 1] for row in words], device)
        # Phrases under the token before their last one: a step looks only at those that the last token could precede.
        self._phrases: list[tuple[int, dict[int, list[tuple[int, ...]]]]] = []
        for row, row_words in zip(rows, words, strict=True):
            by_last: dict[int, list[tuple[int, ...]]] = {}
            for word in row_words:
                if len(word) > 1:
                    by_last.setdefault(word[-2], []).append(word)
            if by_last:
                self._phrases.append((row, by_last))

    def prepare(self, history: TokenHistory) -> Change:
        where = [self._single]
        ends = [(row, self._ends(by_last, history.of(row))) for row, by_last in self._phrases]
        if any(ids for _, ids in ends):
            where.append(_index([row for row, _ in ends], [ids for _, ids in ends], self._device))
        return partial(_forbid, where)

    @staticmethod
    def _ends(by_last: dict[int, list[tuple[int, ...]]], tokens: np.ndarray) -> list[int]:
        """The last tokens of phrases whose other tokens stand at the end."""
        phrases = by_last.get(int(tokens[-1]), ()) if len(tokens) else ()
        return [word[-1] for word in phrases if tuple(tokens[-(len(word) - 1) :].tolist()) == word[:-1]]


class MinTokens(LogitsProcessor):
    """Forbids every token that would end the sequence before it has `min_tokens` output tokens."""

    @staticmethod
    def applies(state: SamplingState) -> bool:
        # Where a grammar says what may come, its masks see to it: they know whether anything else is left.
        return state.params.min_tokens > 0 and state.params.structured_output is None

    def __init__(self, rows: list[int], states: list[SamplingState], vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rows = np.asarray(rows, dtype=np.int64)
        self._min_lengths = np.array([s.num_prompt_tokens + s.params.min_tokens for s in states], dtype=np.int64)
        self._ids = [_known(s.end_token_ids, vocab_size) for s in states]

    def prepare(self, history: TokenHistory) -> Change:
        short = np.flatnonzero(history.lengths[self._rows] < self._min_lengths).tolist()
        ids = [self._ids[i] for i in short]
        return partial(_forbid, [_index(self._rows[short], ids, self._device)] if short else [])


class Penalties(LogitsProcessor):
    """Repetition penalty on tokens of prompt and output (Keskar et al. 2019, as transformers does: positive logits are
    divided, negative ones multiplied), then presence and frequency penalties on output tokens (the OpenAI formula:
    logit - frequency * count - presence * [count > 0])."""

    @staticmethod
    def applies(state: SamplingState) -> bool:
        p = state.params
        return p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0

    def __init__(self, rows: list[int], states: list[SamplingState], vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._rows = np.asarray(rows, dtype=np.int64)
        self._states = states
        self._vocab_size = vocab_size
        self._repetition = np.array([s.params.repetition_penalty for s in states], dtype=np.float32)
        self._presence = np.array([s.params.presence_penalty for s in states], dtype=np.float32)
        self._frequency = np.array([s.params.frequency_penalty for s in states], dtype=np.float32)
        self._on_gpu = GpuPenalties(self._rows, states, device) if ops.on_gpu(device) else None

    def prepare(self, history: TokenHistory) -> Change:
        if self._on_gpu is not None:
            return self._on_gpu.prepare(history)
        counted = []
        for row, state in zip(self._rows.tolist(), self._states, strict=True):
            if state.token_counts is None:
                state.token_counts = TokenCounts(
                    state.num_prompt_tokens, self._vocab_size, with_prompt=state.params.repetition_penalty != 1.0
                )
            state.token_counts.catch_up(history.of(row))
            counted.append(state.token_counts)
        lengths = [len(c.ids) for c in counted]
        counts = np.concatenate([c.counts for c in counted])
        subtract = np.repeat(self._frequency, lengths) * counts + np.repeat(self._presence, lengths) * (counts > 0)
        return partial(
            _penalize,
            (
                to_device(np.repeat(self._rows, lengths), self._device, torch.int64),
                to_device(np.concatenate([c.ids for c in counted]), self._device, torch.int64),
            ),
            to_device(np.repeat(self._repetition, lengths), self._device, torch.float32),
            to_device(subtract.astype(np.float32), self._device, torch.float32),
        )


def _forbid(where: list[tuple[torch.Tensor, torch.Tensor]], logits: torch.Tensor) -> None:
    for index in where:
        logits[index] = -torch.inf


def _penalize(
    where: tuple[torch.Tensor, torch.Tensor],  # int64 [n] each: rows and tokens
    repetition: torch.Tensor,  # [n]
    subtract: torch.Tensor,  # [n]
    logits: torch.Tensor,  # [batch, vocab_size]
) -> None:
    values = logits[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[where] = values - subtract


# In the order in which they act.
PROCESSORS: tuple[type[LogitsProcessor], ...] = (LogitBias, AllowedTokens, BadWords, MinTokens, Penalties)

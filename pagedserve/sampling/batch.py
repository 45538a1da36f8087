"""What the sampler knows of the rows it samples: one SamplingState a live sequence, one SamplingBatch a membership."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from pagedserve.sampling.filters import Filters
from pagedserve.sampling.logits import PROCESSORS, LogitsProcessor, TokenCounts
from pagedserve.sampling.transfers import to_device
from pagedserve.sampling.uniform import stream_of
from pagedserve.sampling_params import SamplingParams


@dataclass(slots=True, eq=False)
class SamplingState:
    """The sampler's view of one sequence; lives as long as its row."""

    params: SamplingParams
    seed: int
    choice_index: int
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    # Made by the penalties on first use and kept up to date by them: most rows never need it.
    token_counts: TokenCounts | None = None

    @property
    def stream(self) -> int:
        return stream_of(self.seed, self.choice_index)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Every id that could end the sequence: all of the model's, and the request's own (C012)."""
        return tuple(dict.fromkeys(self.eos_token_ids + self.params.stop_token_ids))

    @property
    def wants_logprob(self) -> bool:
        """Whether the drawn token's logprob is reported, or needed to choose the best of several."""
        return self.params.logprobs is not None or self.params.num_sequences > self.params.n

    @property
    def num_candidates(self) -> int:
        """Continuations that beam search looks at per beam: as transformers, so many that `width` go on living even
        where each beam's likeliest tokens all end it."""
        assert self.params.beam is not None
        return max(2, 1 + len(self.eos_token_ids)) * self.params.beam.width

    def fork(self, choice_index: int) -> SamplingState:
        """The state of a child that has the same tokens and draws from its own stream."""
        counts = self.token_counts.copy() if self.token_counts is not None else None
        return SamplingState(
            self.params, self.seed, choice_index, self.num_prompt_tokens, self.eos_token_ids, token_counts=counts
        )


@dataclass(slots=True)
class TokenHistory:
    """The tokens of the rows of a batch, as a view into wherever they are kept."""

    token_ids: np.ndarray  # int32 [num_kept, capacity]
    rows: np.ndarray  # int64 [batch]: where in token_ids
    lengths: np.ndarray  # int64 [batch]

    def of(self, i: int) -> np.ndarray:
        """Prompt and output of batch row i, int32 [length]; a view, not to be written."""
        return self.token_ids[self.rows[i], : self.lengths[i]]


@dataclass(slots=True)
class TokenMasks:
    """The tokens that are possible in some rows of a batch, as structured output has it."""

    rows: torch.Tensor  # int64 [num_masked]: places in the batch
    masks: torch.Tensor  # int32 [num_masked, num_words]: bit t % 32 of word t // 32 is token t

    @classmethod
    def unpack(cls, places: list[int], masks: bytes | bytearray, device: torch.device) -> TokenMasks:
        """From `step.SamplingInput.token_masks`, one row of words for each of `places`."""
        words = np.frombuffer(masks, dtype=np.int32).reshape(len(places), -1)
        if not words.flags.writeable:
            words = words.copy()  # torch knows no tensors that cannot be written
        return cls(to_device(places, device, torch.int64), to_device(words, device, torch.int32))


class SamplingBatch:
    """The rows of one sampling call, split by what they need. Valid as long as the same rows are sampled."""

    def __init__(self, states: list[SamplingState], vocab_size: int, device: torch.device) -> None:
        self.states = states
        self.num_prompt_tokens = np.array([s.num_prompt_tokens for s in states], dtype=np.int64)
        self.beam = [i for i, s in enumerate(states) if s.params.beam is not None]
        self.beam_rows = to_device(self.beam, device, torch.int64)
        self.filters = Filters([s.params for s in states], [s.stream for s in states], vocab_size, device)
        self.logprobs = [i for i, s in enumerate(states) if s.wants_logprob and s.params.beam is None]
        self.top_logprobs = [i for i in self.logprobs if states[i].params.logprobs is not None]
        self.processors: list[LogitsProcessor] = []
        for kind in PROCESSORS:
            members = [i for i, s in enumerate(states) if kind.applies(s)]
            if members:
                self.processors.append(kind(members, [states[i] for i in members], vocab_size, device))
        # Nothing but a token is wanted of any row, and nothing stands between its logits and the draw.
        self.is_plain = not (self.beam or self.logprobs or self.processors)

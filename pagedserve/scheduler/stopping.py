"""When a sequence ends by itself: a stop token, or a length. (Stop strings are found where text is, in the front.)"""

from __future__ import annotations

from pagedserve.sequence import FinishReason, Request, Sequence


class StopRule:
    """One request's rule. `token_ids` and `max_len` are what a step looks at; `reason` decides.

    `max_len` counts prompt and output together. Without max_tokens only the model's length ends a sequence.
    """

    __slots__ = ("_eos_token_ids", "_min_len", "max_len", "token_ids")

    def __init__(self, request: Request, max_model_len: int):
        params = request.sampling_params
        num_prompt_tokens = len(request.prompt_token_ids)
        self._eos_token_ids = frozenset() if params.ignore_eos else frozenset(request.eos_token_ids)
        self.token_ids = self._eos_token_ids | frozenset(params.stop_token_ids)
        self._min_len = num_prompt_tokens + params.min_tokens
        self.max_len = max_model_len
        if params.max_tokens is not None:
            self.max_len = min(max_model_len, num_prompt_tokens + params.max_tokens)

    def stops(self, token_id: int, length: int) -> bool:
        """Whether `token_id`, the last of `length` tokens, is a stop token where one may stand."""
        return token_id in self.token_ids and length > self._min_len

    def stop_reason(self, token_id: int) -> int | None:
        """What the API calls stop_reason: None for the model's own end, else the token."""
        return None if token_id in self._eos_token_ids else token_id

    def reason(self, sequence: Sequence) -> FinishReason | None:
        """Why the sequence ends with its last token; None where it goes on."""
        length = len(sequence.token_ids)
        if self.stops(sequence.token_ids[-1], length):
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_len else None

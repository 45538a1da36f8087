"""`/v1/completions`: the request and its answer."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from pydantic import Field, field_validator

from pagedserve.api.protocol.common import GenerationRequest, Usage
from pagedserve.errors import RequestError

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
# Sequences of one HTTP request, over all its prompts: more would hold up the loop that answers everybody.
MAX_SEQUENCES = 8192


class CompletionRequest(GenerationRequest):
    """Continue prompts. Null fields count as absent."""

    PARAM_NAMES: ClassVar[dict[str, str]] = {}

    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: int | None = Field(None, description="choices to compute; the n most likely are returned")
    logprobs: int | None = Field(None, description="likely tokens to report beside each token")

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _check_prompt(cls, value: Any, _: Any) -> Any:
        # By hand: pydantic would report every arm of the union, and take a list of a million entries apart first.
        if isinstance(value, str):
            return value
        if not isinstance(value, list) or not value:
            raise ValueError("prompt must be a string, a list of strings, a list of token ids, or a list of such lists")
        if _are_ids(value):
            return value
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"prompt may hold at most {MAX_PROMPTS} prompts, not {len(value)}")
        if all(isinstance(entry, str) for entry in value):
            return value
        if all(isinstance(entry, list) and entry and _are_ids(entry) for entry in value):
            return value
        raise ValueError("prompt must hold strings, or token ids, or non-empty lists of token ids: one kind only")

    def check(self) -> None:
        super().check()
        n = self.n or 1
        if self.best_of is not None and self.best_of > n and self.stream:
            raise RequestError(
                "best_of above n cannot be streamed: the best are known only at the end", param="best_of"
            )
        num_prompts, num_sequences = len(self.prompts()), max(n, self.best_of or 1)
        if num_prompts > 1 and num_prompts * num_sequences > MAX_SEQUENCES:
            raise RequestError(
                f"{num_prompts} prompts of {num_sequences} sequences each are more than the {MAX_SEQUENCES} "
                "that a request may have; send several requests",
                param="n" if num_sequences == n else "best_of",
            )
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise RequestError("beam search with echo and logprobs is not supported", param="echo")

    @property
    def num_prompts(self) -> int:
        return len(self.prompts())

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each."""
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


def _are_ids(value: list[Any]) -> bool:
    return all(type(entry) is int for entry in value)


class CompletionLogprobs(msgspec.Struct):
    """Columns over tokens; offsets are characters of the choice's text."""

    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float | None] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list)


class CompletionChoice(msgspec.Struct, omit_defaults=True):
    """One continuation."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct, omit_defaults=True):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None = None
    usage: Usage | None = None

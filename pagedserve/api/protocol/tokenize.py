"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from pagedserve.api.protocol.chat import ChatTemplateFields
from pagedserve.errors import RequestError


class TokenizeRequest(ChatTemplateFields):
    """A text, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None  # type: ignore[assignment]
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raise RequestError unless exactly one of prompt and messages is given."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if self.messages is not None:
            super().check()


class DetokenizeRequest(BaseModel):
    """Token ids to turn into text; special tokens are shown."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    tokens: list[int] = Field(description="token ids")


class TokenizeResponse(msgspec.Struct, omit_defaults=True):
    """The ids that a request with this text would be given."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class ApplyTemplateResponse(msgspec.Struct):
    """The prompt as the chat template writes it."""

    prompt: str


class DetokenizeResponse(msgspec.Struct):
    """The text of the ids."""

    prompt: str

"""One answer of a conversation as events, for endpoints that have shapes of their own (Messages, Responses).

They write their request as one of /v1/chat/completions, so what that one can do, they can, and show its events.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from pagedserve.api.body import validate
from pagedserve.api.call import GenerationCall
from pagedserve.api.parsed_events import Event
from pagedserve.api.protocol.chat import ChatCompletionRequest
from pagedserve.api.protocol.common import Usage, refuse_unsupported
from pagedserve.api.routes.chat import ChatAnswer
from pagedserve.errors import RequestError
from pagedserve.outputs import CompletionOutput


def as_chat(fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatCompletionRequest:
    """A chat request from its fields, null ones left out.

    RequestError calls a field as the client did: `names` has chat's name -> the client's.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        refuse_unsupported(present, ChatCompletionRequest.model_fields)
        return validate(ChatCompletionRequest, present)
    except RequestError as error:
        raise renamed(error, names) from error


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """`error` with the field called as the client called it."""
    first, dot, rest = (error.param or "").partition(".")
    if first in names:
        error.message = error.message.replace(first, names[first])
        error.param = names[first] + dot + rest
    return error


class Turn:
    """The answer to a chat request with one choice. Once `events` has ended, why it ended is known."""

    def __init__(self, call: GenerationCall[ChatCompletionRequest], names: Mapping[str, str]):
        self._names = names
        try:
            self._answer = ChatAnswer(call, call.state.ready_engine())
        except RequestError as error:
            raise renamed(error, names) from error
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    async def events(self) -> AsyncGenerator[tuple[list[Event], CompletionOutput], None]:
        """What is new, and the engine's output that it was taken from. Raises what the engine raises."""
        try:
            async with aclosing(self._answer.outputs()) as stream:
                async for output in stream:
                    for choice in output.outputs:
                        events, self.finish_reason = self._answer.parts(choice)
                        self.stop_reason = choice.stop_reason
                        yield events, choice
        except RequestError as error:
            raise renamed(error, self._names) from error

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._answer.usage()
